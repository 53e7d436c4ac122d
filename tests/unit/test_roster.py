"""Who is missed, and where it ran."""

from __future__ import annotations

import pytest

from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, TransferConfig
from longcat_pd.engine.executor import rank_specs
from longcat_pd.engine.roster import Roster


@pytest.mark.parametrize(
    ("nodes", "said"),
    [((), "rank 3 has been silent for 20 s"), (("10.0.0.1", "10.0.0.2"), "rank 3 on 10.0.0.2 has been silent for 20 s")],
)
def test_a_silent_rank_is_named_with_its_machine(nodes: tuple[str, ...], said: str) -> None:
    instance = InstanceSpec(
        name="d0",
        role="decode",
        host="10.0.0.1",
        http_port=31000,
        device="cpu",
        model=ModelSection(path="nowhere"),
        parallel=ParallelConfig(dp_size=4),
        engine=EngineConfig(),
        transfer=TransferConfig(),
        nodes=nodes,
    )
    roster = Roster(rank_specs(instance, "life"), now=0.0)
    for rank in roster.ranks[:3]:
        rank.heard_at = 19.0
    lost = roster.silence(20.0, 10.0)
    assert lost is not None and lost.message == said
