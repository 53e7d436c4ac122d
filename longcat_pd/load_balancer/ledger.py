"""What is known of one answer besides its text, so that another pair can go on with it. Pure.

Owns the field that a resumed call carries. Knows neither pairs nor clients.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from longcat_pd.load_balancer.events import Event, Origin

_BLANK = b" \t\n\r"  # what may stand around a JSON text


class Ledger:
    """Of one attempt: the origin of the answer, and the ids of all that the client has, or would have of a whole answer."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self._origin: Origin | None = None

    @property
    def can_go_on(self) -> bool:
        """Whether enough is known for another pair to go on; without ids it makes the same answer from its beginning."""
        return self._origin is not None

    def note(self, group: Sequence[Event]) -> None:
        """These events are passed on."""
        for event in group:
            self._origin = event.origin or self._origin
            self.ids += event.ids or ()

    def added_to(self, body: bytes) -> bytes:
        """``body``, a JSON object, byte for byte, with ``resume`` as its last field."""
        assert self._origin is not None
        resume = {
            "token_ids": self.ids,
            "seed": self._origin.seed,
            "created": self._origin.created,
            "prompt_digest": self._origin.prompt_digest,
        }
        field = b'"resume":' + json.dumps(resume, separators=(",", ":")).encode()
        end = body.rstrip(_BLANK)
        fields = end[:-1].rstrip(_BLANK)
        comma = b"" if fields.endswith(b"{") else b","
        return end[:-1] + comma + field + body[len(end) - 1 :]
