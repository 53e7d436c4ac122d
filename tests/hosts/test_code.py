"""`run_pd.sh code` over four hosts: all of them get the tree, or none does, and whoever is the reason is named."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from longcat_pd.cluster import release as release_module
from longcat_pd.cluster.code import distribute
from longcat_pd.cluster.release import NodeCode
from longcat_pd.cluster.tree import tree_of
from longcat_pd.errors import ConfigError
from tests.hosts.clusters import cluster_tree, place, write_cluster, write_code
from tests.hosts.rig import Hosts

Distribute = Callable[..., int]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_code(tmp_path / "tree")


@pytest.fixture
def code(hosts: Hosts, root: Path, tmp_path: Path) -> Distribute:
    """code(overrides …, graphs=…) -> exit status."""
    file = write_cluster(tmp_path / "cluster.yaml", cluster_tree(hosts))

    def run(*overrides: str, graphs: Path | None = None) -> int:
        return distribute(root, file, overrides=overrides, graphs=graphs)

    return run


def currents(hosts: Hosts) -> list[str]:
    """Which release each host that runs has now."""
    return [hosts.exec(number, f"readlink {place(hosts)}/current || echo none").strip() for number in range(4)]


def release(root: Path) -> str:
    return f"releases/{tree_of(root).digest}"


def test_all_hosts_get_the_tree_as_it_is(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code() == 0
    assert currents(hosts) == [release(root)] * 4
    listed = hosts.exec(3, f"cd {place(hosts)}/current/ && find . -type f -o -type l | sort").split("\n")[:-1]
    assert listed == ["./.release", "./link", "./package/module with space.py", "./pyproject.toml", "./run.sh"]
    hosts.exec(3, f"cd {place(hosts)}/current/ && test -x run.sh && test ! -x pyproject.toml && test -L link")
    assert capsys.readouterr().out.count(": 3 files sent, every file verified; Python 3.") == 4


def test_only_what_changed_is_sent_and_nothing_the_second_time(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code() == 0
    assert capsys.readouterr().out.count(": 3 files sent") == 4
    first = release(root)
    assert code() == 0
    assert capsys.readouterr().out.count("was there already") == 4
    (root / "run.sh").write_text("#!/bin/sh\necho other\n")
    assert code() == 0
    assert capsys.readouterr().out.count(": 1 files sent") == 4
    assert currents(hosts) == [release(root)] * 4
    assert hosts.exec(0, f"cat {place(hosts)}/{first}/run.sh") == "#!/bin/sh\n", "an old release stays as it was"


def test_a_mode_alone_makes_another_release(root: Path) -> None:
    before = tree_of(root).digest
    (root / "pyproject.toml").chmod(0o755)
    assert tree_of(root).digest != before


def test_old_releases_go_but_not_the_one_that_services_run_from(hosts: Hosts, root: Path, code: Distribute) -> None:
    made = []
    for number in range(4):
        (root / "run.sh").write_text(f"#!/bin/sh\n# {number}\n")
        assert code("hosts.keep_releases=1") == 0
        made.append(release(root).removeprefix("releases/"))
        if number == 0:
            hosts.write(1, f"{place(hosts)}/run/c/state.json", f'{{"tree": "{place(hosts)}/releases/{made[0]}"}}')
    kept = [set(hosts.exec(number, f"ls {place(hosts)}/releases").split()) for number in range(4)]
    assert kept == [{made[3]}, {made[0], made[3]}, {made[3]}, {made[3]}]


def test_a_full_disk_is_named_with_numbers_and_nothing_is_switched(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code() == 0
    before = currents(hosts)
    (root / "large").write_bytes(os.urandom(3 << 20))
    hosts.exec(2, f"head -c {(hosts.disk_mib - 1) << 20} /dev/zero >{hosts.disk}/filler")
    assert code() == 1
    complaint = capsys.readouterr().err
    assert f"{hosts.address(2)}: disk full: 3.0 MiB are needed in {place(hosts)}/releases, " in complaint
    assert "nothing was switched" in complaint and hosts.address(1) not in complaint
    assert currents(hosts) == before
    hosts.exec(2, f"rm {hosts.disk}/filler")
    assert code() == 0
    assert currents(hosts) == [release(root)] * 4


def test_a_disk_that_fills_while_it_is_copied(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    look = NodeCode.look
    monkeypatch.setattr(NodeCode, "look", lambda node: replace(look(node), free_bytes=1 << 40))
    (root / "large").write_bytes(os.urandom(3 << 20))
    hosts.exec(2, f"head -c {(hosts.disk_mib - 1) << 20} /dev/zero >{hosts.disk}/filler")
    assert code() == 1
    assert f"{hosts.address(2)}: disk full while it was copied" in capsys.readouterr().err
    assert currents(hosts) == ["none"] * 4


def test_a_disk_that_may_not_be_written(hosts: Hosts, code: Distribute, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.exec(1, f"mount -o remount,ro {hosts.disk}")
    try:
        assert code() == 1
    finally:
        hosts.exec(1, f"mount -o remount,rw {hosts.disk}")
    complaint = capsys.readouterr().err
    assert f"{hosts.address(1)}: mkdir: cannot create directory" in complaint and "Read-only file system" in complaint
    assert currents(hosts) == ["none"] * 4


def test_what_an_interrupted_copy_left_goes_the_next_time(hosts: Hosts, root: Path, code: Distribute) -> None:
    assert code() == 0
    hosts.write(0, f"{place(hosts)}/releases/.incoming/half", "of it")
    hosts.write(0, f"{place(hosts)}/releases/.damaged/half", "of it")
    (root / "run.sh").write_text("#!/bin/sh\nother\n")
    assert code() == 0
    assert currents(hosts) == [release(root)] * 4
    assert (
        hosts.exec(0, f"ls -A {place(hosts)}/releases/.incoming {place(hosts)}/releases/.damaged 2>/dev/null; true") == ""
    )
    hosts.exec(0, f"test ! -e {place(hosts)}/current/half")


def test_a_link_that_dies_while_it_is_copied(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("longcat_pd.cluster.shell.ALIVE_S", 1)
    assert code() == 0
    before = currents(hosts)
    (root / "large").write_bytes(os.urandom(48 << 20))
    sent, is_over = f"find {place(hosts)}/releases -name '.large*' -size +1M", threading.Event()

    def cut() -> None:
        """Once a part of it has come."""
        while not hosts.exec(1, sent, check=False) and not is_over.wait(0.01):
            pass
        hosts.link(1, False)

    cutting = threading.Thread(target=cut)
    cutting.start()
    try:
        assert code() == 2
    finally:
        is_over.set()
        cutting.join()
        hosts.link(1, True)
    assert f"error: {hosts.address(1)}: " in capsys.readouterr().err
    assert currents(hosts) == before


def test_a_release_that_was_changed_there_is_made_anew_unless_services_run_from_it(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code() == 0
    hosts.exec(2, f"echo more >>{place(hosts)}/current/run.sh")
    hosts.write(2, f"{place(hosts)}/run/c/state.json", f'{{"tree": "{place(hosts)}/{release(root)}"}}')
    assert code() == 1
    assert "was changed, and services that were started from it run" in capsys.readouterr().err
    hosts.exec(2, f"rm {place(hosts)}/run/c/state.json")
    assert code() == 0
    assert hosts.exec(2, f"cat {place(hosts)}/current/run.sh") == "#!/bin/sh\n"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("wrong_key", "permission denied"),
        ("unknown_host", "is not in"),
        ("changed_host", "is not the one in"),
        ("power_cut", "no answer on port 22|no route to it"),
    ],
)
def test_a_host_that_is_not_reached_is_refused_before_anything_is_copied(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str], fault: str, reason: str
) -> None:
    overrides = []
    if fault == "wrong_key":
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(root.parent / "other")], check=True)
        overrides = [f"hosts.identity_file={root.parent / 'other'}"]
    elif fault == "unknown_host":
        hosts.write_known_hosts(without=[1])
    elif fault == "changed_host":
        hosts.new_host_key(1)
    else:
        hosts.kill(1)
    assert code(*overrides) == 2
    complaint = capsys.readouterr().err
    named = [line for line in complaint.splitlines() if line.startswith("error: ")]
    assert len(named) == (4 if fault == "wrong_key" else 1)
    assert all(any(text in line for text in reason.split("|")) for line in named)
    assert fault == "wrong_key" or hosts.address(1) in named[0]
    hosts.exec(0, f"test ! -e {place(hosts)}/current")


def test_a_tool_that_is_missing_there(hosts: Hosts, code: Distribute, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.exec(3, "mkdir /run/none && touch /run/none/rsync && mount --bind /run/none/rsync $(command -v rsync)")
    try:
        assert code() == 1
    finally:
        hosts.exec(3, "umount $(command -v -p rsync || echo /usr/bin/rsync); rm -r /run/none")
    assert f"{hosts.address(3)}: rsync is missing on this machine" in capsys.readouterr().err


def test_packages_that_are_missing_are_listed(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "pyproject.toml").write_text('dependencies = [\n    "pyyaml",\n    "no-such-one>=1",\n    "nor-this",\n]\n')
    assert code() == 1
    assert capsys.readouterr().err.count("lacks no-such-one, nor-this") == 4
    assert currents(hosts) == ["none"] * 4
    assert code("hosts.python=/no/python") == 1
    assert "/no/python" in capsys.readouterr().err


def test_without_hosts_python_each_release_makes_its_own_environment(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "deploy").mkdir()
    made = 'root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"; mkdir -p "$root/.venv/bin"\n'
    made += 'echo "$extra" >"$root/.venv/extra"\n'
    link = f'printf \'#!/bin/sh\\nexec {sys.executable} "$@"\\n\' >"$root/.venv/bin/python"\n'
    link += 'chmod +x "$root/.venv/bin/python"\n'
    (root / "deploy" / "venv.sh").write_text(f"{made}{link}echo no index can be reached >&2; exit 3\n")
    assert code("hosts.python=''") == 1
    assert capsys.readouterr().err.count("no environment: no index can be reached") == 4
    assert currents(hosts) == ["none"] * 4
    (root / "deploy" / "venv.sh").write_text(made + link)
    assert code("hosts.python=''") == 0
    assert "an environment is made on each machine" in capsys.readouterr().out
    assert hosts.exec(1, f"cat {place(hosts)}/current/.venv/extra") == "cpu\n"
    assert code("hosts.python=''") == 0, "an environment does not make a release a damaged one"
    assert capsys.readouterr().out.count("was there already") == 4
    monkeypatch.setattr(release_module, "_OTHERS_INSTALL_S", 1)
    hosts.exec(1, f"flock {place(hosts)}/releases/.install sleep 30 >/dev/null 2>&1 </dev/null & sleep 0.2")
    assert code("hosts.python=''") == 1
    assert f"{hosts.address(1)}: no environment: another installation is at work in" in capsys.readouterr().err


def test_names_that_tools_could_misread_arrive(hosts: Hosts, root: Path, code: Distribute) -> None:
    names = ["#note", ";note", "-rf", "*", " blank ", 'it\'s "$(x)"', "\N{CJK UNIFIED IDEOGRAPH-65E5} \t"]
    for name in names:
        (root / name).write_text(name, encoding="utf-8")
    (root / "link ").symlink_to("run.sh ")
    assert code() == 0
    assert currents(hosts) == [release(root)] * 4
    assert hosts.exec(2, f"cat {place(hosts)}/current/'#note' {place(hosts)}/current/';note'") == "#note;note"


def start_up_file(hosts: Hosts, number: int, text: str) -> None:
    """What a shell of that host reads first; "": nothing."""
    hosts.write(number, hosts.disk / "start-up", text)
    hosts.exec(number, f"umount ~/.bashrc && mount --bind {hosts.disk}/start-up ~/.bashrc")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("printf 'hello '", "is your shell clean"), ("exit 0", "ended with exit status 0: it said nothing")],
)
def test_start_up_files_that_speak_or_end_the_shell(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str], text: str, reason: str
) -> None:
    if "bash" not in hosts.exec(1, "getent passwd root") or not Path("~/.bashrc").expanduser().exists():
        pytest.skip("the shell here reads no start-up file that a host has for itself")
    start_up_file(hosts, 1, text)
    try:
        assert code() == 1
    finally:
        start_up_file(hosts, 1, "")
        hosts.exec(1, "umount ~/.bashrc; mount --bind /dev/null ~/.bashrc")
    complaint = capsys.readouterr().err
    assert f"{hosts.address(1)}: " in complaint and reason in complaint
    assert currents(hosts) == ["none"] * 4


def test_two_at_once_are_kept_apart(hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str]) -> None:
    hosts.exec(2, f"mkdir -p {place(hosts)}/releases")
    hosts.exec(2, f"exec 9>{place(hosts)}/releases/.lock && flock -n 9 && setsid sleep 600 >/dev/null 2>&1 </dev/null &")
    assert code() == 1
    assert f"{hosts.address(2)}: another run_pd.sh code is at work" in capsys.readouterr().err
    assert currents(hosts) == ["none"] * 4
    hosts.exec(2, "kill $(ps -C sleep -o pid=)")
    assert code() == 0


def test_a_node_that_cannot_switch_takes_the_others_back(
    hosts: Hosts, root: Path, code: Distribute, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code() == 0
    before = currents(hosts)
    (root / "run.sh").write_text("#!/bin/sh\nother\n")
    fake = '#!/bin/sh\ncase "$*" in *-T*current*) echo "mv: no such luck" >&2; exit 1;; esac\nexec /bin/mv "$@"\n'
    hosts.write(1, hosts.disk / "tools" / "mv", fake)
    assert code() == 1
    assert "no such luck" in capsys.readouterr().err
    assert currents(hosts) == before


def test_compiled_graphs_go_along_if_they_are_this_users(hosts: Hosts, code: Distribute, tmp_path: Path) -> None:
    graphs = tmp_path / "graphs"
    graphs.mkdir(mode=0o700)
    (graphs / "step.graph").write_bytes(b"graph")
    cache = f"decode.engine.compile_cache={hosts.disk}/cache"
    prefill = f"prefill.engine.compile_cache={hosts.disk}/other"
    assert code(cache, prefill, graphs=graphs) == 0
    assert hosts.exec(0, f"cat {hosts.disk}/cache/step.graph") == "graph"
    assert hosts.exec(3, f"ls {hosts.disk}/other {hosts.disk}/cache 2>/dev/null; true").split() == [
        f"{hosts.disk}/other:",
        "step.graph",
    ]
    hosts.exec(0, f"chmod 777 {hosts.disk}/cache")
    assert code(cache, prefill, graphs=graphs) == 1
    (graphs / "step.graph").chmod(0o666)
    with pytest.raises(ConfigError, match=r"step\.graph is not this user's, or others can write to it"):
        code(cache, prefill, graphs=graphs)


def test_never_onto_itself(code: Distribute, root: Path) -> None:
    with pytest.raises(ConfigError, match="lies in the tree"):
        code(f"hosts.path={root}/deeper")
    with pytest.raises(ConfigError, match="holds the tree"):
        code(f"hosts.path={root.parent}")
    with pytest.raises(ConfigError, match="nothing is copied onto itself"):
        code(f"hosts.path={root}")
    (root.parent / "link").symlink_to(root)
    with pytest.raises(ConfigError, match="lies in the tree"):
        code(f"hosts.path={root.parent}/link/deeper")
    with pytest.raises(ConfigError, match=r"hosts\.path: must be set"):
        code("hosts.path=''")
