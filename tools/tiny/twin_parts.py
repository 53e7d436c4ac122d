"""The parts of the training twin: norms, MLPs, n-gram embedding, mixture of experts, attention with indexer.

The formulas are the model's (LongCat-2.0); only the way is another, for training: whole sequences from position 0 without
a cache, right-padded, expanded heads, experts over tokens in the order of their choice. ``tests/parity/test_twin.py`` holds
the twin to the obvious model. Every part knows the names of its tensors in a checkpoint (``tensors``, ``fill``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from longcat_pd.config.model import ModelConfig, OverEmbeddingConfig


class Norm(nn.Module):
    """rms(x) times a weight."""

    def __init__(self, name: str, width: int, eps: float) -> None:
        super().__init__()
        self.name, self.eps = name, eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> the same."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and parameter."""
        yield f"{self.name}.weight", self.weight


class Matrix(nn.Module):
    """x -> x Wᵀ."""

    def __init__(self, name: str, inputs: int, outputs: int, *, gain: float = 1.0) -> None:
        super().__init__()
        self.name = name
        self.weight = nn.Parameter(torch.randn(outputs, inputs) * gain / math.sqrt(inputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs]."""
        return functional.linear(x, self.weight)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and parameter."""
        yield f"{self.name}.weight", self.weight


class Mlp(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, name: str, hidden: int, width: int, *, gain: float) -> None:
        super().__init__()
        self.gate = Matrix(f"{name}.gate_proj", hidden, width)
        self.up = Matrix(f"{name}.up_proj", hidden, width)
        self.down = Matrix(f"{name}.down_proj", width, hidden, gain=gain)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> the same."""
        out: Tensor = self.down(functional.silu(self.gate(x)) * self.up(x))
        return out


class NgramEmbedding(nn.Module):
    """The word's vector and those of the n-grams that end at it, averaged.

    Kept as ``word + sum of projections``: the division by (tables + 1) is inside the parameters, so that a step of the
    optimizer means the same for all of them; a checkpoint's are that much larger.
    """

    def __init__(self, config: ModelConfig, tables: OverEmbeddingConfig) -> None:
        super().__init__()
        self.config, self.tables = config, tables
        self.factor = tables.num_tables + 1
        width, sizes = config.oe_width, tables.table_sizes
        self.word = nn.Parameter(torch.randn(config.vocab_size, config.hidden_size) * 0.5)
        self.rows = nn.Parameter(torch.randn(sum(sizes), width) * 0.5)
        self.projection = nn.Parameter(torch.randn(config.hidden_size, tables.num_tables * width) * 0.05)
        powers = [tables.powers_of(b) for b in range(tables.num_tables)]
        self.register_buffer("powers", torch.tensor(powers).T.contiguous(), persistent=False)  # [N, tables]
        self.register_buffer("moduli", torch.tensor(sizes), persistent=False)
        offsets = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
        self.register_buffer("offsets", offsets, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """[B, T] -> [B, T, hidden]."""
        vectors = functional.embedding(self.numbers(ids), self.rows).flatten(-2)
        return functional.embedding(ids, self.word) + functional.linear(vectors, self.projection)

    def numbers(self, ids: Tensor) -> Tensor:
        """Row numbers [B, T, tables] over all tables; an EOS ends the look-back of what comes behind it."""
        powers, moduli, offsets = self.get_buffer("powers"), self.get_buffer("moduli"), self.get_buffer("offsets")
        total = ids.unsqueeze(-1) * powers[0]
        is_near = torch.ones_like(ids, dtype=torch.bool)
        for distance in range(1, self.tables.oe_neighbor_num):
            before = functional.pad(ids, (distance, 0))[:, : ids.shape[1]]
            ends = torch.stack([before == eos for eos in self.config.eos_token_id]).any(0)
            is_near = is_near & ~ends  # positions before the first hold 0, which adds nothing
            total = total + (before * is_near).unsqueeze(-1) * powers[distance]
        return total % moduli + offsets

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As a checkpoint has them."""
        yield "model.embed_tokens.weight", self.word * self.factor
        tables = torch.split(self.rows, list(self.tables.table_sizes))
        projections = torch.split(self.projection * self.factor, self.config.oe_width, 1)
        for b, (table, projection) in enumerate(zip(tables, projections, strict=True)):
            yield f"model.oe_embed_tokens{b}.weight", table
            yield f"model.oe_embed_proj{b}.weight", projection

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``tensors``."""
        count = self.tables.num_tables
        self.word.copy_(tensors["model.embed_tokens.weight"] / self.factor)
        self.rows.copy_(torch.cat([tensors[f"model.oe_embed_tokens{b}.weight"] for b in range(count)]))
        columns = torch.cat([tensors[f"model.oe_embed_proj{b}.weight"] for b in range(count)], 1)
        self.projection.copy_(columns / self.factor)


class Mixture(nn.Module):
    """Routed experts and identity experts; the bias that helps to choose is moved by ``balance``, not by gradients."""

    def __init__(self, config: ModelConfig, name: str, *, gain: float) -> None:
        super().__init__()
        self.config, self.name = config, name
        hidden, width, experts = config.hidden_size, config.expert_ffn_hidden_size, config.n_routed_experts
        self.classifier = Matrix(f"{name}.router.classifier", hidden, config.num_router_outputs)
        self.gate = nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(hidden))
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(hidden))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * gain / math.sqrt(width))
        self.register_buffer("bias", torch.zeros(config.num_router_outputs))
        self.register_buffer("load", torch.zeros(config.num_router_outputs), persistent=False)

    def forward(self, h: Tensor) -> Tensor:
        """[N, hidden] -> the same."""
        config = self.config
        probs: Tensor = self.classifier(h).softmax(-1)
        chosen = (probs.detach() + self.get_buffer("bias")).topk(config.moe_topk).indices
        weights = probs.gather(1, chosen) * config.routed_scaling_factor
        with torch.no_grad():
            self.get_buffer("load").add_(torch.bincount(chosen.flatten(), minlength=config.num_router_outputs))
        is_zero = chosen >= config.n_routed_experts
        out: Tensor = h * (weights * is_zero).sum(1, keepdim=True)
        order = torch.where(is_zero, config.n_routed_experts, chosen).flatten().argsort(stable=True)
        counts = torch.bincount(chosen[~is_zero], minlength=config.n_routed_experts).tolist()
        order = order[: sum(counts)]
        tokens = order // config.moe_topk
        parts = torch.split(h[tokens], counts)
        done = [self._expert(e, part) for e, part in enumerate(parts) if len(part)]
        if not done:
            return out
        weighted = torch.cat(done) * weights.flatten()[order].unsqueeze(1)
        return out.index_add(0, tokens, weighted)

    def _expert(self, e: int, x: Tensor) -> Tensor:
        inner = functional.silu(functional.linear(x, self.gate[e])) * functional.linear(x, self.up[e])
        return functional.linear(inner, self.down[e])

    def balance(self, rate: float) -> float:
        """Moves the bias towards an even load since the last call; returns the largest load over the mean."""
        load = self.get_buffer("load")
        mean = load.mean()
        self.get_buffer("bias").add_(rate * torch.sign(mean - load))
        worst = float(load.max() / mean)
        load.zero_()
        return worst

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """As a checkpoint has them."""
        yield f"{self.name}.router.e_score_correction_bias", self.get_buffer("bias")
        for e in range(self.config.n_routed_experts):
            for kind, stack in (("gate", self.gate), ("up", self.up), ("down", self.down)):
                yield f"{self.name}.experts.{e}.{kind}_proj.weight", stack[e]

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """The inverse of ``tensors``."""
        self.get_buffer("bias").copy_(tensors[f"{self.name}.router.e_score_correction_bias"])
        for kind, stack in (("gate", self.gate), ("up", self.up), ("down", self.down)):
            for e in range(self.config.n_routed_experts):
                stack[e].copy_(tensors[f"{self.name}.experts.{e}.{kind}_proj.weight"])


@dataclass(kw_only=True)
class Pass:
    """One pass over sequences [B, T]: what the attentions of a step share, and what indexers are told.

    ``rotation`` [T + 3, rope / 2] complex. ``is_sparse``: attention sees chosen keys alone; before there is a choice, the
    first attention of the last layer sees all keys, and the others the first and the last ones alone, which are never left
    out: so a place far away is found where an indexer knows what to look for. ``watched`` [B, W]: rows whose
    looking the indexers are taught, each as much as ``weights`` [B, W] says; None: nothing is taught. Their losses are
    collected in ``index_losses``.
    """

    rotation: Tensor
    is_sparse: bool
    watched: Tensor | None
    weights: Tensor
    index_losses: list[Tensor] = field(default_factory=list)


def turn(x: Tensor, rotation: Tensor) -> Tensor:
    """Rope on adjacent pairs: [B, T, ..., rope], rotation [T or more, rope / 2] or [B, T, rope / 2] complex."""
    pairs = torch.view_as_complex(torch.unflatten(x, -1, (-1, 2)).contiguous())
    rotation = rotation[: x.shape[1]] if rotation.dim() == 2 else rotation
    by_row = rotation.view(*rotation.shape[:-1], *(1,) * (x.dim() - 3), rotation.shape[-1])
    return torch.view_as_real(pairs * by_row).flatten(-2)
