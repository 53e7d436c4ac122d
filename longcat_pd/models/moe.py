"""The shortcut mixture of experts: router, routed experts, and experts without weights ("zero experts").

Knows no attention and no place in the layer. Every rank computes all experts for its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from longcat_pd.models.context import ModelContext
from longcat_pd.models.linear import Linear, Piece, copy_into, empty_parameter
from longcat_pd.models.weight_spec import WeightSpec


class Router(nn.Module):
    """Which experts a row goes to, and with which weights. fp32 throughout: the choice is a comparison."""

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        config = context.config
        self._ops = context.ops
        self._config = config
        self._bias_name = f"{name}.e_score_correction_bias"
        classifier = Piece(f"{name}.classifier", config.num_router_outputs)
        self.classifier = Linear(context, config.hidden_size, classifier, dtype=torch.float32)
        self.bias = empty_parameter(context, config.num_router_outputs, dtype=torch.float32)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] -> expert ids and weights [T, topk]; ids from ``n_routed_experts`` on are zero experts."""
        config = self._config
        return self._ops.route_topk(
            self.classifier(x.float()),
            self.bias,
            topk=config.moe_topk,
            factor=config.routed_scaling_factor,
            is_normalized=config.norm_topk_prob,
        )

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Classifier and the bias of the choice."""
        yield from self.classifier.weight_specs()
        yield WeightSpec(self._bias_name, tuple(self.bias.shape), copy_into(self.bias))


class MixtureOfExperts(nn.Module):
    """Weighted sum of the chosen experts' outputs; a zero expert's output is its input."""

    def __init__(self, context: ModelContext, name: str) -> None:
        super().__init__()
        config = context.config
        self._ops = context.ops
        self._config = config
        self._name = name
        width, hidden, count = config.expert_ffn_hidden_size, config.hidden_size, config.n_routed_experts
        self.router = Router(context, f"{name}.router")
        self.gate_up = empty_parameter(context, count, hidden, 2 * width)
        self.down = empty_parameter(context, count, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        expert_ids, weights = self.router(x)
        routed = self._ops.grouped_experts(x, expert_ids, weights=weights, gate_up=self.gate_up, down=self.down)
        if self._config.zero_expert_num == 0 or self._config.zero_expert_type == "drop":
            return routed.to(x.dtype)
        if self._config.zero_expert_type == "copy":  # of an older release: each counts once, whatever its weight
            weights = torch.ones_like(weights)
        zero_weight = weights.masked_fill(expert_ids < self._config.n_routed_experts, 0.0).sum(-1, keepdim=True)
        total: Tensor = routed + x.float() * zero_weight
        return total.to(x.dtype)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Router, and each expert's three tensors, written into the grouped ones."""
        yield from self.router.weight_specs()
        width, hidden = self._config.expert_ffn_hidden_size, self._config.hidden_size
        for expert in range(self._config.n_routed_experts):
            name = f"{self._name}.experts.{expert}"
            gate, up = torch.split(self.gate_up[expert].t(), width)
            yield WeightSpec(f"{name}.gate_proj.weight", (width, hidden), copy_into(gate))
            yield WeightSpec(f"{name}.up_proj.weight", (width, hidden), copy_into(up))
            yield WeightSpec(f"{name}.down_proj.weight", (hidden, width), copy_into(self.down[expert].t()))
