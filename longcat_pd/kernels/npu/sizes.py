"""Whether the operators of an NPU take a model's sizes: asked before anything is allocated, so that no step finds out."""

from __future__ import annotations

from dataclasses import dataclass

from longcat_pd.kernels.npu.experts import check_experts
from longcat_pd.kernels.npu.fused_limits import check_fused, fused_buffer_bytes
from longcat_pd.kernels.npu.limits import check_attention, check_indexer
from longcat_pd.kernels.npu.settings import NpuSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexerSizes:
    """An indexer: its heads and their width, the first keys that are forced, and how many keys scores decide about."""

    heads: int
    width: int
    init: int
    budget: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """One rank's part of a model.

    Attributes:
        heads: query heads of one attention call.
        num_experts: with weights, of all ranks; ``num_copies`` without; a row chooses ``topk`` of both.
        inner_width: what a rank has of an expert's.
        fused_ranks: ranks of the fused pair; 0: it is not used. ``rows``: the most that one of them hands in at once.
    """

    hidden: int
    heads: int
    block_size: int
    indexer: IndexerSizes | None
    num_experts: int
    num_copies: int
    topk: int
    inner_width: int
    is_int8: bool
    fused_ranks: int
    rows: int


def check_sizes(sizes: ModelSizes, settings: NpuSettings) -> None:
    """Raises Unsupported: an operator refuses one of them; with the numbers, and what can be done instead."""
    check_attention(heads=sizes.heads, block_size=sizes.block_size)
    if sizes.indexer is not None:
        index = sizes.indexer
        check_indexer(heads=index.heads, width=index.width, init=index.init, budget=index.budget)
    check_experts(
        num_choices=sizes.num_experts + sizes.num_copies,
        topk=sizes.topk,
        inner_width=sizes.inner_width,
        is_int8=sizes.is_int8,
    )
    if sizes.fused_ranks:
        check_fused(
            settings,
            hidden=sizes.hidden,
            ep_size=sizes.fused_ranks,
            rows=sizes.rows,
            num_experts=sizes.num_experts,
            topk=sizes.topk,
        )


def fused_bytes(sizes: ModelSizes, settings: NpuSettings) -> int:
    """What the communicator of the fused pair needs for its buffer; 0 where the pair is not used."""
    if not sizes.fused_ranks:
        return 0
    return fused_buffer_bytes(
        settings,
        hidden=sizes.hidden,
        ep_size=sizes.fused_ranks,
        rows=sizes.rows,
        num_experts=sizes.num_experts,
        topk=sizes.topk,
    )
