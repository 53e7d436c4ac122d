"""What arrives is not what was sent: never text from an incomplete cache. Failures of kind 26, between real processes.

Each request meets one fault of one message of the second layer; the next one meets none.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fault.switched import PROMPT, Switched, switched
from tests.parity.conftest import MakeCheckpoint

FOUND, UNHARMED = (502, "transfer_failed"), None  # what the client gets: an error, or the right tokens


async def after_a_fault(topology: Switched, name: str, **parameters: Any) -> bool:
    """Whether the decode side found it; the client was answered as it must be, and so is the next."""
    right = await topology.outcome()
    before = await found(topology)
    await topology.set_fault("p0", name, **parameters)
    outcome = await topology.outcome()
    is_found = await found(topology) > before
    await topology.clear("p0")
    if is_found and not topology.retries:
        assert outcome == FOUND
    else:
        assert outcome == right
    assert await topology.outcome() == right
    await topology.idle_within()
    return is_found


async def found(topology: Switched) -> float:
    """Legs of the decode side that failed by what it saw itself."""
    return await topology.metric('leg_failures_total{cause="self",instance="load_balancer",leg="decode"')


async def test_a_message_between_the_pools(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    parallel = {"kvp_size": 2, "attn_tp_size": 2}
    async with switched(tiny, tmp_path, decode=parallel, transfer={"digest": "all"}) as topology:
        assert len(PROMPT) > 64, "a prompt of two chunks"
        assert await after_a_fault(topology, "lane_alter", layer=1)
        assert await after_a_fault(topology, "lane_lose", layer=1)
        assert await after_a_fault(topology, "lane_repeat", layer=1)
        assert not await after_a_fault(topology, "lane_reorder", layer=1)
        assert not await after_a_fault(topology, "lane_slow", seconds=1.0), "the commit is there before it"
        await topology.set_fault(
            "p0", "lane_cut", after=4
        )  # not the first of a transfer on its lane, which would be sent on another
        assert await topology.outcome() == FOUND


@pytest.mark.parametrize("name, digest", [("lane_lose", "off"), pytest.param("lane_alter", "all", marks=pytest.mark.slow)])
async def test_what_is_found_is_tried_again(tiny: MakeCheckpoint, tmp_path: Path, name: str, digest: str) -> None:
    settings = {"retry": 1}
    async with switched(tiny, tmp_path, transfer={"digest": digest}, load_balancer_settings=settings) as topology:
        assert await after_a_fault(topology, name, layer=1)
