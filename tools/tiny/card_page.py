"""The card as text: Markdown for people, JSON for programs. Knows nothing of how lines come about."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tools.tiny.asking import MAX_TOKENS
from tools.tiny.asking_engine import BLOCK, CHUNK
from tools.tiny.card import CONTROL, Case
from tools.tiny.card_runs import Checkpoint, Run

ABOUT = f"""Made by `python -m tools.eval_tiny`. Temperature 0, at most {MAX_TOKENS} tokens an answer, blocks of {BLOCK} \
tokens, prefill chunks of {CHUNK} tokens in one engine and of 64 in the pools. Every question is a chat request through \
the product's own face, 16 at a time; text is right if it is the expected one but for white space; of sums and recall \
its last line counts, and of tool calls the values and the raw markup. The test set is fixed. Never trained on: facts "as \
never taught", the pairs of numbers, the stories, and requests beside tools whose values are "never taught". Of the other \
requests beside tools two in three may have been trained on word for word, and so may facts "as taught" and a few openers, \
such as "hello".

*Tokens per step*: what a decode step brings one sequence, accepted drafts included; `avg_spec_accept_length` counts \
those behind an answer's end too. *{CONTROL}*: the same cases in an engine whose indexer scores every pair of a query \
and a key with an evenly distributed random number; all else stays as it is."""


def markdown(checkpoints: Sequence[Checkpoint], runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The whole page, without dates and times: the same card gives the same bytes."""
    parts = ["# Score card of the tiny LongCat-2.0", ABOUT, *(_described(one) for one in checkpoints)]
    if notes:
        parts.append("\n".join(f"- {note}" for note in notes))
    return "\n\n".join([*parts, _table(runs), _verdict(runs)]) + "\n"


def as_json(checkpoints: Sequence[Checkpoint], runs: Sequence[Run], notes: Sequence[str]) -> str:
    """The same as one record."""
    record: dict[str, Any] = {
        "passed": is_passed(runs),
        "notes": list(notes),
        "checkpoints": [
            {"name": one.name, "parameters": one.parameters, "bytes": one.num_bytes, "sha256": dict(one.sha256)}
            for one in checkpoints
        ],
        "runs": [
            {
                "checkpoint": run.checkpoint,
                "how": run.how,
                "lines": [
                    {
                        "title": line.title,
                        "floor": line.floor,
                        "shown": line.shown,
                        "value": line.value,
                        "passes": line.passes,
                    }
                    for line in run.lines
                ],
            }
            for run in runs
        ],
    }
    return json.dumps(record, ensure_ascii=False, indent=1) + "\n"


def is_passed(runs: Sequence[Run]) -> bool:
    """Whether every line of every run is good enough."""
    return bool(runs) and all(line.passes for run in runs for line in run.lines)


def wrong_answers(cases: Sequence[Case], run: Run) -> str:
    """JSON lines of what was asked, expected and said where a line counts it as wrong; not of the control."""
    found = []
    for line in run.lines:
        for place in line.wrong if line.title != CONTROL else ():
            example, reply = cases[place].example, run.told.replies[place]
            record = {
                "run": f"{run.checkpoint}, {run.how}",
                "line": line.title,
                "asked": example.messages[-1]["content"],
                "expected": _said(example.answer.content, example.answer.reasoning, example.answer.calls),
                "said": {**_said(reply.content, reply.reasoning, reply.calls), "finish": reply.finish},
            }
            found.append(json.dumps(record, ensure_ascii=False) + "\n")
    return "".join(found)


def _said(content: str, reasoning: str | None, calls: Sequence[Any]) -> dict[str, Any]:
    told = {"content": content, "reasoning": reasoning, "calls": [[call.name, dict(call.arguments)] for call in calls]}
    return {name: value for name, value in told.items() if value}


def _described(one: Checkpoint) -> str:
    files = "\n".join(f"- `{name}`: sha256 `{digest}`" for name, digest in one.sha256)
    return f"`{one.name}`: {one.parameters:,} parameters, {one.num_bytes:,} bytes.\n\n{files}"


def _table(runs: Sequence[Run]) -> str:
    """A row for each line that any run has, a column for each run."""
    floors = {line.title: line.floor for run in runs for line in run.lines}
    cells = [{line.title: line for line in run.lines} for run in runs]
    rows = [["", "floor", *(f"{run.checkpoint}, {run.how}" for run in runs)], ["---"] * (2 + len(runs))]
    for title, floor in floors.items():
        found = [lines.get(title) for lines in cells]
        rows.append(
            [title, floor, *("" if line is None else line.shown + ("" if line.passes else " **missed**") for line in found)]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _verdict(runs: Sequence[Run]) -> str:
    found = [f"{line.title}: {run.checkpoint}, {run.how}" for run in runs for line in run.lines if not line.passes]
    if not found:
        return "Every floor is reached."
    return "Missed:\n\n" + "\n".join(f"- {line}" for line in found)
