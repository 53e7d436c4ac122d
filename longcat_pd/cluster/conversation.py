"""A script on a machine that is asked one thing after the other over one session.

Each question is a line, and bytes behind it if it announces them; each answer is lines that end with ``end=`` and an exit
status. Every wait has a deadline. Knows not what is asked.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import time
from collections.abc import Sequence

from longcat_pd.cluster.everywhere import StepFailed
from longcat_pd.cluster.shell import MOST_SAID, Shell, Unreachable, as_shell_shows, too_much

_END_S = 10.0
_LONGEST_END = 64  # bytes
_TOLD = re.compile(r"[a-z_]+=")
_END = re.compile(rb"(?:^|\n)end=(\d+)\n$")


class Conversation:
    """A session with one machine. Raises StepFailed for what the script says no to, and Unreachable for the link."""

    def __init__(self, shell: Shell, command: Sequence[str]) -> None:
        self._shell = shell
        self._session = shell.start(command)

    def ask(self, question: str, *, payload: bytes = b"", timeout_s: float) -> dict[str, list[str]]:
        """The answer by name, each with its values in their order."""
        assert self._session.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and what comes instead of an answer says why
            self._session.stdin.write(question.encode() + b"\n" + payload)
            self._session.stdin.flush()
        return self.hear(timeout_s)

    def hear(self, timeout_s: float) -> dict[str, list[str]]:
        """What the script says before it is asked anything."""
        said = self._until_end(time.monotonic() + timeout_s, timeout_s)
        *lines, end = said.decode(errors="replace").splitlines()
        if end != "end=0":
            words = last_words([line for line in lines if not _TOLD.match(line)])
            raise StepFailed(self._shell.node, words or f"it ended with exit status {end.removeprefix('end=')}")
        told: dict[str, list[str]] = {}
        for line in lines:
            if _TOLD.match(line):
                name, _, value = line.partition("=")
                told.setdefault(name, []).append(value)
        return told

    def close(self) -> None:
        """End it; what does not end within seconds is killed on this side, and over there notices it."""
        if self._session.stdin is not None and not self._session.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._session.stdin.close()
        try:
            self._session.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._session.kill()
            self._session.wait()
        for pipe in (self._session.stdout, self._session.stderr):
            if pipe is not None:
                pipe.close()

    def _until_end(self, deadline: float, timeout_s: float) -> bytes:
        assert self._session.stdout is not None
        said = b""
        while not _END.search(said, max(len(said) - _LONGEST_END, 0)):
            ready, _, _ = select.select([self._session.stdout], [], [], max(deadline - time.monotonic(), 0.0))
            if not ready:
                self._session.kill()
                raise Unreachable(self._shell.node, f"did not answer within {timeout_s:g} s")
            part = os.read(self._session.stdout.fileno(), 1 << 16)
            if not part:
                raise self._why_ended(said)
            said += part
            if len(said) > MOST_SAID:
                self._session.kill()
                raise Unreachable(self._shell.node, too_much(said[: 1 << 16]))
        return said

    def _why_ended(self, said: bytes) -> StepFailed | Unreachable:
        assert self._session.stderr is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._session.wait(timeout=_END_S)
        stderr = self._session.stderr.read() if self._session.returncode is not None else b""
        status = as_shell_shows(self._session.returncode or 0)
        words = last_words((said + b"\n" + stderr).decode(errors="replace").splitlines())
        return self._shell.fault(status, stderr) or StepFailed(
            self._shell.node, f"the session ended with exit status {status}: {words or 'it said nothing'}"
        )


def last_words(lines: Sequence[str]) -> str:
    """The last lines that say something, as one."""
    return " · ".join([line.strip() for line in lines if line.strip()][-3:])
