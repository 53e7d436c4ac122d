"""Limits of several operators of attention on an NPU, as assertions that name the numbers, and before anything runs."""

from __future__ import annotations

from longcat_pd.kernels.npu.operators import require
from longcat_pd.kernels.refusal import Unsupported

MOST_HEADS, MOST_BLOCK, BLOCK_STEP = 128, 1024, 16
MOST_INDEX_HEADS, INDEX_WIDTH, MOST_CANDIDATES = 64, 128, 8192


def is_power_of_two(number: int) -> bool:
    """1, 2, 4, ..."""
    return number > 0 and number & (number - 1) == 0


def check_heads(what: str, heads: int) -> None:
    """Query heads of latent attention."""
    text = f"{what}: {heads} heads, a power of two up to {MOST_HEADS} is needed"
    assert is_power_of_two(heads) and heads <= MOST_HEADS, text


def check_block_size(what: str, size: int) -> None:
    """Tokens in a page."""
    text = f"{what}: blocks of {size}, a multiple of {BLOCK_STEP} up to {MOST_BLOCK} is needed"
    assert size % BLOCK_STEP == 0 and BLOCK_STEP <= size <= MOST_BLOCK, text


def check_attention(*, heads: int, block_size: int) -> None:
    """What a configuration decides, for whoever starts a rank: ``heads`` that an attention call has.

    Raises:
        Unsupported: operators of an NPU refuse it.
    """
    if not is_power_of_two(heads) or heads > MOST_HEADS:
        text = f"attention with {heads} heads on a rank: operators of an NPU want a power of two up to {MOST_HEADS}"
        raise Unsupported(text, param="model.path")
    if block_size % BLOCK_STEP or not BLOCK_STEP <= block_size <= MOST_BLOCK:
        text = f"engine.block_size={block_size}: on an NPU a multiple of {BLOCK_STEP} up to {MOST_BLOCK}"
        raise Unsupported(text, param="engine.block_size")


def check_indexer(*, heads: int, width: int, init: int, budget: int) -> None:
    """The same for an indexer that has ``init`` forced first keys and ``budget`` keys that scores decide about.

    Raises:
        Unsupported: operators of an NPU refuse it, or are not here.
    """
    require("npu_lightning_indexer", "npu_sparse_flash_attention", purpose="sparse attention")
    if heads > MOST_INDEX_HEADS or width != INDEX_WIDTH:
        text = f"indexer with {heads} heads of {width}: on an NPU at most {MOST_INDEX_HEADS} of {INDEX_WIDTH}"
        raise Unsupported(text, param="model.path")
    if init + budget > MOST_CANDIDATES:
        text = f"index_topk: {init + budget} candidates besides the local tokens, on an NPU at most {MOST_CANDIDATES}"
        raise Unsupported(text, param="model.path")
