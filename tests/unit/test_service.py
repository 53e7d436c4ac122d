"""What an instance tells of its layout and of its ranks' memory."""

from __future__ import annotations

import json
from dataclasses import replace

from longcat_pd.config.schema import InstanceSpec, ModelSection, ParallelConfig, TransferConfig
from longcat_pd.engine.plan import RankAccounts, RankReady
from longcat_pd.server.service import layout_info
from tests.unit.engine_rig import engine_config


def test_all_sizes_and_the_bytes_of_every_rank() -> None:
    spec = InstanceSpec(
        name="d0",
        role="decode",
        host="127.0.0.1",
        http_port=30000,
        device="cpu",
        model=ModelSection(path="/x"),
        parallel=ParallelConfig(dp_size=2, ep_size=2, lmhead_tp_size=2, moe_dispatch="all_to_all", layers_per_stage=(3,)),
        engine=engine_config(),
        transfer=TransferConfig(),
    )
    ready = [
        RankReady(
            rank=rank,
            load_s=1.0,
            weight_bytes=1,
            num_blocks=3,
            cache_entries=(),
            model_digest="",
            accounts=RankAccounts(rank=rank),
            memory=(("weights", 10 + rank), ("index keys", 0)),
        )
        for rank in (0, 1)
    ]
    told = json.loads(json.dumps(layout_info(spec, ready)))
    assert told["memory"] == [
        {"rank": 0, "node": "127.0.0.1", "bytes": {"weights": 10, "index keys": 0}},
        {"rank": 1, "node": "127.0.0.1", "bytes": {"weights": 11, "index keys": 0}},
    ]
    apart = replace(spec, host="10.0.0.1", nodes=("10.0.0.1", "10.0.0.2"))
    assert [rank["node"] for rank in layout_info(apart, ready)["memory"]] == ["10.0.0.1", "10.0.0.2"]
    assert {name for name, size in told["parallel"].items() if size == 2} == {"dp_size", "ep_size", "lmhead_tp_size"}
    assert (told["parallel"]["pp_size"], told["parallel"]["moe_dispatch"]) == (1, "all_to_all")
    assert layout_info(spec, ())["memory"] == [], "nothing is known before the ranks are up"
