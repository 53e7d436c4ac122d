"""The shortcut mixture of experts: router, routed experts, and experts without weights ("zero experts").

Owns the experts of this rank. How rows come to them and back is ``dispatch.py``'s business. Knows no attention and no place
in the layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from longcat_pd.kernels.ops import WeightKind
from longcat_pd.models.batch import Rows
from longcat_pd.models.context import ModelContext
from longcat_pd.models.dispatch import make_dispatch
from longcat_pd.models.dispatched import Dispatched, FusedParcels
from longcat_pd.models.linear import Linear, Piece, copy_into, empty_parameter, is_int8, piece_specs, share_of
from longcat_pd.models.preparing import prepared
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
        config, mesh = context.config, context.mesh
        self._ops = context.ops
        self._config = config
        self._name = name
        self._experts = share_of(config.n_routed_experts, mesh.axis("ep"))
        self._inner = share_of(config.expert_ffn_hidden_size, mesh.axis("moe_tp"))
        width, hidden = self._inner.stop - self._inner.start, config.hidden_size
        self.router = Router(context, f"{name}.router")
        self.gate_up, self.gate_up_scale = self._matrices(context, 2 * width, hidden, parts=("gate_proj", "up_proj"))
        self.down, self.down_scale = self._matrices(context, hidden, width, parts=("down_proj",))
        self._dispatch = make_dispatch(context, is_int8=self.gate_up_scale is not None)

    def forward(self, stream: Tensor, rows: Rows) -> Tensor:
        """[T, hidden] -> [T, hidden], both the stream."""
        return self.give(self.mix(stream, rows), rows)

    def mix(self, stream: Tensor, rows: Rows) -> Tensor:
        """The mixture of the rows that this rank hands in. Talks to the ranks that share experts, in their groups alone."""
        x = self._dispatch.take(stream, rows)
        sent = self._dispatch.dispatch(x, self.router, rows)
        routed = self._dispatch.combine(self._experts_of(sent), sent, rows)
        return self._with_zero_experts(routed, x, sent)

    def give(self, mixed: Tensor, rows: Rows) -> Tensor:
        """The stream of what every rank mixed."""
        return self._dispatch.give(mixed, rows)

    def prepare(self) -> None:
        """See Preparable."""
        kinds: list[WeightKind] = [
            "experts" if scale is None else "experts_int8" for scale in (self.gate_up_scale, self.down_scale)
        ]
        self.gate_up = prepared(self._ops, self.gate_up, kinds[0])
        self.down = prepared(self._ops, self.down, kinds[1])
        if self.down_scale is not None:
            self.down_scale = prepared(self._ops, self.down_scale, "experts_scale")

    def weight_specs(self) -> Iterator[WeightSpec]:
        """Router, and the three tensors of each expert that is here, written into the grouped ones."""
        yield from self.router.weight_specs()
        full, hidden = self._config.expert_ffn_hidden_size, self._config.hidden_size
        own = self._inner if self._inner.stop - self._inner.start < full else None
        for place, expert in enumerate(range(self._experts.start, self._experts.stop)):
            gate, up, down = (f"{self._name}.experts.{expert}.{part}_proj" for part in ("gate", "up", "down"))
            both = Piece(gate, full, own), Piece(up, full, own)
            yield from _specs(hidden, *both, of=_row(place, self.gate_up, self.gate_up_scale))
            if own is None:
                yield from _specs(full, Piece(down, hidden), of=_row(place, self.down, self.down_scale))
            else:  # never int8: a row is quantised over its whole inner width
                region = (slice(0, hidden), own)
                yield WeightSpec(f"{down}.weight", (hidden, full), copy_into(self.down[place].t()), region)

    def _experts_of(self, sent: Dispatched) -> Tensor:
        """What the experts of this rank make of the rows: weighted sums, or each row's own result (see Dispatched)."""
        if isinstance(sent.handle, FusedParcels):
            by_expert = sent.handle.sent
            return self._ops.expert_rows(
                sent.x,
                by_expert.counts,
                row_scale=by_expert.row_scale,
                gate_up=self.gate_up,
                down=self.down,
                gate_up_scale=self.gate_up_scale,
                down_scale=self.down_scale,
            )
        return self._ops.grouped_experts(
            sent.x,
            sent.routing.expert_ids,
            weights=sent.routing.weights,
            gate_up=self.gate_up,
            down=self.down,
            gate_up_scale=self.gate_up_scale,
            down_scale=self.down_scale,
        )

    def _with_zero_experts(self, routed: Tensor, x: Tensor, sent: Dispatched) -> Tensor:
        """The whole mixture of the rows ``x``, in their type."""
        own, weights = sent.own, sent.own.weights
        if sent.has_copies or self._config.zero_expert_num == 0 or self._config.zero_expert_type == "drop":
            return routed.to(x.dtype)
        if self._config.zero_expert_type == "copy":  # of an older release: each counts once, whatever its weight
            weights = torch.ones_like(weights)
        is_zero = own.expert_ids >= self._config.n_routed_experts
        zero_weight = (weights.to(self._ops.exact) * is_zero).sum(-1, keepdim=True)
        total: Tensor = routed + x.float() * zero_weight.float()
        return total.to(x.dtype)

    def _matrices(
        self, context: ModelContext, rows: int, columns: int, *, parts: tuple[str, ...]
    ) -> tuple[nn.Parameter, nn.Parameter | None]:
        """Room for one matrix of every expert, [in, out]; or [out, in] and its scales if the checkpoint has it in int8."""
        numbers = range(self._experts.start, self._experts.stop)
        names, count = [f"{self._name}.experts.{expert}.{part}" for expert in numbers for part in parts], len(numbers)
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
        rows = slice(start, start + piece.own_rows.stop - piece.own_rows.start)
        yield from piece_specs(piece, in_features, weight=weight[rows], scale=None if scale is None else scale[rows])
        start = rows.stop
