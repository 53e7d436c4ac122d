"""The shortcut mixture of experts: router, routed experts, and experts without weights ("zero experts").

Knows no attention and no place in the layer. Every rank computes all experts for its own rows.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from longcat_pd.models.context import ModelContext
from longcat_pd.models.linear import Linear, Piece, copy_into, empty_parameter, is_int8, piece_specs
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
        width, hidden = config.expert_ffn_hidden_size, config.hidden_size
        self.router = Router(context, f"{name}.router")
        self.gate_up, self.gate_up_scale = self._matrices(context, 2 * width, hidden, parts=("gate_proj", "up_proj"))
        self.down, self.down_scale = self._matrices(context, hidden, width, parts=("down_proj",))

    def forward(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        expert_ids, weights = self.router(x)
        routed = self._ops.grouped_experts(
            x,
            expert_ids,
            weights=weights,
            gate_up=self.gate_up,
            down=self.down,
            gate_up_scale=self.gate_up_scale,
            down_scale=self.down_scale,
        )
        if self._config.zero_expert_num == 0 or self._config.zero_expert_type == "drop":
            return routed.to(x.dtype)
        if self._config.zero_expert_type == "copy":  # of an older release: each counts once, whatever its weight
            weights = torch.ones_like(weights)
        is_zero = expert_ids >= self._config.n_routed_experts
        zero_weight = (weights.double() * is_zero).sum(-1, keepdim=True)  # in fp64: the order of choices does not show
        total: Tensor = routed + x.float() * zero_weight.float()
        return total.to(x.dtype)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Router, and each expert's three tensors, written into the grouped ones."""
        yield from self.router.weight_specs()
        width, hidden = self._config.expert_ffn_hidden_size, self._config.hidden_size
        for expert in range(self._config.n_routed_experts):
            gate, up, down = (f"{self._name}.experts.{expert}.{part}_proj" for part in ("gate", "up", "down"))
            yield from _specs(
                hidden, Piece(gate, width), Piece(up, width), of=_row(expert, self.gate_up, self.gate_up_scale)
            )
            yield from _specs(width, Piece(down, hidden), of=_row(expert, self.down, self.down_scale))

    def _matrices(
        self, context: ModelContext, rows: int, columns: int, *, parts: tuple[str, ...]
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Room for one matrix of every expert, [in, out]; or [out, in] and its scales if the checkpoint has it in int8."""
        count = self._config.n_routed_experts
        names = [f"{self._name}.experts.{expert}.{part}" for expert in range(count) for part in parts]
        if not is_int8(context, *names):
            return empty_parameter(context, count, columns, rows), None
        weight = empty_parameter(context, count, rows, columns, dtype=torch.int8)
        return weight, empty_parameter(context, count, rows, dtype=torch.float32)


def _row(expert: int, weight: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """One expert's matrix, [out, in], and its scales."""
    return (weight[expert].t(), None) if scale is None else (weight[expert], scale[expert])


def _specs(in_features: int, *pieces: Piece, of: tuple[Tensor, Tensor | None]) -> Iterator[WeightSpec]:
    """The specs of tensors that lie under each other in one expert's matrix."""
    weight, scale = of
    start = 0
    for piece in pieces:
        rows = slice(start, start + piece.num_rows)
        yield from piece_specs(piece, in_features, weight=weight[rows], scale=None if scale is None else scale[rows])
        start = rows.stop
