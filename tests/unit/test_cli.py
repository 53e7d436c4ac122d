"""The table of commands: the right function gets the rest of the line, and nothing is loaded before it is chosen."""

from __future__ import annotations

import signal
import subprocess
import sys
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from longcat_pd import cli


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    seen: list[list[str]] = []

    def entry(arguments: Sequence[str]) -> int:
        seen.append(list(arguments))
        return 7

    module = types.ModuleType("longcat_pd_stand_in")
    module.__dict__["entry"] = entry
    monkeypatch.setitem(sys.modules, "longcat_pd_stand_in", module)
    table = {"go": cli.Command("longcat_pd_stand_in", "entry", "goes"), "no": cli.Command("longcat_pd_missing", "x", "y")}
    monkeypatch.setattr(cli, "COMMANDS", table)
    return seen


def test_the_rest_of_the_line_goes_to_the_command_and_its_status_comes_back(calls: list[list[str]]) -> None:
    assert cli.main(["go", "--model", "DIR", "go"]) == 7
    assert calls == [["--model", "DIR", "go"]]


READS_AND_SAYS = "print(sys.stdin.read(), *given)"
BEGINS_AND_READS = "print('begun', flush=True) or sys.stdin.read()"


def doing(what: str, *given: str) -> list[str]:
    """A process with one command."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r}); from longcat_pd import cli; "
    table = "{'go': cli.Command('builtins', 'do', '')}"
    code += f"import builtins; builtins.do = lambda given: {what} or 3; "
    code += f"cli.COMMANDS = {table}; sys.exit(cli.main(['go', *sys.argv[1:]]))"
    return [sys.executable, "-c", code, *given]


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    """``longcat-pd … | head``, also where the rest is told at the very end."""
    for length in (10, 100_000):
        child = subprocess.Popen(
            doing(READS_AND_SAYS, "x" * length),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        child.stdout.close()
        child.stdin.close()
        said = child.stderr.read()
        child.stderr.close()
        assert (child.wait(timeout=60), said) == (0, "")


@pytest.mark.parametrize("length", [10, 100_000])
def test_a_full_disk_is_told_in_a_line(length: int) -> None:
    command = doing(READS_AND_SAYS, "x" * length)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (1, "error: nothing more can be written: No space left on device\n")


def test_an_interrupt_is_told_in_a_word_and_seen_as_the_end() -> None:
    with subprocess.Popen(
        doing(BEGINS_AND_READS), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None and child.stderr is not None
        assert child.stdout.readline() == "begun\n"
        child.send_signal(signal.SIGINT)
        assert child.stderr.read() == "interrupted\n"
    assert child.returncode == -signal.SIGINT


@pytest.mark.parametrize(("given", "status"), [([], 2), (["--help"], 0), (["fly"], 2)])
def test_what_is_no_command_shows_the_table(
    calls: list[list[str]], capsys: pytest.CaptureFixture[str], given: list[str], status: int
) -> None:
    assert cli.main(given) == status
    shown = capsys.readouterr()
    assert "goes" in shown.out + shown.err
    assert calls == []
