"""An answer with its ids beside it, taken apart as strictly as by who passes it on; and the body that goes on with it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longcat_pd.wire import unpack
from tests.answer_parts import differences, joined, parts_of

IDS, RESUME = {"X-Longcat-Failover": "ids"}, {"X-Longcat-Failover": "resume"}
ORIGIN = {"seed", "created", "prompt_digest"}

Event = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """Events that are passed on together, and the ids that they take."""

    events: list[Event]
    ids: list[int]


@dataclass
class Told:
    """``groups`` before the one that ends the answer; ``ending``: its events, and what follows.

    Of a whole answer the groups have no events, and the ending is the answer.
    """

    origin: dict[str, Any] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    ending: list[Event] = field(default_factory=list)

    def ids(self, num_groups: int) -> list[int]:
        return [token_id for group in self.groups[:num_groups] for token_id in group.ids]

    def events(self, num_groups: int) -> list[Event]:
        return [event for group in self.groups[:num_groups] for event in group.events]

    @property
    def all_events(self) -> list[Event]:
        return self.events(len(self.groups)) + self.ending

    def resumed(self, fields: Mapping[str, Any], num_groups: int) -> dict[str, Any]:
        """The body of the leg that goes on behind so many groups."""
        return {**fields, "resume": {"token_ids": self.ids(num_groups), **self.origin}}


def read_told(content: bytes, *, is_stream: bool) -> Told:
    *blocks, end, rest = content.decode().split("\n\n")
    assert rest == "", content[-200:]
    told, open_events = Told(), list[Event]()
    for number, block in enumerate(blocks):
        lines = block.split("\n")
        if not number:
            told.origin = json.loads(lines.pop(0).removeprefix(": answer "))
            assert set(told.origin) == ORIGIN
        ids = _ids(lines.pop(0)) if lines and lines[0].startswith(": ids") else None
        if not lines:
            assert not is_stream and ids is not None
            told.groups.append(Group([], ids))
            continue
        assert len(lines) == 1 and lines[0].startswith("data: "), block
        event = json.loads(lines[0].removeprefix("data: "))
        open_events.append(event)
        if told.ending or any(choice["finish_reason"] for choice in event["choices"]):
            told.ending += open_events
            open_events = []
        elif ids is not None:
            told.groups.append(Group(open_events, ids))
            open_events = []
    assert not open_events and told.ending
    _check_usage(end, told.ending[-1])
    return told


def _check_usage(end: str, last: Event) -> None:
    """Before the end stands what the answer cost; where the client is told as well, it is the same."""
    line, done = end.split("\n")
    assert done == "data: [DONE]" and line.startswith(": usage "), end
    usage = json.loads(line.removeprefix(": usage "))
    assert last.get("usage", usage) == usage


def _ids(line: str) -> list[int]:
    assert line.startswith(": ids "), line
    return list(unpack(base64.b64decode(line.removeprefix(": ids "), validate=True)))


def read_plain(content: bytes) -> list[Event]:
    """The events of a stream without a comment but that on its usage."""
    *events, end, rest = content.decode().split("\n\n")
    assert rest == "", content[-200:]
    assert all(event.startswith("data: ") for event in events), content
    told = [json.loads(event.removeprefix("data: ")) for event in events]
    _check_usage(end, told[-1])
    return told


def steady_parts(answer: Event) -> dict[str, Any]:
    """All that a client sees but the ids of tool calls; with the time."""
    parts = parts_of(answer)
    calls = [[call["function"] for call in found or []] for found in parts["calls"]]
    return {**parts, "calls": calls, "created": answer["created"]}


def changed(one: Sequence[Event], other: Sequence[Event]) -> set[str]:
    """Between two streams with ``include_usage``, what is not the same for a client."""
    for chunks in (one, other):
        assert len({chunk["created"] for chunk in chunks}) == 1
        openings = [chunk for chunk in chunks for choice in chunk["choices"] if "role" in choice.get("delta", {})]
        assert len(openings) == (chunks[0]["object"] == "chat.completion.chunk")
    return differences(steady_parts(joined(one)), steady_parts(joined(other)))
