"""A cluster as an SVG: machines as boxes, cards in them with what they hold, and what travels between machines.

Knows the plan and shapes on a plane; the page around it is ``picture.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from xml.sax.saxutils import escape, quoteattr

from longcat_pd.plan.survey import InstancePlan, Survey
from longcat_pd.plan.units import gib, size
from longcat_pd.sizing.memory import RankMemory
from longcat_pd.sizing.placement import Place

PART_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "weights": "#4269d0",
        "n-gram tables": "#9c6b4e",
        "cache": "#3ca951",
        "index keys": "#97bbf5",
        "drafts": "#a463f2",
        "graphs": "#ff8ab7",
        "buffers": "#efb118",
        "workspace": "#ff725c",
        "process": "#9498a0",
    }
)
_CARD_WIDTH, _CARD_HEIGHT, _GAP = 28, 64, 6
_COLUMNS, _NODES_A_ROW = 8, 4
_PAD, _TITLE, _FOOT, _BETWEEN = 10, 20, 20, 26
_MARGIN, _LABEL, _UNDER = 20, 30, 46


@dataclass(frozen=True, slots=True)
class _Box:
    """A machine on the plane."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        return self.y + self.height


def drawing(plan: Survey) -> str:
    """The picture, with its own size. Every rank has one rectangle of class ``card``, named by ``data-rank``."""
    shapes: list[str] = []
    y, widest = float(_MARGIN), 0.0
    ordered = sorted(plan.instances, key=lambda instance: instance.spec.role != "prefill")  # the way of a request
    for number, instance in enumerate(ordered):
        boxes = _boxes(instance, y + _LABEL)
        shapes += _instance(instance, plan, boxes=boxes, y=y)
        y = max(box.bottom for box in boxes) + _UNDER
        widest = max(widest, *(box.x + box.width for box in boxes))
        if instance.spec.role == "prefill" and number + 1 < len(ordered) and ordered[number + 1].spec.role != "prefill":
            shapes += _handover(plan, y)
            y += _UNDER
    width, height = widest + _MARGIN, y
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img" '
            f'width="{width:g}" height="{height:g}" aria-label="machines and cards of the cluster">',
            '<defs><marker id="end" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
            '<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>',
            *shapes,
            "</svg>",
        ]
    )


def colour_of(number: int, count: int) -> str:
    """Of a stage or a group; readable on light and dark."""
    return f"hsl({round(number * 360 / max(count, 1))} 60% 42%)"


def division(instance: InstancePlan) -> tuple[str, int]:
    """What cards of one colour share, and how many such there are."""
    parallel = instance.spec.parallel
    if parallel.pp_size > 1:
        return "stage", parallel.pp_size
    return "group", parallel.dp_size


def _boxes(instance: InstancePlan, top: float) -> list[_Box]:
    per_node = instance.spec.ranks_per_node
    columns, rows = min(per_node, _COLUMNS), -(-per_node // _COLUMNS)
    width = max(columns * (_CARD_WIDTH + _GAP) - _GAP + 2 * _PAD, 200)
    height = _TITLE + rows * (_CARD_HEIGHT + _GAP) + _FOOT
    return [
        _Box(
            _MARGIN + (number % _NODES_A_ROW) * (width + _BETWEEN),
            top + (number // _NODES_A_ROW) * (height + _BETWEEN),
            width,
            height,
        )
        for number in range(max(len(instance.spec.nodes), 1))
    ]


def _instance(instance: InstancePlan, plan: Survey, *, boxes: Sequence[_Box], y: float) -> Iterator[str]:
    spec = instance.spec
    kind, count = division(instance)
    what = "a full chunk" if spec.role == "prefill" else "a full step"
    text = f"{spec.role} {spec.name}: {len(instance.ranks)} ranks, {count} {kind}{'s' if count > 1 else ''}"
    yield _text(_MARGIN, y + 18, text, kind="head")
    full = plan.usable_bytes or max(rank.total_bytes for rank in instance.ranks)
    for number, box in enumerate(boxes):
        yield f'<rect class="node" x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}" rx="6"/>'
        own = range(number * spec.ranks_per_node, (number + 1) * spec.ranks_per_node)
        node = instance.places[own.start].node
        held = plan.host_bytes.get(node, 0)
        yield _text(box.x + _PAD, box.y + 14, node, kind="name")
        if plan.usable_bytes is not None:
            yield _text(box.x + box.width - _PAD, box.y + 14, f"host memory {gib(held)} GiB", kind="end")
        for rank in own:
            yield from _card(instance, rank, box=box, place=rank - own.start, full=full)
        inside = sum(instance.travel.links[rank].inside for rank in own)
        between = sum(instance.travel.links[rank].between for rank in own)
        foot = f"{what}: {size(inside)} inside, {size(between)} out"
        yield _text(box.x + _PAD, box.bottom - 7, foot, kind="foot")
    yield from _between(instance, boxes, what)


def _card(instance: InstancePlan, rank: int, *, box: _Box, place: int, full: int) -> Iterator[str]:
    memory, where = instance.ranks[rank], instance.places[rank]
    x = box.x + _PAD + (place % _COLUMNS) * (_CARD_WIDTH + _GAP)
    y = box.y + _TITLE + (place // _COLUMNS) * (_CARD_HEIGHT + _GAP)
    kind, count = division(instance)
    colour = colour_of(where.stage if kind == "stage" else where.coordinates.get("dp", 0), count)
    name = f"{where.instance}/{rank}"
    over = " over" if memory.total_bytes > full else ""
    yield f"<g><title>{escape(_told(memory, where))}</title>"
    yield (
        f'<rect class="card{over}" data-rank={quoteattr(name)} x="{x:g}" y="{y:g}" width="{_CARD_WIDTH}" '
        f'height="{_CARD_HEIGHT}" rx="3" style="stroke:{colour}"/>'
    )
    yield f'<rect x="{x:g}" y="{y:g}" width="{_CARD_WIDTH}" height="11" rx="3" fill="{colour}"/>'
    yield _text(x + _CARD_WIDTH / 2, y + 9, str(rank), kind="rank")
    bottom, room = y + _CARD_HEIGHT - 2, _CARD_HEIGHT - 15
    for part, count_bytes in memory.parts.items():
        height = min(count_bytes / full * room, bottom - y - 13)
        if height >= 0.2:
            bottom -= height
            inner = f'x="{x + 3:g}" width="{_CARD_WIDTH - 6}" y="{bottom:.2f}" height="{height:.2f}"'
            yield f'<rect {inner} fill="{PART_COLOURS[part]}"/>'
    yield "</g>"


def _told(memory: RankMemory, where: Place) -> str:
    at = ", ".join(f"{name} {value}" for name, value in where.coordinates.items())
    parts = ", ".join(f"{name} {gib(count)}" for name, count in memory.parts.items() if count)
    layers = f"layers {where.layers.start}-{where.layers.stop - 1}"
    return f"{where.instance} rank {memory.rank}, {where.node} card {where.device}: {layers}; {at}. GiB: {parts}"


def _between(instance: InstancePlan, boxes: Sequence[_Box], what: str) -> Iterator[str]:
    """Messages as arrows; where every machine sends to every other, one line under all of them."""
    pairs = instance.travel.pairs
    if not pairs:
        return
    count = len(boxes)
    if count > 2 and len(pairs) == count * (count - 1):
        low, high = min(pairs.values()), max(pairs.values())
        each = size(high) if low == high else f"{size(low)} to {size(high)}"
        y = max(box.bottom for box in boxes) + 16
        yield f'<path class="link" d="M{boxes[0].middle:g} {y:g}H{max(box.middle for box in boxes):g}"/>'
        for box in boxes[-min(_NODES_A_ROW, count) :]:
            yield f'<path class="link" d="M{box.middle:g} {box.bottom:g}V{y:g}"/>'
        text = f"each machine sends {each} to each other in {what}, {size(sum(pairs.values()))} in all"
        yield _text(boxes[0].middle + 8, y + 15, text, kind="flow")
        return
    for (source, target), num_bytes in pairs.items():
        start, end = boxes[source], boxes[target]
        sag = 24 if source < target else 40
        ends = (
            f"{(start.middle + end.middle) / 2:g} {max(start.bottom, end.bottom) + sag:g} {end.middle - 6:g} {end.bottom:g}"
        )
        yield f'<path class="link" marker-end="url(#end)" d="M{start.middle + 6:g} {start.bottom:g}Q{ends}"/>'
        middle = (start.middle + end.middle) / 2
        yield _text(middle, max(start.bottom, end.bottom) + sag + 2, size(num_bytes), kind="mid")


def _handover(plan: Survey, y: float) -> Iterator[str]:
    chunk = max(i.spec.engine.max_num_batched_tokens for i in plan.instances if i.spec.role == "prefill")
    yield f'<path class="link wide" marker-end="url(#end)" d="M{_MARGIN + 60} {y - 14:g}V{y + _UNDER - 18:g}"/>'
    text = f"hand-over of the cache: {size(plan.token_bytes)} a token, {size(plan.token_bytes * chunk)} a full chunk"
    yield _text(_MARGIN + 76, y + 10, text, kind="flow")


def _text(x: float, y: float, text: str, *, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'
