"""The facts of a cluster as something that rich prints: pure, of any width from 60 columns on.

Owns how facts look in a terminal. What is wrong stands there in the balancer's own words, and a colour never says what no
word says. Knows neither the network nor a terminal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from longcat_pd.top.phases import lines_of_request, milliseconds

REQUESTS, CHANGES = 8, 5  # that are shown, the latest first

_STYLES: Mapping[str, str] = {
    "ok": "green",
    "in": "green",
    "silent": "yellow",
    "drained": "yellow",
    "warning": "yellow",
    "lost": "bold red",
    "out": "bold red",
    "error": "bold red",
    "gone": "dim",
    "unknown": "dim",
}
_FRESH_S = 3.0  # an instance is asked each second


def picture(facts: Mapping[str, Any], *, remark: str = "") -> RenderableType:
    """All of a snapshot, the most urgent first. ``remark``: what is to be said of the connection."""
    facts = _printable(facts)
    parts: list[RenderableType] = [_headline(facts)]
    parts += [_styled(remark, "error")] if remark else []
    parts += [*_wrong(facts["wrong"])]
    for role in ("prefill", "decode"):
        instances = [one for one in facts["instances"] if one["role"] == role]
        parts.append(_title(f"{role.capitalize()} instances (of each rank: its state, blocks to be had)"))
        parts += [part for instance in instances for part in _instance(instance)] or [Text("  none")]
    parts.append(_title("Recent requests (durations in ms)"))
    roles = {one["name"]: one["role"] for one in facts["instances"]}
    shown = [line for request in facts["requests"][:REQUESTS] for line in lines_of_request(request, roles)]
    parts += shown or [Text("  none yet")]
    parts.append(_title("What happened"))
    parts += [*_happened(facts["happened"][:CHANGES])] or [Text("  nothing since the balancer began")]
    return Group(*parts)


def lasting(seconds: float) -> str:
    """A duration, roughly."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _printable(value: Any) -> Any:
    """The same without what a terminal would obey: ids of requests are their clients' words."""
    if isinstance(value, dict):
        return {key: _printable(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_printable(inner) for inner in value]
    return "".join(c if c.isprintable() else "?" for c in value) if isinstance(value, str) else value


def _headline(facts: Mapping[str, Any]) -> Text:
    line = Text.assemble((f"longcat-pd {facts['version']}", "bold"), f", {facts['model']}: ")
    line.append("serving" if facts["ready"] else "not serving", _STYLES["ok" if facts["ready"] else "error"])
    return line.append(f", {_counted(facts['open'], 'open request')}")


def _title(text: str) -> Text:
    return Text(text, style="bold")


def _styled(text: str, state: str) -> Text:
    return Text(text, style=_STYLES.get(state, ""))


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _wrong(complaints: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    if not complaints:
        yield Text("Nothing is wrong.")
        return
    yield _title("What is wrong")
    for one in complaints:
        since = "" if one["since_s"] is None else f" For {lasting(one['since_s'])}."
        words = Text.assemble((f"{one['level']:<8}", _STYLES.get(one["level"], "")), one["words"], since)
        yield _hanging(words)


def _hanging(words: Text) -> RenderableType:
    return Padding(words, (0, 0, 0, 2), expand=False)


def _instance(instance: Mapping[str, Any]) -> Iterator[RenderableType]:
    ranks, state = instance["ranks"], instance["state"]
    yield Text.assemble((f"  {instance['name']}", "bold"), "  ", (_condition(instance), _STYLES.get(state, "")))
    yield _inside(Text(", ".join(_figures(instance))))
    num_lines = max(instance["stages"] * instance["groups"], 1)
    width = max(len(ranks) // num_lines, 1)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(no_wrap=True)
    grid.add_column()
    for place in range(0, len(ranks), width):
        cells = [_cell(rank) for rank in ranks[place : place + width]]
        grid.add_row(_label(instance, place // width), Columns(cells, padding=(0, 2), equal=True))
    yield _inside(grid)
    for rank in ranks:
        if remarks := _remarks(rank):
            yield _inside(_styled(f"{rank['name']}: {remarks}", rank["state"]))


def _inside(part: RenderableType) -> RenderableType:
    return Padding(part, (0, 0, 0, 4), expand=False)


def _condition(instance: Mapping[str, Any]) -> str:
    if instance["state"] == "in":
        return "in, busy" if instance["busy"] else "in"
    if instance["state"] == "drained":
        return "drained"
    if any(rank["state"] == "lost" for rank in instance["ranks"]):
        return "out: rank lost"
    return f"out: {(instance['reason'] or 'unknown').replace('_', ' ')}"


def _figures(instance: Mapping[str, Any]) -> Iterator[str]:
    """Queue, pace and links of an instance."""
    yield f"waiting {_number(instance['waiting'])}"
    yield f"running {_number(instance['running'])} of {_number(instance['slots'])}"
    pace = instance["step_ms"].get(instance["role"])
    yield f"step {milliseconds(pace)} ms" if isinstance(pace, (int, float)) else "step -"
    if instance["role"] == "decode":
        accepted = instance["accepted"]
        yield f"{'-' if accepted is None else format(accepted, '.2f')} tokens a step"
    yield f"transfers {_number(instance['transfers'])}"
    yield f"legs {instance['open_legs']}"
    if instance["breaker_open"]:
        yield "breaker open"
    heard_s = instance["heard_s"]
    if heard_s is None or heard_s >= _FRESH_S:
        yield "never heard" if heard_s is None else f"heard {lasting(heard_s)} ago"


def _number(value: object) -> str:
    return str(value) if isinstance(value, (int, float)) else "-"


def _label(instance: Mapping[str, Any], line: int) -> str:
    names = [f"stage {line // instance['groups']}"] if instance["stages"] > 1 else []
    names += [f"group {line % instance['groups']}"] if instance["groups"] > 1 else []
    return ", ".join(names)


def _cell(rank: Mapping[str, Any]) -> Text:
    """A rank in a few letters: its number, its state, the blocks to be had of all."""
    blocks = rank["blocks"]
    room = f" {blocks['free'] + blocks['cached']}/{blocks['total']}" if blocks else ""
    text = Text.assemble(f"{rank['rank']} ", (rank["state"], _STYLES.get(rank["state"], "")), room)
    text.no_wrap = True
    return text


def _remarks(rank: Mapping[str, Any]) -> str:
    """What a rank says beside its blocks; of one whose blocks are all to be had, and who waits for nobody, nothing."""
    said = [] if rank["state"] == "ok" else [rank["state"]]
    held = {state: (rank["blocks"] or {}).get(state, 0) for state in ("live", "reserved", "quarantined")}
    if any(held.values()):
        said.append("blocks " + ", ".join(f"{count} {state}" for state, count in held.items() if count))
    lanes = rank["lanes"] or {"posted": 0, "unsent": 0}
    if lanes["posted"] + lanes["unsent"]:
        said.append(f"lanes {lanes['posted']} posted, {lanes['unsent']} unsent")
    if rank["stands_in"]:
        said.append(f"waits in a collective along {rank['stands_in']}")
    if rank["waits_for"]:
        said.append(f"waits for {rank['waits_for']}")
    if rank["missed"]:
        said.append(rank["missed"])
    return "; ".join(said)


def _happened(changes: Sequence[Mapping[str, Any]]) -> Iterator[RenderableType]:
    for one in changes:
        reason = f" ({one['reason']})" if one["reason"] else ""
        yield _hanging(Text(f"{lasting(one['ago_s'])} ago: {one['target']} {one['what']}{reason}"))
