"""What a client's script and ``make test-clients`` owe each other: one JSON line for each check, on standard output.

Uses nothing but the standard library, because it is imported in the environment of each client.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

Check = Callable[[SimpleNamespace], "str | None"]
IDLE_S = 5.0


@dataclass
class Suite:
    """The checks of one client. A check takes the settings (``__main__.py`` says which) and may return a remark."""

    client: str
    version: str

    def __post_init__(self) -> None:
        self._checks: list[tuple[str, Check]] = []

    def check(self, name: str) -> Callable[[Check], Check]:
        """Register the function under a name for the table."""

        def register(function: Check) -> Check:
            self._checks.append((name, function))
            return function

        return register

    def run(self) -> int:
        """Run all with the settings of the file named first on the command line, those whose name has the second."""
        settings = SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
        chosen = sys.argv[2] if len(sys.argv) > 2 else ""
        failed = 0
        for name, function in self._checks:
            if chosen in name:
                failed += not self._run_one(name, function, settings)
        return int(failed > 0)

    def _run_one(self, name: str, function: Check, settings: SimpleNamespace) -> bool:
        began, note, ok = time.monotonic(), "", True
        try:
            note = function(settings) or ""
        except Exception as error:
            traceback.print_exc()
            note, ok = f"{type(error).__name__}: {error}"[:300], False
        line = {"client": self.client, "version": self.version, "check": name, "ok": ok, "note": note}
        sys.stdout.write(json.dumps({**line, "seconds": round(time.monotonic() - began, 2)}) + "\n")
        sys.stdout.flush()
        return ok


def same(got: Any, wanted: Any) -> None:
    """Fail unless they are equal."""
    assert got == wanted, f"{got!r} is not {wanted!r}"


def failed(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    """What ``call`` raised, which must be of exactly this class."""
    try:
        got = call()
    except kind as error:
        assert type(error) is kind, f"{type(error).__name__} is only a kind of {kind.__name__}"
        return error
    raise AssertionError(f"no {kind.__name__}, but {got!r}")


def joined(parts: Iterable[str | None]) -> str:
    """Texts that may be missing, one behind the other."""
    return "".join(part or "" for part in parts)


def wait_until_idle(settings: SimpleNamespace) -> None:
    """Fail unless every request, block and transfer is given back soon."""
    until = time.monotonic() + IDLE_S
    while not (account := _get(settings, "/debug/accounting"))["idle"]:
        assert time.monotonic() < until, account
        time.sleep(0.05)


def admin(settings: SimpleNamespace, verb: str) -> None:
    """``drain`` or ``undrain`` the server itself."""
    request = urllib.request.Request(f"{settings.url}/admin/{verb}", b"{}", _headers(settings.admin_key), method="POST")
    with urllib.request.urlopen(request, timeout=10):
        pass


def _get(settings: SimpleNamespace, route: str) -> Any:
    request = urllib.request.Request(settings.url + route, headers=_headers(settings.key))
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)


def _headers(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
