"""Planted mistakes in what surrounds attention: one operator is called, or read, otherwise than it should be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from longcat_pd.kernels.npu import operators, prolog
from tests.npu import test_table_attention, test_table_indexer, test_table_prolog, test_table_rotation
from tests.npu.test_planted import Arguments, Check, Planted, altered, given, left_out

FLOAT = torch.float32
PROLOG, STORE, ATTENTION = "npu_mla_prolog_v3", "npu_kv_rmsnorm_rope_cache_v2", "npu_fused_infer_attention_score_v2"
SPARSE, INDEXER, UPDATE = "npu_sparse_flash_attention", "npu_lightning_indexer", "npu_attention_update"


def fused_front() -> None:
    test_table_prolog.test_the_front("fused", FLOAT)


def composed_front() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prolog, "has", lambda name: name != PROLOG and operators.has(name))
        test_table_prolog.test_the_front("composed", FLOAT)


def dense() -> None:
    test_table_attention.test_dense_attention(FLOAT, 1, 0, 3)


def dense_on_one_of_two() -> None:
    test_table_attention.test_dense_attention(FLOAT, 2, 1, 3)


def sparse() -> None:
    test_table_attention.test_sparse_attention(FLOAT, 3)


def merging() -> None:
    test_table_attention.test_merging(2, True)


def candidates() -> None:
    test_table_indexer.test_candidates(False, 1, 0, 3)


def turning() -> None:
    test_table_rotation.test_pairs_are_turned_and_stay_where_they_are(FLOAT, True, (32,))


def swapped(one: str, other: str) -> Callable[[Arguments], Arguments]:
    return lambda arguments: arguments | {one: arguments[other], other: arguments[one]}


def made(name: str, change: Callable[[Any], Any]) -> Callable[[Arguments], Arguments]:
    return lambda arguments: arguments | {name: change(arguments[name])}


def summed(lengths: list[int]) -> list[int]:
    return torch.tensor(lengths).cumsum(0).tolist()


PLANTED = {
    "sines for cosines": Planted(PROLOG, swapped("rope_sin", "rope_cos"), fused_front),
    "latents without their factor": Planted(PROLOG, left_out("kc_scale"), fused_front),
    "query latents with a factor": Planted(PROLOG, given(qc_qr_scale=2.0), fused_front),
    "no query latents for the indexer": Planted(PROLOG, left_out("query_norm_flag"), fused_front),
    "a default epsilon of query latents": Planted(PROLOG, left_out("rmsnorm_epsilon_cq"), fused_front),
    "a default epsilon of latents": Planted(PROLOG, left_out("rmsnorm_epsilon_ckv"), fused_front),
    "heads' maps in the device's format": Planted(
        PROLOG, made("weight_uk", lambda w: torch.ops.npu.npu_format_cast(w, 29)), fused_front
    ),
    "a matrix in the plain format": Planted(PROLOG, made("weight_dq", lambda w: w.clone()), fused_front),
    "sines for cosines in queries": Planted("npu_interleave_rope", swapped("cos", "sin"), composed_front),
    "sines for cosines in keys": Planted(STORE, swapped("cos", "sin"), composed_front),
    "rope parts into latents": Planted(STORE, swapped("k_cache", "ckv_cache"), composed_front),
    "a cache without pages": Planted(STORE, left_out("cache_mode"), composed_front),
    "latents with a default epsilon": Planted(STORE, left_out("epsilon"), composed_front),
    "halves for neighbours": Planted("npu_rotary_mul", left_out("rotary_mode"), turning),
    "factors in the wrong order": Planted("npu_rotary_mul", swapped("r1", "r2"), turning),
    "another layout of queries": Planted(ATTENTION, given(input_layout="BSND"), dense),
    "heads before rows": Planted(ATTENTION, given(input_layout="TND_NTD"), dense),
    "lengths of queries for sums": Planted(ATTENTION, made("actual_seq_qlen", lambda n: [1] * len(n)), dense),
    "sums for lengths of keys": Planted(ATTENTION, made("actual_seq_kvlen", summed), dense),
    "one key too many": Planted(ATTENTION, made("actual_seq_kvlen", lambda n: [each + 1 for each in n]), dense),
    "a causal mask of its own": Planted(ATTENTION, given(sparse_mode=3), dense),
    "no scale": Planted(ATTENTION, left_out("softmax_scale"), dense),
    "no sum": Planted(ATTENTION, left_out("return_softmax_lse"), dense_on_one_of_two),
    "tables of the row before": Planted(ATTENTION, made("block_table", lambda t: t.roll(1, 0).contiguous()), dense),
    "picked keys of the end only": Planted(SPARSE, given(sparse_mode=3), sparse),
    "no mode": Planted(SPARSE, left_out("attention_mode"), sparse),
    "pages with a sum": Planted(
        SPARSE,
        lambda a: a | {name: a[name].unsqueeze(0) for name in ("key", "value", "key_rope")} | {"layout_kv": "PA_BSND"},
        sparse,
    ),
    "none among picked keys": Planted(SPARSE, made("sparse_indices", lambda k: k.flip(-1)), sparse),
    "blocks for keys": Planted(SPARSE, given(sparse_block_size=2), sparse),
    "values of their own": Planted(SPARSE, made("value", lambda v: v.clone()), sparse),
    "fewer candidates": Planted(INDEXER, made("sparse_count", lambda count: count - test_table_indexer.LOW), candidates),
    "candidates in the local window": Planted(
        INDEXER, made("actual_seq_lengths_key", lambda n: n + test_table_indexer.LOCAL), candidates
    ),
    "unpaged index keys": Planted(INDEXER, left_out("layout_key"), candidates),
    "values of index keys in pages": Planted(INDEXER, given(return_value=True), candidates),
    "a length for a sum": Planted(INDEXER, made("actual_seq_lengths_query", torch.ones_like), candidates),
    "no weights": Planted(INDEXER, made("weights", torch.zeros_like), candidates),
    "parts without keys as they are": Planted(
        UPDATE, made("lse", lambda parts: [torch.where(p == -1e9, -torch.inf, p) for p in parts]), merging
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_seen(name: str) -> None:
    planted = PLANTED[name]
    with (
        altered(planted.operator, planted.change) as calls,
        pytest.raises((AssertionError, ValueError, RuntimeError, TypeError)),
    ):
        planted.check()
    assert calls, "what was planted was never called"


@contextmanager
def answered(operator: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """What ``torch.ops.npu.<operator>`` answers, changed on the way."""
    real = getattr(torch.ops.npu, operator)
    setattr(torch.ops.npu, operator, lambda *args, **kwargs: change(real(*args, **kwargs)))
    try:
        yield
    finally:
        setattr(torch.ops.npu, operator, real)


@pytest.mark.parametrize(
    ("operator", "change", "check"),
    [
        pytest.param(SPARSE, lambda r: (r[0], r[2], r[1]), sparse, id="sums for highest scores"),
        pytest.param(SPARSE, lambda r: (r[0], r[1], torch.ones_like(r[2])), sparse, id="highest scores alone"),
        pytest.param(ATTENTION, lambda r: (r[0], torch.zeros_like(r[1])), dense, id="no sum"),
        pytest.param(UPDATE, lambda r: (r[0] * 0.5, r[1]), merging, id="halves"),
        pytest.param(PROLOG, lambda r: (r[0], r[1], r[2], r[4], r[3]), fused_front, id="scales for query latents"),
        pytest.param(
            INDEXER, lambda r: (r[0].clamp_min(test_table_indexer.LOW), r[1]), candidates, id="a key where there is none"
        ),
    ],
)
def test_a_result_that_is_read_wrongly_is_seen(operator: str, change: Callable[[Any], Any], check: Check) -> None:
    with answered(operator, change), pytest.raises((AssertionError, ValueError, RuntimeError)):
        check()


@pytest.mark.parametrize(
    "check", {planted.check: None for planted in PLANTED.values()}, ids=lambda check: check.__qualname__
)
def test_without_a_mistake_nothing_is_seen(check: Check) -> None:
    check()
