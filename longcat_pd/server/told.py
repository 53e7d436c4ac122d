"""An answer with its ids beside it, for a balancer that goes on with it elsewhere when this instance breaks.

Owns which ids are told when. How a line of them looks is ``resume.py``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from longcat_pd.server.answers import Step
from longcat_pd.server.resume import ids_line, origin_line
from longcat_pd.server.sse import event

MAX_WAITING = 32  # ids of an answer that is told as a whole, before they are said


async def told(steps: AsyncGenerator[Step, None], *, has_ids: bool) -> AsyncGenerator[bytes, None]:
    """The events of an answer with its ids beside them, all of one step in one piece.

    What the answer began with stands in a comment in front; the ids that the events of a step take in one before the last
    of these events. Ids without events, of an answer that is told as a whole, are comments by themselves, and some of them
    wait for each other. ``has_ids``: False says none, as nobody could go on behind them.
    """
    is_first = True
    waiting: list[int] = []
    async with aclosing(steps):
        async for step in steps:
            lines = origin_line(step.origin) if is_first else b""
            if step.records:
                *others, last = map(event, step.records)
                ids = b"" if step.token_ids is None else ids_line(step.token_ids)
                yield lines + b"".join(others) + ids + last
            else:
                waiting += (step.token_ids or ()) if has_ids else ()
                if not is_first and len(waiting) < MAX_WAITING:
                    continue
                yield lines + ids_line(waiting) + b"\n"
                waiting.clear()
            is_first = False
