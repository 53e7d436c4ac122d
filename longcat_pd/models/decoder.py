"""One decoder layer and the stack of a pipeline stage. Knows neither where keys lie nor what a step is for."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import Tensor, nn

from longcat_pd.models.attention import Attention
from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.context import ModelContext
from longcat_pd.models.kv_access import KVAccess, make_kv_access
from longcat_pd.models.linear import GatedMlp, RmsNorm
from longcat_pd.models.moe import MixtureOfExperts
from longcat_pd.models.rope import RotaryPositions
from longcat_pd.models.weight_spec import WeightSpec


class _Half(nn.Module):
    """One attention, one dense MLP and the norms in front of them: place ``j`` of a layer."""

    def __init__(self, context: ModelContext, layer: int, *, place: int, kv_access: KVAccess) -> None:
        super().__init__()
        config, name, j = context.config, f"model.layers.{layer}", place
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RmsNorm(context, f"{name}.input_layernorm.{j}", width=hidden, eps=eps)
        self.attention = Attention(context, 2 * layer + j, name=f"{name}.self_attn.{j}", kv_access=kv_access)
        self.post_norm = RmsNorm(context, f"{name}.post_attention_layernorm.{j}", width=hidden, eps=eps)
        self.mlp = GatedMlp(context, f"{name}.mlps.{j}", width=config.ffn_hidden_size)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """All tensors of this half."""
        for module in (self.input_norm, self.attention, self.post_norm, self.mlp):
            yield from module.weight_specs()


class DecoderLayer(nn.Module):
    """Two halves in a row, and a mixture of experts beside all that follows the first attention.

    The experts read what the first MLP reads, and their result joins at the end of the layer.
    """

    def __init__(self, context: ModelContext, layer: int, *, kv_access: KVAccess) -> None:
        super().__init__()
        self._ops = context.ops
        self.first = _Half(context, layer, place=0, kv_access=kv_access)
        self.second = _Half(context, layer, place=1, kv_access=kv_access)
        self.moe = MixtureOfExperts(context, f"model.layers.{layer}.mlp")

    def forward(self, x: Tensor, rotation: Tensor, inputs: ForwardInputs) -> Tensor:
        """[T, hidden] -> [T, hidden], both the stream."""
        first, second = self.first, self.second
        attended, keys = first.attention(first.input_norm(x), rotation, inputs=inputs, keys=None)
        self._ops.prefetch((first.mlp.gate_up.weight, self.moe.router.classifier.weight), attended)
        stream, normed = first.post_norm.after(x, attended)

        def dense_path() -> Tensor:
            mixed = first.mlp(normed, inputs.rows, then=second.attention.front.weights())
            middle, h = second.input_norm.after(stream, mixed)
            again, _ = second.attention(h, rotation, inputs=inputs, keys=keys)
            end, h = second.post_norm.after(middle, again)
            total: Tensor = end + second.mlp(h, inputs.rows)
            return total

        def experts() -> Tensor:
            return self.moe.mix(normed, inputs.rows)  # what ends it is in a group that the dense path talks in

        mixed, dense = self._ops.overlap(experts, dense_path)
        return dense + self.moe.give(mixed, inputs.rows)

    def weight_specs(self) -> Iterator[WeightSpec]:
        """All tensors of the layer."""
        for module in (self.first, self.second, self.moe):
            yield from module.weight_specs()


class Stack(nn.Module):
    """The decoder layers of one pipeline stage."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        kv_access = make_kv_access(context)
        self._numbers = context.layers
        self._rotary = RotaryPositions(context)
        self._layers = [DecoderLayer(context, layer, kv_access=kv_access) for layer in context.layers]
        self.layers = nn.ModuleList(self._layers)

    def forward(self, x: Tensor, inputs: ForwardInputs, on_layer: Callable[[int], None] | None) -> Tensor:
        """[T, hidden] -> [T, hidden]. ``on_layer(l)`` is called when all cache entries of layer l are written."""
        rotation = self._rotary(inputs.positions)
        for number, layer in zip(self._numbers, self._layers, strict=True):
            x = layer(x, rotation, inputs)
            if on_layer is not None:
                on_layer(number)
        return x

    def weight_specs(self) -> Iterator[WeightSpec]:
        """All tensors of the stage's layers."""
        for layer in self._layers:
            yield from layer.weight_specs()
