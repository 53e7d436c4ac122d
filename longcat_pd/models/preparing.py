"""The step between loading and serving: weights take the form that the operators of a device want. Knows no device."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from longcat_pd.kernels.ops import Ops, WeightKind


@runtime_checkable
class Preparable(Protocol):
    """A module with weights of its own that operators want prepared. Their specs mean nothing afterwards."""

    def prepare(self) -> None:
        """Once, when its weights are loaded."""
        ...


def prepare_all(model: nn.Module) -> None:
    """All modules, one after the other: what is replaced goes before the next one is prepared."""
    for module in list(model.modules()):
        if isinstance(module, Preparable):
            module.prepare()


def prepared(ops: Ops, weight: nn.Parameter, kind: WeightKind) -> nn.Parameter:
    """The weight that takes the place of ``weight``; may be itself."""
    return parameter(ops.prepare(weight.data, kind), weight)


def parameter(made: Tensor, loaded: nn.Parameter) -> nn.Parameter:
    """``made`` as a parameter; ``loaded`` itself where it is what was loaded."""
    return loaded if made is loaded.data or made is loaded else nn.Parameter(made, requires_grad=False)
