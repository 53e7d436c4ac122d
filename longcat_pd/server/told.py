"""What a balancer is told beside the events of an answer: what it cost, and its ids for when this instance breaks.

Owns the comment of usage, and which ids are told when. How a line of them looks is ``resume.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from longcat_pd.server.answers import Step
from longcat_pd.server.errors import to_json
from longcat_pd.server.resume import ids_line, origin_line
from longcat_pd.server.sse import event

MAX_WAITING = 32  # ids of an answer that is told as a whole, before they are said


async def metered(steps: AsyncGenerator[Step, None]) -> AsyncGenerator[bytes, None]:
    """The events of a stream, those of one step together, and behind them the comment that says what it cost."""
    async with aclosing(steps):
        async for step in steps:
            if data := b"".join(map(event, step.records)) + _usage_line(step):
                yield data


async def told(steps: AsyncGenerator[Step, None], *, has_ids: bool) -> AsyncGenerator[bytes, None]:
    """The events of an answer with its ids beside them, all of one step in one piece.

    What the answer began with stands in a comment in front; the ids that the events of a step take in one before the last
    of these events. Ids without events, of an answer that is told as a whole, are comments by themselves, and some of them
    wait for each other. ``has_ids``: False says none, as nobody could go on behind them. Behind all stands what it cost.
    """
    is_first = True
    waiting: list[int] = []
    async with aclosing(steps):
        async for step in steps:
            lines = origin_line(step.origin) if is_first else b""
            if step.records:
                *others, last = map(event, step.records)
                ids = b"" if step.token_ids is None else ids_line(step.token_ids)
                yield lines + b"".join(others) + ids + last + _usage_line(step)
            elif step.usage is not None:
                yield _usage_line(step)
            else:
                waiting += (step.token_ids or ()) if has_ids else ()
                if not is_first and len(waiting) < MAX_WAITING:
                    continue
                yield lines + ids_line(waiting) + b"\n"
                waiting.clear()
            is_first = False


def _usage_line(step: Step) -> bytes:
    """The comment before the end of an answer; nothing for a step that is not its last."""
    return b"" if step.usage is None else b": usage " + to_json(step.usage) + b"\n"
