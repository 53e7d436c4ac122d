"""A table of operators that the graph compiler takes, in plain torch but for writes: what a step is compiled with as long
as no better one is asked for.

Right in its shapes and in what it computes, slow, and near to nothing that runs on a device.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from longcat_pd.kernels.npu import NpuSettings
from longcat_pd.kernels.npu.execution import executed
from longcat_pd.kernels.ops import Ops, PrologScales, PrologWeights
from longcat_pd.kernels.reference import norm, table

NEVER = -1e30


def stand_ins(settings: NpuSettings, *, exe_mode: str = "ge_graph") -> Ops:
    """The table, with draws and streams as the product has them."""
    plain = replace(
        table(),
        rms_norm=rms_norm,
        add_rms_norm=lambda x, delta, *, weight, eps: (x + delta, rms_norm(x + delta, weight, eps)),
        linear=lambda x, weight: x @ weight,
        head_linear=lambda x, weight: torch.bmm(x.transpose(0, 1), weight).transpose(0, 1),
        rope=rope,
        store=store,
        mla_prolog=mla_prolog,
        mla_store=mla_store,
        select_positions=select_positions,
        index_candidates=index_candidates,
        paged_attention=paged_attention,
        sparse_attention=sparse_attention,
        merge_partials=merge_partials,
        grouped_experts=grouped_experts,
        route_topk=route_topk,
        ngram_ids=ngram_ids,
    )
    return executed(plain, settings, exe_mode=exe_mode)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, rotation: Tensor, *, is_interleaved: bool) -> Tensor:
    half = x.shape[-1] // 2
    pairs = x.float().reshape(*x.shape[:-1], half, 2)
    cos, sin = (part if x.dim() == 2 else part.unsqueeze(1) for part in rotation.unbind(0))
    other = torch.cat((pairs[..., 1:], pairs[..., :1]), -1)
    return (pairs * cos + other * sin).flatten(-2).to(x.dtype)


def store(cache: Tensor, slots: Tensor, values: Tensor) -> None:
    torch.ops.npu.npu_scatter_nd_update_(cache.view(-1, cache.shape[-1]), slots.unsqueeze(1), values)


def mla_prolog(
    x: Tensor,
    rotation: Tensor,
    *,
    weights: tuple[Tensor, ...],
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    scales: PrologScales,
) -> tuple[Tensor, Tensor]:
    by = PrologWeights(*weights)
    (heads, nope_width, _), q_rank = by.key_up.shape, by.q_norm.shape[0]
    q_lora = rms_norm(x @ by.down[:, :q_rank], by.q_norm, scales.eps)
    q = (q_lora @ by.q_up).view(x.shape[0], heads, -1)
    mla_store(x, rotation, weights=weights, slots=slots, cache=cache, scales=scales)
    nope = torch.bmm(q[..., :nope_width].transpose(0, 1), by.key_up).transpose(0, 1)
    return torch.cat((nope, rope(q[..., nope_width:], rotation, is_interleaved=True)), -1), q_lora


def mla_store(
    x: Tensor,
    rotation: Tensor,
    *,
    weights: tuple[Tensor, ...],
    slots: Tensor,
    cache: tuple[Tensor, Tensor],
    scales: PrologScales,
) -> None:
    by = PrologWeights(*weights)
    q_rank, kv_rank = by.q_norm.shape[0], by.kv_norm.shape[0]
    down = x @ by.down
    store(cache[0], slots, rms_norm(down[:, q_rank : q_rank + kv_rank], by.kv_norm, scales.eps) * scales.kv)
    store(cache[1], slots, rope(down[:, q_rank + kv_rank :], rotation, is_interleaved=True))


def select_positions(scores: Tensor, positions: Tensor, *, low: int, high: Tensor, budget: int) -> tuple[Tensor, Tensor]:
    is_eligible = (positions >= low) & (positions < high.unsqueeze(-1))
    masked = torch.where(is_eligible, scores, NEVER)
    best, places = torch.topk(masked, budget, dim=-1)
    return best, torch.where(best > NEVER / 2, positions.gather(-1, places), -1)


def index_candidates(
    index_q: Tensor,
    weights: Tensor,
    *,
    cache: Tensor,
    block_tables: Tensor,
    block_starts: Tensor,
    high: Tensor,
    limits: tuple[int, int],
) -> tuple[Tensor, Tensor]:
    batch, rows, heads, width = index_q.shape
    keys = cache[block_tables].view(batch, -1, width).float()
    dots = torch.bmm(index_q.reshape(batch, -1, width).float(), keys.transpose(1, 2)).relu()
    scores = (dots.view(batch, rows, heads, -1) * weights.unsqueeze(-1)).sum(2)
    positions = positions_of(block_starts, cache.shape[1]).unsqueeze(1).expand(-1, rows, -1)
    return select_positions(scores, positions, low=limits[0], high=high, budget=limits[1])


def positions_of(block_starts: Tensor, block_size: int) -> Tensor:
    return (block_starts.unsqueeze(-1) + torch.arange(block_size, device=block_starts.device)).flatten(1)


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
    batch, rows, heads, _ = q.shape
    keys = torch.cat((latent, rope), -1)[block_tables].view(batch, -1, q.shape[-1]).float()
    scores = (
        torch.bmm(q.reshape(batch, rows * heads, -1).float(), keys.transpose(1, 2)).view(batch, rows, heads, -1) * scale
    )
    hidden = positions_of(block_starts, latent.shape[1]).view(batch, 1, 1, -1) > positions.view(batch, rows, 1, 1)
    return weighed(scores, hidden, keys[..., : latent.shape[-1]])


def sparse_attention(
    q: Tensor, keys: Tensor, *, latent: Tensor, rope: Tensor, block_tables: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    (batch, rows, heads, _), block_size = q.shape, latent.shape[1]
    known = keys.clamp_min(0)
    blocks = block_tables.gather(1, (known // block_size).view(batch, -1)).view_as(keys)
    places = (blocks * block_size + known % block_size).view(batch * rows, -1)
    picked = torch.cat((latent, rope), -1).flatten(0, 1)[places].float()
    scores = torch.bmm(q.reshape(batch * rows, heads, -1).float(), picked.transpose(1, 2)).unsqueeze(1) * scale
    out, lse = weighed(scores, (keys < 0).view(batch * rows, 1, 1, -1), picked[..., : latent.shape[-1]])
    return out.view(batch, rows, heads, -1), lse.view(batch, rows, heads)


def weighed(scores: Tensor, hidden: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.where(hidden, NEVER, scores)
    out = torch.bmm(scores.softmax(-1).flatten(1, 2), values)
    return out.view(*scores.shape[:3], -1), torch.logsumexp(scores, -1)


def merge_partials(outs: Tensor, lses: Tensor) -> Tensor:
    return (outs * lses.softmax(0).unsqueeze(-1)).sum(0)


def grouped_experts(
    x: Tensor, expert_ids: Tensor, *, weights: Tensor, gate_up: Tensor, down: Tensor, **scales: Any
) -> Tensor:
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(gate_up.shape[0]):
        share = torch.where(expert_ids == expert, weights, 0.0).sum(-1, keepdim=True)
        total = total + (norm.swiglu(x @ gate_up[expert]) @ down[expert]).float() * share
    return total


def route_topk(logits: Tensor, bias: Tensor, *, topk: int, factor: float, is_normalized: bool) -> tuple[Tensor, Tensor]:
    probabilities = torch.softmax(logits, -1)
    expert_ids = torch.topk(probabilities + bias, topk, dim=-1).indices
    weights = probabilities.gather(-1, expert_ids)
    return expert_ids, (weights / weights.sum(-1, keepdim=True) if is_normalized else weights) * factor


def ngram_ids(windows: Tensor, *, powers: Tensor, moduli: Tensor, eos: Tensor, ignored: Tensor) -> Tensor:
    is_stop = windows < 0
    is_eos = (windows.unsqueeze(-1) == eos).any(-1)
    is_stop = is_stop | functional.pad(is_eos[:, 1:].int(), (1, 0)).bool()
    if ignored.numel():
        tokens = windows.unsqueeze(-1)
        is_stop = is_stop | ((tokens >= ignored[:, 0]) & (tokens < ignored[:, 1])).any(-1)
    seen = torch.where(is_stop.int().cumsum(-1) == 0, windows, 0)
    return (seen.unsqueeze(1) * powers).sum(-1) % moduli
