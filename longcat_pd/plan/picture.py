"""The plan as a page of its own: findings, the picture, what every kind of rank holds, and the text of the table.

No scripts, nothing from elsewhere, light and dark; well-formed XML too.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape

from longcat_pd.plan.drawing import PART_COLOURS, colour_of, division, drawing
from longcat_pd.plan.survey import InstancePlan, Survey
from longcat_pd.plan.table import lines

_STYLE = """
:root {
  color-scheme: light dark;
  --ground: #ffffff; --ink: #1b1f24; --soft: #57606a; --line: #c4cbd3; --box: #f5f7f9; --bad: #c62828;
}
@media (prefers-color-scheme: dark) {
  :root { --ground: #14171b; --ink: #e6e9ec; --soft: #a0a8b1; --line: #464e57; --box: #1e2328; --bad: #ff7b72 }
}
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.1rem; margin-top: 2rem }
.wide-part { overflow-x: auto }
.findings li { color: var(--bad) }
.key { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .2rem 1rem }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em; border-radius: 2px }
pre { background: var(--box); border: 1px solid var(--line); border-radius: 6px; padding: .8rem }
pre { overflow-x: auto; font-size: 12.5px }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif }
svg .head { font-size: 14px; font-weight: 600 } svg .name { font-weight: 600 }
svg .end { text-anchor: end; fill: var(--soft) } svg .foot { fill: var(--soft) }
svg .rank { text-anchor: middle; font-size: 9px; fill: #fff } svg .mid { text-anchor: middle }
svg .node { fill: var(--box); stroke: var(--line) }
svg .card { fill: var(--ground); stroke-width: 1.5 } svg .card.over { stroke: var(--bad) !important; stroke-width: 3 }
svg .link { fill: none; stroke: var(--soft); stroke-width: 1.5 } svg .link.wide { stroke-width: 4 }
svg .tip { fill: var(--soft) }
"""


def page(plan: Survey, title: str) -> str:
    """The whole page."""
    return "\n".join(_page(plan, title)) + "\n"


def _page(plan: Survey, title: str) -> Iterator[str]:
    name = escape(f"Plan of {title}")
    yield "<!DOCTYPE html>"
    yield '<html lang="en" xmlns="http://www.w3.org/1999/xhtml"><head><meta charset="utf-8"/>'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
    yield f"<title>{name}</title><style>{_STYLE}</style></head><body><h1>{name}</h1>"
    if plan.findings:
        yield '<h2>Refused</h2><ul class="findings">'
        yield from (f"<li>{escape(line)}</li>" for line in plan.findings)
        yield "</ul>"
    if plan.instances:
        yield "<h2>Machines and cards</h2>"
        yield from _keys(plan)
        yield f'<div class="wide-part">{drawing(plan)}</div>'
    yield f"<h2>In words</h2><pre>{escape(chr(10).join(lines(plan)))}</pre>"
    yield "</body></html>"


def _keys(plan: Survey) -> Iterator[str]:
    """What the colours mean: of bars, and of edges."""
    used = [part for part in PART_COLOURS if plan.parts.get(part)]
    yield '<ul class="key">' + "".join(_key(PART_COLOURS[part], part) for part in used) + "</ul>"
    for instance in plan.instances:
        kind, count = division(instance)
        if count > 1:
            keys = (_key(colour_of(number, count), _label(instance, kind, number)) for number in range(count))
            yield '<ul class="key">' + "".join(keys) + "</ul>"


def _label(instance: InstancePlan, kind: str, number: int) -> str:
    return f"{instance.spec.name} {kind} {number}"


def _key(colour: str, text: str) -> str:
    return f'<li><i style="background:{colour}"></i>{escape(text)}</li>'
