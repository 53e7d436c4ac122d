"""Attention to latents in pages, dense and sparse, and the merging of partial attentions, on an NPU.

Owns how keys that a row sees become lengths, tables and indices of operators. Rows that see no key are never asked about:
they get one key that exists, and what comes back is replaced. Knows no sequence beyond its row of a table.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from longcat_pd.kernels.npu.limits import check_block_size, check_heads
from longcat_pd.kernels.npu.prolog import LATENT, ROPE
from longcat_pd.kernels.npu.tables import pieces, rows_of, visible, visible_slots
from longcat_pd.kernels.ops import MergePartials, PagedAttention, SparseAttention
from longcat_pd.kernels.refusal import Unsupported

OPERATORS = ("npu_fused_infer_attention_score_v2",)  # sparse attention's own are asked for where a model has an indexer
MOST_REQUESTS = 4096
Fused = Callable[..., tuple[Tensor, Tensor]]
_MOST_SLOTS = 1 << 24  # fp32 has every whole number below
_MOST_PARTS, _MOST_WIDTH, _WIDTH_STEP = 16, 512, 8
_LEAST = -1e9  # a log-sum-exp whose part weighs nothing beside any other, and is a number beside itself


def twin() -> Fused:
    """The fused operator with lengths that are tensors, which graphs of GE want.

    Raises:
        Unsupported: the graph compiler is not there.
    """
    try:
        compiler = importlib.import_module("torchair")
    except ImportError as error:
        raise Unsupported(f"exe_mode=ge_graph: torchair is not there: {error}", param="engine.exe_mode") from error
    found: Fused = compiler.ops.npu_fused_infer_attention_score_v2
    return found


def paged_attention_with(in_graphs: Fused | None) -> PagedAttention:
    """See ``ops.PagedAttention``.

    Each row is a request of its own: its keys are a prefix of what the table lists, whoever holds the rest, and its length
    says all. Rows of one sequence read its keys again, each for itself; that they could share them cannot be seen here
    without a look at their positions.

    The operator takes lists, and each call waits for the device once. ``in_graphs``: what a graph calls instead, see
    ``twin``. Without it there is no dense attention in graphs: a captured stream cannot wait.
    """

    def paged_attention(
        q: Tensor,
        positions: Tensor,
        *,
        latent: Tensor,
        rope: Tensor,
        block_tables: Tensor,
        block_starts: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor]:
        batch, rows_each, heads, _ = q.shape
        _check_caches(latent, rope, heads)
        keys = (latent.contiguous(), rope.contiguous())
        outs, lses = [], []
        for piece in pieces(batch * rows_each, block_tables.shape[1], at_most=MOST_REQUESTS):
            tables, starts = (rows_of(table, piece, rows_each) for table in (block_tables.int(), block_starts))
            lengths = visible(starts, positions.flatten()[piece.start : piece.stop] + 1, latent.shape[1])
            rows = q.flatten(0, 1)[piece.start : piece.stop]
            out, lse = _fused(rows, keys, tables, lengths.clamp_min(1), scale, in_graphs=in_graphs)
            found = _found(out, lse.squeeze(-1), lengths > 0)
            outs.append(found[0])
            lses.append(found[1])
        return _joined(outs, lses, q)

    return paged_attention


def sparse_attention(
    q: Tensor, keys: Tensor, *, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``ops.SparseAttention``.

    The stock operator tells a softmax's sum and maximum only of keys that are not in pages. So the whole cache is one
    sequence without pages, all rows are one request, and picked keys are numbers of slots.
    """
    heads = q.shape[2]
    _check_caches(latent, rope, heads)
    if not q.shape[0] * q.shape[1]:
        return _joined([], [], q)
    slots = visible_slots(keys.flatten(1), block_tables, latent.shape[1]).view(keys.shape)
    slots = _first(torch.where(keys >= 0, slots, -1).flatten(0, 1))
    num_rows, num_slots = slots.shape[0], latent.shape[0] * latent.shape[1]
    assert num_slots <= _MOST_SLOTS, f"sparse attention: a cache of {num_slots} slots, at most {_MOST_SLOTS}"
    nope, turned = _parts(q.flatten(0, 1))
    one_sequence = latent.reshape(-1, 1, LATENT)
    out, highest, total = torch.ops.npu.npu_sparse_flash_attention(
        nope,
        one_sequence,
        one_sequence,
        _with_one(slots).unsqueeze(1),
        scale_value=scale,
        block_table=None,
        actual_seq_lengths_query=_number(num_rows, q),
        actual_seq_lengths_kv=_number(num_slots, q),
        query_rope=turned,
        key_rope=rope.reshape(-1, 1, ROPE),
        sparse_block_size=1,
        layout_query="TND",
        layout_kv="TND",
        sparse_mode=0,
        attention_mode=2,
        return_softmax_lse=True,
    )
    lse = (highest + total.log()).view(num_rows, heads)
    found = _found(out, lse, slots[:, 0] >= 0)
    return _joined([found[0]], [found[1]], q)


def sparse_attention_of(operator: Any) -> SparseAttention:
    """See ``ops.SparseAttention``, by an operator with the stock one's arguments that tells sum and maximum of pages too.

    Picked keys are numbers of visible keys, and each row is a request of its own.
    """

    def sparse_attention(
        q: Tensor, keys: Tensor, *, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        heads, rows_each, size = q.shape[2], q.shape[1], latent.shape[1]
        _check_caches(latent, rope, heads)
        outs, lses = [], []
        for piece in pieces(q.shape[0] * rows_each, block_tables.shape[1], at_most=MOST_REQUESTS):
            rows, picked = q.flatten(0, 1)[piece.start : piece.stop], _first(keys.flatten(0, 1)[piece.start : piece.stop])
            tables, pages = rows_of(block_tables.int(), piece, rows_each), latent.contiguous().unsqueeze(2)
            nope, turned = _parts(rows)
            out, highest, total = operator(
                nope,
                pages,
                pages,
                _with_one(picked).unsqueeze(1),
                scale_value=scale,
                block_table=tables,
                actual_seq_lengths_query=torch.arange(1, len(rows) + 1, dtype=torch.int32, device=q.device),
                actual_seq_lengths_kv=torch.full_like(tables[:, 0], tables.shape[1] * size),
                query_rope=turned,
                key_rope=rope.contiguous().unsqueeze(2),
                sparse_block_size=1,
                layout_query="TND",
                layout_kv="PA_BSND",
                sparse_mode=0,
                attention_mode=2,
                return_softmax_lse=True,
            )
            found = _found(out, (highest + total.log()).view(len(rows), heads), picked[:, 0] >= 0)
            outs.append(found[0])
            lses.append(found[1])
        return _joined(outs, lses, q)

    return sparse_attention


def merge_partials_with(*, updates: bool) -> MergePartials:
    """See ``ops.MergePartials``; ``updates``: npu_attention_update may be called."""

    def merge_partials(outs: Tensor, lses: Tensor) -> Tensor:
        parts, rows, heads, width = outs.shape
        lses = lses.clamp_min(_LEAST)
        fits = parts <= _MOST_PARTS and width <= _MOST_WIDTH and width % _WIDTH_STEP == 0
        if not updates or not fits or not rows:
            weights = torch.exp(lses - lses.max(0, keepdim=True).values)
            return (outs * (weights / weights.sum(0, keepdim=True)).unsqueeze(-1)).sum(0)
        flat = outs.reshape(parts, rows * heads, width).contiguous()
        merged, _ = torch.ops.npu.npu_attention_update(
            list(lses.reshape(parts, -1).contiguous().unbind(0)), list(flat.unbind(0)), update_type=0
        )
        result: Tensor = merged.view(rows, heads, width)
        return result

    return merge_partials


def _fused(
    q: Tensor, keys: tuple[Tensor, Tensor], tables: Tensor, lengths: Tensor, scale: float, *, in_graphs: Fused | None
) -> tuple[Tensor, Tensor]:
    """[T, H, 512] and [T, H, 1]; query lengths are running sums, those of keys are not."""
    nope, turned = _parts(q)
    pages, key_rope = (part.unsqueeze(1) for part in keys)  # [N, 1, block_size, width]: heads before tokens
    settings: dict[str, Any] = {
        "query_rope": turned,
        "key_rope": key_rope,
        "block_table": tables,
        "num_query_heads": q.shape[1],
        "num_key_value_heads": 1,
        "softmax_scale": scale,
        "input_layout": "TND",
        "sparse_mode": 0,
        "block_size": pages.shape[2],
        "return_softmax_lse": True,
    }
    if torch.compiler.is_compiling() or isinstance(lengths, FakeTensor):  # what has no memory has no lists
        if in_graphs is None:
            raise Unsupported("dense attention in a captured stream: its lengths are lists", param="engine.exe_mode")
        ends = torch.arange(1, len(q) + 1, device=q.device)
        out, lse = in_graphs(nope, pages, pages, actual_seq_qlen=ends, actual_seq_kvlen=lengths, **settings)
    else:
        out, lse = torch.ops.npu.npu_fused_infer_attention_score_v2(
            nope,
            pages,
            pages,
            actual_seq_qlen=list(range(1, len(q) + 1)),
            actual_seq_kvlen=lengths.tolist(),
            **settings,
        )
    return out, lse


def _parts(q: Tensor) -> tuple[Tensor, Tensor]:
    return q[..., :LATENT].contiguous(), q[..., LATENT:].contiguous()


def _first(picked: Tensor) -> Tensor:
    """[T, K] int32 with -1 behind. Sorted as fp32, which vector units can: whole numbers below 2^24 stay what they are."""
    return picked.float().sort(-1, descending=True).values.int()


def _with_one(picked: Tensor) -> Tensor:
    """A row without any has the first there is."""
    return torch.cat((picked[:, :1].clamp_min(0), picked[:, 1:]), 1)


def _found(out: Tensor, lse: Tensor, is_seeing: Tensor) -> tuple[Tensor, Tensor]:
    """fp32; rows [T] that see nothing give 0 and -inf, whatever came back for them."""
    return (
        torch.where(is_seeing.view(-1, 1, 1), out.float(), 0.0),
        torch.where(is_seeing.unsqueeze(1), lse.float(), -torch.inf),
    )


def _joined(outs: list[Tensor], lses: list[Tensor], q: Tensor) -> tuple[Tensor, Tensor]:
    lead = q.shape[:3]
    if not outs:
        return q.new_zeros((*lead, LATENT), dtype=torch.float32), q.new_zeros(lead, dtype=torch.float32)
    out, lse = (parts[0] if len(parts) == 1 else torch.cat(parts) for parts in (outs, lses))
    return out.view(*lead, LATENT), lse.view(lead)


def _number(value: int, like: Tensor) -> Tensor:
    return torch.full((1,), value, dtype=torch.int32, device=like.device)


def _check_caches(latent: Tensor, rope: Tensor, heads: int) -> None:
    widths = (latent.shape[2], rope.shape[2])
    assert widths == (LATENT, ROPE), f"attention: latents and rope parts are {widths} wide, not {(LATENT, ROPE)}"
    check_heads("attention", heads)
    check_block_size("attention", latent.shape[1])
