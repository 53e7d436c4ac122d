"""What the operator's machine knows of the machines of a cluster, and asks of them before anything is started."""

from __future__ import annotations

import argparse
import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from longcat_pd.cluster import __main__ as verbs
from longcat_pd.cluster import start
from longcat_pd.cluster.jobs import Row, Seen
from longcat_pd.cluster.machines import cluster_of, running_cluster_of
from longcat_pd.config.resolve import as_json
from longcat_pd.errors import ConfigError

CLUSTER = """
model: {path: /weights/far}
prefill: {engine: {num_blocks: 64}, instances: [{name: p0, http_port: 30000}]}
decode: {engine: {num_blocks: 64}, instances: [{name: d0, http_port: 31000}]}
"""


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    file = tmp_path / "cluster.yaml"
    file.write_text(CLUSTER)
    return argparse.Namespace(config=file, root=tmp_path, overrides=["hosts.path=/srv/old"])


def test_what_runs_in_another_folder_of_the_same_machine_is_asked_for(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster_of(options).memory.write(as_json(options.config, options.overrides))
    asked: list[str] = []

    def agents(begun: list[tuple[Any, Any, Any]]) -> Any:
        asked.extend(job.folder for _, _, job in begun)
        all_of_them = [SimpleNamespace(machine=machine) for machine, _, _ in begun]
        row = Row(service="d0", pid=7, is_alive=True, is_ready=True, condition="", ready_lines=())
        answers = {session: Seen(is_recorded=True, rows=(row,)) for session in map(_Hashed, all_of_them)}
        return contextlib.nullcontext(SimpleNamespace(all=list(answers), collect=lambda *_, **__: answers))

    monkeypatch.setattr(start, "Sessions", agents)
    start._refuse_what_runs_elsewhere(running_cluster_of(options), cluster_of(options))
    assert asked == [], "a start asks there itself"
    options.overrides = ["hosts.path=/srv/new"]
    with pytest.raises(ConfigError, match=r"cluster is already running: d0 \(pid 7\) on 127.0.0.1; stop it first"):
        start._refuse_what_runs_elsewhere(running_cluster_of(options), cluster_of(options))
    assert asked == ["/srv/old/run/cluster"]


def test_a_checkpoint_that_cannot_be_looked_at_here_is_left_to_its_machine(options: argparse.Namespace) -> None:
    """As in a folder that this user may not enter; root may enter all, and so has a name that no folder can have."""
    path = str(options.root / ("far" * 1000))
    options.overrides.append(f"model.path={path}")
    assert cluster_of(options).config.model.path == path


@pytest.mark.parametrize("key", ["load_balancer.host", "load_balancer.node", "decode.instances.0.nodes"])
@pytest.mark.parametrize("name", ["node1..example", "n" * 64, "caf\u00e9..", "\ud800"])
def test_a_name_that_no_machine_can_have_is_refused_with_its_key(options: argparse.Namespace, key: str, name: str) -> None:
    value = json.dumps([name] if key.endswith("nodes") else name)
    options.overrides += ["cluster_key_file=/k", "load_balancer.node=127.0.0.1", f"{key}={value}"]
    with pytest.raises(ConfigError, match="is neither an address nor a name that a machine can have") as refused:
        cluster_of(options)
    assert refused.value.message.startswith(key.replace(".0.", "[0]."))


@pytest.mark.parametrize("node", ["0.0.0.0", "'::'", "127.0.0.1"])
def test_an_address_that_each_machine_takes_for_itself_is_none_among_several(
    options: argparse.Namespace, node: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longcat_pd.cluster.machines.is_this_machine", lambda address: address != "192.0.2.1")
    nodes = [f"prefill.instances.0.nodes=[{node}]", "decode.instances.0.nodes=[192.0.2.1]", "cluster_key_file=/k"]
    options.overrides += [*nodes, "load_balancer.node=127.0.0.1"]
    with pytest.raises(ConfigError, match=r"is not this machine to 192\.0\.2\.1; name an address that they reach"):
        cluster_of(options)


def test_a_run_folder_that_cannot_be_made_is_refused(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (options.root / ".run").write_text("a file")
    session = SimpleNamespace(send=lambda order: pytest.fail("something was started"))
    monkeypatch.setattr(start, "Sessions", lambda begun: contextlib.nullcontext(session))
    monkeypatch.setattr(start, "_refuse_what_cannot_work", lambda *_: None)
    assert verbs.main(["--root", str(options.root), "start", str(options.config)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith(
        f"error: {options.root}/.run/cluster/started.yaml: what was started cannot be noted down here: "
    )
    memory = cluster_of(options).memory
    memory.clear()  # of what was never written
    (options.root / ".run").unlink()
    memory.write("text")
    memory.clear()
    assert memory.file is None


class _Hashed:
    def __init__(self, session: SimpleNamespace) -> None:
        self.machine = session.machine


@pytest.mark.parametrize("verb", ["start", "stop", "restart", "status", "logs"])
@pytest.mark.parametrize(
    "given", [["caf\udce9.yaml"], ["ok.yaml", "--model-path", "/caf\udce9"], ["ok.yaml", "--set", "log_dir=/caf\udce9"]]
)
def test_what_is_no_text_is_refused(
    verb: str, given: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Paths of other encodings; those of the machines travel as JSON."""
    assert verbs.main(["--root", str(tmp_path), verb, *given]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and shown.endswith("is not UTF-8, which paths and options have to be here\n")
    assert "caf\ufffd" in shown


@pytest.mark.parametrize("verb", ["start", "stop", "restart"])
@pytest.mark.parametrize("timeout", ["inf", "nan", "-1", "1e300", "soon"])
def test_a_time_that_cannot_be_waited_for_is_refused(verb: str, timeout: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        verbs.main([verb, "c.yaml", f"--timeout-s={timeout}"])
    assert ended.value.code == 2
    assert f"argument --timeout-s: {'invalid seconds value' if timeout == 'soon' else timeout}" in capsys.readouterr().err
