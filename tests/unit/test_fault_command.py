"""The command line of ``longcat-pd fault``: what it asks of whom, and how it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from longcat_pd.fault import command
from longcat_pd.faults import SWITCHES
from longcat_pd.top import command as top


class Asked:
    """Stands in for the network. ``answer``: status and body of each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, Any, dict[bytes, bytes]]] = []
        self.answer: tuple[int, Any] | httpx.TransportError | httpx.InvalidURL = (200, {"instance": "d0", "faults": []})
        monkeypatch.setattr(httpx, "post", self._post)

    def _post(self, url: str, *, json: Any, headers: dict[bytes, bytes], **options: Any) -> httpx.Response:
        assert options["trust_env"] is False and options["timeout"] > 0
        httpx.Request("POST", url, headers=headers)  # which can be sent
        self.calls.append((url, json, headers))
        if isinstance(self.answer, Exception):
            raise self.answer
        return httpx.Response(self.answer[0], json=self.answer[1])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


def test_a_switch_with_its_parameters_before_and_behind_it(asked: Asked, tmp_path: Path) -> None:
    told = {"instance": "d0", "name": "slow_step", "seconds": 5.0, "rank": 1}
    for arguments in (
        "--url http://h:1 --instance d0 --rank 1 slow_step --seconds 5",
        "slow_step --seconds 5 --instance d0 --rank 1 --url http://h:1",
    ):
        assert command.main(arguments.split()) == 0
    assert asked.calls == [("http://h:1/admin/fault", told, {})] * 2
    (tmp_path / "key").write_bytes("\nchéf\n".encode())
    assert command.main(["--key-file", str(tmp_path / "key"), "clear"]) == 0
    assert command.main(["clear", "lane_stall", "--instance", "p0"]) == 0
    assert command.main(["list"]) == 0
    url = "http://127.0.0.1:8081/admin/fault"
    assert asked.calls[2:] == [
        (url, {"clear": "all"}, {b"authorization": "Bearer chéf".encode()}),
        (url, {"instance": "p0", "clear": "lane_stall"}, {}),
        (url, {}, {}),
    ]


def test_the_balancer_of_a_file(asked: Asked, tmp_path: Path) -> None:
    pool = {"instances": [{"name": "p0", "http_port": 20000}]}
    tree = {"model": {"path": "."}, "load_balancer": {"port": 20500}, "prefill": pool}
    tree["decode"] = {"instances": [{"name": "d0", "http_port": 20100}]}
    (tmp_path / "c.yaml").write_text(json.dumps(tree))
    assert command.main(["list", "--config", str(tmp_path / "c.yaml")]) == 0
    assert asked.calls[0][0] == "http://127.0.0.1:20500/admin/fault"


def test_what_is_set_is_printed(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    d0 = {"instance": "d0", "faults": [{"name": "slow_step", "seconds": 5.0, "rank": 1}, {"name": "spin"}]}
    asked.answer = (200, {"instances": {"p0": {"instance": "p0", "faults": []}, "d0": d0}})
    assert command.main(["list"]) == 0
    assert capsys.readouterr().out == "p0       -\nd0       slow_step seconds=5.0 rank=1\nd0       spin\n"


def test_an_instance_that_is_gone_is_named_beside_the_others(asked: Asked, capsys: pytest.CaptureFixture[str]) -> None:
    gone = {"error": {"message": "connection refused", "code": "worker_unavailable"}}
    asked.answer = (200, {"instances": {"p0": gone, "d0": {"instance": "d0", "faults": []}}})
    assert command.main(["clear"]) == 1
    assert capsys.readouterr() == ("d0       -\n", "error: p0: connection refused\n")


def test_an_address_with_a_slash_and_an_answer_of_somebody_else(
    asked: Asked, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["--url", "http://h:1/", "list"]) == 0
    assert asked.calls[-1][0] == "http://h:1/admin/fault"
    capsys.readouterr()
    for answer in ({}, [], "x", 1, {"instances": ["p0"]}, {"instance": "d0", "faults": [1]}, {"instance": "d0"}):
        asked.answer = (200, answer)
        assert command.main(["list"]) == 1
        assert capsys.readouterr() == (
            "",
            "error: http://127.0.0.1:8081 answers with something else than the faults of a cluster\n",
        )
    monkeypatch.setattr(httpx, "post", lambda *_, **options: httpx.Response(200, text="<html>"))
    assert command.main(["list"]) == 1
    assert "something else" in capsys.readouterr().err


def test_how_it_ends_when_it_does_not_work(asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked.answer = (404, {"error": {"code": "unknown_route"}})
    assert command.main(["list"]) == 1
    assert "its file says `faults: true`" in capsys.readouterr().err
    asked.answer = httpx.ConnectError("refused")
    assert command.main(["list"]) == 1
    assert "http://127.0.0.1:8081 does not answer: refused" in capsys.readouterr().err
    asked.answer = httpx.InvalidURL("Invalid port: ':1'")
    assert command.main(["list"]) == 1
    num_calls = len(asked.calls)
    assert command.main(["spin"]) == 2
    assert "--instance is needed" in capsys.readouterr().err
    assert command.main(["list", "--key-file", str(tmp_path / "none")]) == 2
    assert command.main(["list", "--config", str(tmp_path / "none.yaml")]) == 2
    assert command.main(["relay", "--to", "nowhere"]) == 2
    assert command.main(["relay", "--to", "192.0.2.1:80"]) == 2
    assert command.main(["relay", "--to", "127.0.0.1:65536"]) == 2
    for wrong in (
        *(["slow_step", "--instance", "d0", "--seconds", seconds] for seconds in ("nan", "inf", "-1", "1e9", "x")),
        *(["relay", "--to", "127.0.0.1:9", *more] for more in (["--listen", "65536"], ["--delay", "nan"])),
        ["kill", "--instance", "d0", "--rank", "-1"],
        ["slow_step"],
        ["drop_record", "--record", "Hi"],
        ["spin", "--layer", "1"],
        ["explode"],
        [],
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(wrong)
        assert ended.value.code == 2
    assert len(asked.calls) == num_calls


def test_every_switch_has_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name, switch in SWITCHES.items():
        with pytest.raises(SystemExit):
            command.main([name, "--help"])
        said = capsys.readouterr().out
        assert all(f"--{parameter}" in said for parameter in (*switch.needs, *switch.takes)) and switch.help in said


def test_a_relay_says_where_it_listens_and_starts_without_torch() -> None:
    code = "import sys, longcat_pd.cli; sys.exit(longcat_pd.cli.main(sys.argv[1:]) or 'torch' in sys.modules)"
    arguments = [sys.executable, "-c", code, "fault", "relay", "--to", "127.0.0.1:9"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as relay:
        assert relay.stdout is not None
        line = relay.stdout.readline()
        try:
            relay.send_signal(signal.SIGINT)
            assert relay.wait(30.0) == 0
        finally:
            relay.kill()  # nothing where it has ended; else leaving this block would wait for it for ever
    assert line.startswith("127.0.0.1:") and line.endswith(" to 127.0.0.1:9\n")


def test_a_key_that_no_header_can_hold_is_refused_and_not_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Against a network where none is: nothing is asked at all."""
    file = tmp_path / "key"
    for content in ("chief-of-all".encode("utf-16"), b"guest\nchief\0-of-all", b"chief\x7f-of-all"):
        file.write_bytes(content)
        for main, words in ((command.main, ["list"]), (top.main, ["http://127.0.0.1:1", "--once"])):
            assert main([*words, "--key-file", str(file)]) == 2
            said = capsys.readouterr().err
            assert "holds a control character" in said and "chief" not in said.replace("\0", "").replace("\\x00", "")
