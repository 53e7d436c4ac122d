"""What is estimated for LongCat-Flash-Lite on 8 x A3 beside what was published: one set of rates, every row, as it is.

The errors are pinned, so that whoever changes a count or a rate sees what becomes of them; docs/estimates.md has the same.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, NpuConfig, ParallelConfig, TransferConfig
from longcat_pd.sizing.cards import CARDS
from longcat_pd.sizing.rates import rates_of
from longcat_pd.sizing.roofline import decode_step, prefill
from tests.releases import LITE

PAGE = Path(__file__).parents[2] / "docs" / "estimates.md"
IGNORED = ["lm_head", "re:.*self_attn", "re:.*router", "re:.*ngram", "re:.*embed_tokens"]
FLOATS = ModelConfig.from_dict(LITE)
INT8 = ModelConfig.from_dict(LITE | {"quantization_config": int8_section(IGNORED)})
TP = ParallelConfig(
    attn_tp_size=8,
    dense_tp_size=8,
    moe_tp_size=8,
    embed_tp_size=8,
    lmhead_tp_size=8,
    ngram_embed_tp_size=8,
    layers_per_stage=(14,),
)
EP = ParallelConfig(
    attn_tp_size=4,
    dp_size=2,
    ep_size=8,
    lmhead_tp_size=8,
    ngram_embed_tp_size=8,
    moe_dispatch="fused",
    layers_per_stage=(14,),
)


class Row(NamedTuple):
    """One published figure. ``percent``: how far ours is off."""

    name: str
    parallel: ParallelConfig
    batch: int
    length: int
    answer: int
    what: str
    published_ms: float
    percent: float
    has_int8: bool = False
    exe_mode: str = "ge_graph"


ROWS = [
    Row("TP 8", TP, 1, 1024, 128, "prefill", 47.84, +3.8),
    Row("TP 8", TP, 1, 1024, 128, "decode", 5.76, +0.3),
    Row("EP 8", EP, 2, 1024, 128, "prefill", 67.0, -6.9),
    Row("EP 8", EP, 2, 1024, 128, "decode", 8.10, +7.0),
    Row("EP 8", EP, 8, 1024, 128, "prefill", 129.38, -1.2),
    Row("EP 8", EP, 8, 1024, 128, "decode", 9.54, +4.9),
    Row("EP 8, W8A8, experts beside", EP, 8, 4096, 1024, "decode", 7.12, -12.0, has_int8=True),
    Row("EP 8, eager", EP, 2, 1024, 128, "decode", 43.2, +16.4, exe_mode="eager"),
]


def spec(row: Row) -> InstanceSpec:
    slots = max(row.batch // row.parallel.dp_size, 1)
    prompts = replace(row.parallel, moe_dispatch="all_to_all") if row.parallel.ep_size > 1 else row.parallel
    return InstanceSpec(
        name="lite",
        role="standalone",
        host="",
        http_port=1,
        device="npu",
        model=ModelSection(path="/x", dtype="bfloat16"),
        parallel=prompts if row.what == "prefill" else row.parallel,
        engine=EngineConfig(
            max_num_seqs=row.batch,
            max_num_batched_tokens=row.length * slots,
            exe_mode=row.exe_mode,  # type: ignore[arg-type]
            buckets=(slots,),
        ),
        transfer=TransferConfig(),
        npu=NpuConfig(soc="A3", is_moe_overlapped=row.has_int8),
    )


def estimated_ms(row: Row) -> float:
    rates = rates_of(CARDS["A3"], cards_per_node=16)
    model = INT8 if row.has_int8 else FLOATS
    if row.what == "prefill":
        return prefill(spec(row), model, rates=rates, prompts=row.batch, length=row.length).estimate.seconds * 1e3
    context = row.length + row.answer // 2
    return decode_step(spec(row), model, rates=rates, sequences=row.batch, context=context).seconds * 1e3


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.name} {row.batch} {row.what}")
def test_the_error_of_every_published_figure_is_known(row: Row) -> None:
    assert (estimated_ms(row) / row.published_ms - 1) * 100 == pytest.approx(row.percent, abs=0.1)


def test_the_page_has_the_same_table() -> None:
    found = re.findall(
        r"^\| [^|]+ \| (\d+) \| (prefill|decode) \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+) \|", PAGE.read_text(), re.M
    )
    told = [(int(batch), what, float(theirs), float(ours), float(off)) for batch, what, theirs, ours, off in found]
    assert told == [(row.batch, row.what, row.published_ms, round(estimated_ms(row), 1), row.percent) for row in ROWS]
