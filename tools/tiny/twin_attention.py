"""The attention of the training twin: latent queries and keys, an indexer, and what a pair of attentions shares."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from longcat_pd.config.model import IndexerConfig, ModelConfig
from tools.tiny.twin_parts import Matrix, Norm, Pass, turn


class Indexer(nn.Module):
    """Scores of keys. Its inputs are detached by who calls: it learns from its own loss alone."""

    def __init__(self, config: ModelConfig, indexer: IndexerConfig, name: str) -> None:
        super().__init__()
        self.config, self.indexer = config, indexer
        heads, width = indexer.index_n_heads, indexer.index_head_dim
        self.wq_b = Matrix(f"{name}.wq_b", config.q_lora_rank, heads * width)
        self.wk = Matrix(f"{name}.wk", config.hidden_size, width)
        self.k_norm = Norm(f"{name}.k_norm", width, indexer.index_k_norm_eps)
        self.weights_proj = Matrix(f"{name}.weights_proj", config.hidden_size, heads)

    def forward(self, x: Tensor, latent: Tensor, rows: Tensor, rotation: Tensor) -> Tensor:
        """[B, T, hidden], [B, T, q_lora_rank], rows [B, W] -> scores [B, W, T keys], of later keys too."""
        heads, width = self.indexer.index_n_heads, self.indexer.index_head_dim
        asking = self.wq_b(at(latent, rows)).unflatten(-1, (heads, width))
        queries = self._turn(asking, rotation[rows]).transpose(1, 2)
        keys = self._turn(self.k_norm(self.wk(x)), rotation)
        products = functional.relu(queries @ keys.unsqueeze(1).mT)
        weights: Tensor = self.weights_proj(at(x, rows)) * (heads * width) ** -0.5
        return (products * weights.mT.unsqueeze(-1)).sum(1)

    def _turn(self, x: Tensor, rotation: Tensor) -> Tensor:
        rope = self.config.qk_rope_head_dim
        return torch.cat((turn(x[..., :rope], rotation), x[..., rope:]), -1)

    @torch.no_grad()
    def choose(self, x: Tensor, latent: Tensor, rows: Tensor, rotation: Tensor) -> Tensor:
        """[B, W, T], true where a row looks: sink, window, and the best of the rest within the budget."""
        settings, place = self.indexer, torch.arange(x.shape[1])
        visible = place <= rows.unsqueeze(-1)
        forced = (place < settings.index_init_tokens) | (place > rows.unsqueeze(-1) - settings.index_local_tokens)
        scores = self(x, latent, rows, rotation)
        ranked = torch.where(scores == 0, place * -1e-30, scores)  # ties are at 0: the smaller position first
        ranked = ranked.masked_fill(forced, torch.inf).masked_fill(~visible, -torch.inf)
        best = ranked.topk(settings.index_topk).indices
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & visible

    def divergence(self, looked: Tensor, scores: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Of the rows that have to choose: KL(looked || softmax of scores) over what is not kept anyway, weighted mean.

        ``looked``, ``scores`` [B, W, T]; ``rows``, ``weights`` [B, W]. A row counts as much as it looks at such places.
        """
        settings, place = self.indexer, torch.arange(scores.shape[-1])
        is_free = (place >= settings.index_init_tokens) & (place <= rows.unsqueeze(-1) - settings.index_local_tokens)
        wanted = looked * is_free
        share = wanted.sum(-1)
        wanted = wanted / (share.unsqueeze(-1) + 1e-9)
        hidden = scores.masked_fill(~is_free, -1e9)
        losses = (torch.xlogy(wanted, wanted) - wanted * hidden.log_softmax(-1)).sum(-1)
        by_row = weights * share * (rows >= settings.index_topk)
        return (losses * by_row).sum() / (by_row.sum() + 1e-9)


@dataclass(kw_only=True)
class Shared:
    """What the first attention of a pair leaves for the second: its choice, its scores and where it looked."""

    chosen: Tensor | None = None  # [B, T, T]; None: all that is visible
    scores: Tensor | None = None  # [B, W, T] of the watched rows
    looked: Tensor | None = None  # [B, W, T]
    indexer: Indexer | None = None


class Attention(nn.Module):
    """Multi-head latent attention over whole sequences. With an indexer it owns the choice of its pair.

    ``looks_far``: whether it sees all that came before while there is no choice yet; else what is never left out.
    """

    def __init__(self, config: ModelConfig, name: str, *, owns_index: bool, looks_far: bool, gain: float) -> None:
        super().__init__()
        self.config, self.looks_far = config, looks_far
        hidden, heads = config.hidden_size, config.num_attention_heads
        value_width = config.qk_nope_head_dim + config.v_head_dim
        self.q_a = Matrix(f"{name}.q_a_proj", hidden, config.q_lora_rank)
        self.q_norm = Norm(f"{name}.q_a_layernorm", config.q_lora_rank, config.lora_norm_eps)
        self.q_b = Matrix(f"{name}.q_b_proj", config.q_lora_rank, heads * config.qk_head_dim, gain=0.25)
        self.kv_a = Matrix(f"{name}.kv_a_proj_with_mqa", hidden, config.kv_lora_rank + config.qk_rope_head_dim)
        self.kv_norm = Norm(f"{name}.kv_a_layernorm", config.kv_lora_rank, config.lora_norm_eps)
        self.kv_b = Matrix(f"{name}.kv_b_proj", config.kv_lora_rank, heads * value_width)
        self.o = Matrix(f"{name}.o_proj", heads * config.v_head_dim, hidden, gain=gain)
        self.indexer: Indexer | None = None
        if owns_index and config.indexer is not None:
            self.indexer = Indexer(config, config.indexer, f"{name}.indexer")

    def latent(self, x: Tensor) -> Tensor:
        """The normed query latent [B, T, q_lora_rank]."""
        out: Tensor = self.q_norm(self.q_a(x))
        return out

    def queries(self, latent: Tensor, rotation: Tensor) -> Tensor:
        """[B, R, q_lora_rank] -> [B, heads, R, qk]."""
        config = self.config
        q = (self.q_b(latent) * config.q_lora_scale).unflatten(-1, (config.num_attention_heads, -1))
        nope, rope = q.split((config.qk_nope_head_dim, config.qk_rope_head_dim), -1)
        return torch.cat((nope, turn(rope, rotation)), -1).transpose(1, 2)

    def keys_values(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, hidden] -> [B, heads, T, qk], [B, heads, T, v]."""
        config = self.config
        z, rope = self.kv_a(x).split((config.kv_lora_rank, config.qk_rope_head_dim), -1)
        expanded = self.kv_b(self.kv_norm(z) * config.kv_lora_scale).unflatten(-1, (config.num_attention_heads, -1))
        nope, values = expanded.split((config.qk_nope_head_dim, config.v_head_dim), -1)
        turned = turn(rope, rotation).unsqueeze(2).expand(*nope.shape[:-1], config.qk_rope_head_dim)
        return torch.cat((nope, turned), -1).transpose(1, 2), values.transpose(1, 2)

    def out(self, attended: Tensor) -> Tensor:
        """[B, heads, R, v] -> [B, R, hidden]."""
        projected: Tensor = self.o(attended.transpose(1, 2).flatten(-2))
        return projected

    def forward(self, x: Tensor, now: Pass, shared: Shared) -> Tensor:
        """[B, T, hidden] -> the same. The first of a pair fills ``shared``, the second uses it and settles the loss."""
        latent = self.latent(x)
        q, (k, v) = self.queries(latent, now.rotation), self.keys_values(x, now.rotation)
        if self.must_choose(x.shape[1]):
            self._index(x, latent, now, shared)
            if now.watched is not None:
                self._watch(at_rows(q, now.watched), k, now, shared)
        mask = None if shared.chosen is None else shared.chosen.unsqueeze(1)
        if not now.is_sparse and not self.looks_far:
            mask = self._visible(torch.arange(x.shape[1]), x.shape[1], now)
        scale = self.config.softmax_scale
        return self.out(
            functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale)
        )

    def must_choose(self, length: int) -> bool:
        """Whether a sequence is longer than what a row may look at."""
        return self.config.indexer is not None and length > self.config.indexer.index_topk

    def _index(self, x: Tensor, latent: Tensor, now: Pass, shared: Shared) -> None:
        if self.indexer is None:
            return
        x, latent, shared.indexer = x.detach(), latent.detach(), self.indexer
        if now.is_sparse:
            rows = torch.arange(x.shape[1]).expand(x.shape[0], -1)
            shared.chosen = self.indexer.choose(x, latent, rows, now.rotation)
        if now.watched is not None:
            shared.scores = self.indexer(x, latent, now.watched, now.rotation)

    def _visible(self, rows: Tensor, length: int, now: Pass) -> Tensor:
        """[..., length]: what rows [...] may look at, if it is chosen."""
        settings, place, rows = self.config.indexer, torch.arange(length), rows.unsqueeze(-1)
        visible = place <= rows
        if settings is None or now.is_sparse or self.looks_far:
            return visible
        return visible & ((place < settings.index_init_tokens) | (place > rows - settings.index_local_tokens))

    def _watch(self, q: Tensor, k: Tensor, now: Pass, shared: Shared) -> None:
        assert now.watched is not None
        visible = self._visible(now.watched, k.shape[2], now)
        looked = looks(q, k, visible, scale=self.config.softmax_scale)
        if self.indexer is not None:
            shared.looked = looked
            return
        assert shared.scores is not None and shared.looked is not None and shared.indexer is not None
        both = (looked + shared.looked) / 2
        now.index_losses.append(shared.indexer.divergence(both, shared.scores, now.watched, now.weights))


@torch.no_grad()
def looks(q: Tensor, k: Tensor, visible: Tensor, *, scale: float) -> Tensor:
    """Where heads look, [B, W, T]: at each key the strongest of them, made a distribution. ``visible`` [B, W, T]."""
    scores = (q @ k.mT).mul_(scale).masked_fill_(~visible.unsqueeze(1), -torch.inf)
    looked = scores.softmax(-1).amax(1)
    return looked / looked.sum(-1, keepdim=True)


def at(x: Tensor, rows: Tensor) -> Tensor:
    """[B, T, D] at rows [B, W] -> [B, W, D]."""
    return x.gather(1, rows.unsqueeze(-1).expand(-1, -1, x.shape[-1]))


def at_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[B, heads, T, D] at rows [B, W] -> [B, heads, W, D]."""
    return x.gather(2, rows[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[-1]))
