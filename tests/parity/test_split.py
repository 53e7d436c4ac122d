"""Every part of the model split over an axis of its own says what one rank says: experts by each dispatch, dense MLPs,
embeddings, n-gram tables, the head; alone and together, in prefill and in decode."""

from __future__ import annotations

import pytest

from longcat_pd.config.schema import ParallelConfig
from tests.parity.conftest import MakeCheckpoint
from tests.parity.test_ranks import NUM_DECODED, check_equal

CP = {"cp_size": 2}
KVP = {"kvp_size": 2, "attn_tp_size": 2}
ONE_AXIS = ("dense_tp_size", "moe_tp_size", "ep_size", "embed_tp_size", "lmhead_tp_size", "ngram_embed_tp_size")


@pytest.mark.parametrize("base", [CP, KVP], ids=["prefill", "decode"])
@pytest.mark.parametrize("axis", ONE_AXIS)
def test_one_axis(tiny: MakeCheckpoint, base: dict[str, int], axis: str) -> None:
    check_equal(tiny("2.0"), ParallelConfig(**base, **{axis: 2}), 0 if base is CP else NUM_DECODED)
