"""Whether a service is ready: its ``/ready``, and the line of its log that scripts wait for. Starts nothing."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from longcat_pd.progress.steps import Stage

READY_LINE = "The server is fired up and ready to roll!"
ASK_S = 2.0


def ask(url: str) -> tuple[int, Any]:
    """Status and JSON of ``/ready``; status 0 if there was no answer."""
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host, timeout=ASK_S)
    try:
        connection.request("GET", "/ready")
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError):
        return 0, None
    finally:
        connection.close()


def reasons(answer: Any) -> Iterator[str]:
    """The codes and details of an answer of ``/ready``."""
    for reason in answer.get("reasons", []) if isinstance(answer, dict) else []:
        yield " ".join(str(reason[key]) for key in ("code", "detail") if reason.get(key))


def start_of(answer: Any) -> tuple[Stage, ...]:
    """How far the start of a driver is, or how it went, in an answer of its ``/ready``."""
    told = answer.get("start", []) if isinstance(answer, dict) else []
    found = (Stage.of(entry) for entry in told if isinstance(entry, dict))
    return tuple(stage for stage in found if stage is not None)


def condition(status: int, answer: Any) -> str:
    """An answer of ``/ready`` as ``status`` shows it."""
    if not isinstance(answer, dict):
        return "running, no answer yet"
    ranks = answer.get("ranks")
    shown = [f"ranks {ranks['ok']}/{ranks['total']}"] if ranks else []
    shown += [f"{name} {link}" for name, link in answer.get("peers", {}).items()]
    shown += list(reasons(answer))
    return ", ".join(["ready" if status == http.client.OK else "not ready", *shown])


class LogWatch:
    """Looks through a log that grows for the line that says that its service serves."""

    def __init__(self, log: str) -> None:
        self._log = Path(log)
        self._place = 0
        self.is_ready = False

    def look(self) -> bool:
        """Whether the line has appeared since the last look."""
        if self.is_ready or not self._log.is_file():
            return False
        wanted = READY_LINE.encode()
        with self._log.open("rb") as file:
            file.seek(self._place)
            text = file.read()
        self.is_ready = wanted in text
        self._place += max(len(text) - len(wanted), 0)  # a line that is half there is seen whole next time
        return self.is_ready
