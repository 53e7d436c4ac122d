"""The life of a request in phases, from the ages of its events at both of its instances. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import RenderableType
from rich.padding import Padding
from rich.text import Text

_WELL = ("stop", "length", "tool_calls")


def phases(side: Mapping[str, Any], role: str, *, end: float) -> list[tuple[str, float]]:
    """What an instance did for a request, in order: the name of each phase that has begun, and its seconds.

    ``end``: the age at which one that goes on is cut, seconds.
    """
    at: dict[str, float] = {name: age for name, age in side["events"] if age is not None}
    over = end if side["ended"] is None else side["ended"]
    spans = {
        "prefill": (
            ("waited", side["began"], at.get("offered")),
            ("offered", at.get("offered"), at.get("granted")),
            ("waited", at.get("granted"), at.get("prefill_started")),
            ("prefill", at.get("prefill_started"), at.get("prefill_ended")),
            ("cache", at.get("prefill_ended"), at.get("committed")),
        ),
        "decode": (
            ("waited", side["began"], at.get("granted")),
            ("cache", at.get("granted"), at.get("committed")),
            ("decode", at.get("first_token"), over),
        ),
    }
    return [
        (name, max(begin - (over if until is None else min(begin, until)), 0.0))
        for name, begin, until in spans.get(role, ())
        if begin is not None
    ]


def milliseconds(value: float) -> str:
    """With a decimal where it says something."""
    return f"{value:.1f}" if value < 10.0 else f"{value:.0f}"


def lines_of_request(request: Mapping[str, Any], roles: Mapping[str, str]) -> Iterator[RenderableType]:
    """A line that tells how it went, and one for each instance that has told of its part. ``roles``: by instance."""
    outcome, end = request["outcome"], request["ended"] or 0.0
    style = "green" if outcome in _WELL else "" if outcome is None else "yellow" if outcome == "cancelled" else "bold red"
    parts = [" -> ".join(request["pair"]) or "no pair", f"{1000 * (request['began'] - end):.0f}"]
    if request["first_token"] is not None:
        parts.append(f"first token after {1000 * (request['began'] - request['first_token']):.0f}")
    if request["attempt"] > 1:
        parts.append(f"attempt {request['attempt']}")
    state = "running" if outcome is None else outcome.replace("_", " ")
    line = Text.assemble((f"{state:<10}", style), "  " + ", ".join(parts), (f"  {request['id']}", "dim"))
    yield Padding(line, (0, 0, 0, 2), expand=False)
    for side in request["sides"]:
        yield Padding(Text(_of_side(side, roles.get(side["instance"], ""), end=end)), (0, 0, 0, 4), expand=False)


def _of_side(side: Mapping[str, Any], role: str, *, end: float) -> str:
    spans = ", ".join(f"{name} {milliseconds(1000 * seconds)}" for name, seconds in phases(side, role, end=end))
    noun = "chunk" if role == "prefill" else "step"
    count = f"{side['num_steps']} {noun}{'' if side['num_steps'] == 1 else 's'}"
    cached = f" ({side['cached']} cached)" if side["cached"] else ""
    tokens = f"{side['prompt']} tokens in{cached}" if role == "prefill" else f"{side['output']} tokens out"
    return f"{side['instance']}: {spans or 'nothing yet'}; {count}, {tokens}"
