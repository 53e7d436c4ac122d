"""What ranks feel of their driver: the share of decode time that they wait for the next plan, and what being ahead buys.

One engine a plan depth, with rank processes as in service and this process as the driver, without a face.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from longcat_pd.bench import client
from longcat_pd.bench.driven import Driven, driven
from longcat_pd.bench.report import Row
from longcat_pd.clock import MonotonicClock

PLANS = (1, 2)  # decode steps in flight: the driver reacts, the driver is ahead
ROUNDS = 5
LENGTH, NUM_TOKENS = 32, 64
GOAL = "< 5 % exposed"


def exposed(metrics: str) -> tuple[float, float]:
    """From the text of a server's metrics: the driver's own seconds for one decode step, and the exposed share."""
    steps = client.total(metrics, "longcat_pd_driver_step_seconds_count", 'phase="decode"')
    driver = client.total(metrics, "longcat_pd_driver_step_seconds_sum", 'phase="decode"')
    waited = client.total(metrics, "longcat_pd_step_wait_seconds_sum")
    computed = client.total(metrics, "longcat_pd_step_compute_seconds_sum")
    return driver / steps, waited / (waited + computed)


def exposed_row(name: str, metrics: str) -> Row:
    """Of a server that has decoded."""
    driver_s, share = exposed(metrics)
    return Row(
        what=f"driver time per step: total, exposed share, {name}", ours=f"{driver_s * 1000:.2f} ms, {share:.1%}", goal=GOAL
    )


def ahead_rows(model: Path, settings: Sequence[str], *, port: int) -> Iterator[Row]:
    """Both depths in turn, on one rank and on two."""
    for kvp in (1, 2):
        layout = (f"parallel.kvp_size={kvp}", f"parallel.attn_tp_size={kvp}")
        yield from asyncio.run(_compared(model, (*settings, *layout), name=f"one engine, kvp {kvp}", port=port))


async def _compared(model: Path, settings: Sequence[str], *, name: str, port: int) -> list[Row]:
    rows = []
    async with AsyncExitStack() as stack:
        engines = [
            await stack.enter_async_context(driven(model, settings, port=port + 20 * plans, decode_plans=plans))
            for plans in PLANS
        ]
        for batch in (1, 8):
            rates: list[list[float]] = [[] for _ in engines]
            for seed in range(1 + ROUNDS):
                for engine, found in zip(engines, rates, strict=True):
                    found.append(await _rate(engine, batch=batch, seed=seed))
            before, after = [found[1:] for found in rates]
            rows.append(
                Row(
                    what=f"output tokens/s, batch {batch}, the next plan under way, {name}",
                    ours=f"{statistics.median(after):.0f}",
                    other=f"one plan in flight {statistics.median(before):.0f}",
                    ratio=statistics.median(a / b for a, b in zip(after, before, strict=True)),
                )
            )
        (before_s, before_share), (after_s, after_share) = [exposed(engine.metrics.render().decode()) for engine in engines]
        rows.append(
            Row(
                what=f"driver time per step: total, exposed share, {name}",
                ours=f"{after_s * 1000:.2f} ms, {after_share:.1%}",
                other=f"one plan in flight {before_s * 1000:.2f} ms, {before_share:.1%}",
                ratio=after_share / before_share,
                goal=GOAL,
            )
        )
    return rows


async def _rate(engine: Driven, *, batch: int, seed: int) -> float:
    """Output tokens per second of ``batch`` requests that start together."""
    prompts = [client.prompt(LENGTH, seed=seed * 1000 + number) for number in range(batch)]
    clock = MonotonicClock()
    began = clock.now()
    found = await engine.answers(prompts, num_tokens=NUM_TOKENS)
    return sum(map(len, found)) / (clock.now() - began)
