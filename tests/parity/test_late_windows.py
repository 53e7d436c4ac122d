"""Windows of a sequence behind the end of its reservation, and of the model's length: nobody else's answer changes.

The driver is one plan ahead of what it knows, so a sequence that has ended may step once more; here it does so for long.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.engine.plan import Segment, StepPlan
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from tests.parity.conftest import MakeCheckpoint
from tests.parity.gloo import BLOCK_SIZE, on_ranks, rank_specs
from tests.parity.oracle import some_tokens
from tests.slots import admit

LENGTH, DRAFTS, STEPS = 64, 3, 12


def neighbour(spec: RankSpec, mesh: Mesh, parallel: ParallelConfig, has_late: bool) -> list[int]:
    """The tokens of a sequence in slot 1, beside one in slot 0 that soon runs out of positions."""
    runner = ModelRunner(spec, mesh)
    pool = GroupPool(0, ParallelLayout.of(parallel).cache_shard(0).num_ranks, 64)
    late, ids = some_tokens(58, seed=1), some_tokens(9, seed=2)
    admits = (
        admit(pool, 0, late, block_size=BLOCK_SIZE, room=LENGTH - len(late)),
        admit(pool, 1, ids, block_size=BLOCK_SIZE, room=LENGTH - len(ids)),
    )
    whole = tuple(Segment(slot=s, start=0, num_tokens=n, is_last=True) for s, n in ((0, len(late)), (1, len(ids))))
    outputs = [runner.execute(StepPlan(step_id=1, phase="prefill", admit=admits, segments=whole))]
    for step in range(STEPS):
        slots = (0, 1) if has_late else (1,)
        windows = tuple(Segment(slot=s, start=-1, num_tokens=1 + DRAFTS, is_last=True) for s in slots)
        outputs.append(runner.execute(StepPlan(step_id=2 + step, phase="decode", segments=windows)))
    runner.close()
    if has_late and mesh.rank == 0:
        assert sum(len(s.token_ids) for o in outputs for s in o.slots if s.slot == 0) > LENGTH - len(late)
    return [token for output in outputs for slot in output.slots if slot.slot == 1 for token in slot.token_ids]


@pytest.mark.parametrize(("variant", "kvp"), [("2.0+predictable", 1), ("2.0+predictable", 2), ("lite", 1)])
def test_a_neighbour_that_has_run_out_of_positions_changes_nothing(tiny: MakeCheckpoint, variant: str, kvp: int) -> None:
    parallel, drafts = ParallelConfig(kvp_size=kvp, attn_tp_size=kvp), DRAFTS if variant != "lite" else 0
    specs = rank_specs(tiny(variant), parallel, num_drafts=drafts)
    small = [
        replace(s, instance=replace(s.instance, engine=replace(s.instance.engine, max_model_len=LENGTH))) for s in specs
    ]
    found = [on_ranks(small, neighbour, parallel, has_late)[0] for has_late in (True, False)]
    assert found[0] == found[1] and len(found[0]) > STEPS
