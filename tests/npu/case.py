"""One call of one operator, with arguments that a card takes, and what has to come of it on any device."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.npu.compare import Arguments, Rule
from tests.npu.kernels.refusals import FRACTAL_NZ

BF16, FLOAT, HALF = torch.bfloat16, torch.float32, torch.float16


class Draw:
    """Seeded arguments, made on CPU."""

    def __init__(self, seed: str) -> None:
        self._generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))

    def normal(self, *shape: int, dtype: torch.dtype = BF16, size: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=self._generator) * size).to(dtype)

    def uniform(self, *shape: int, low: float = 0.5, high: float = 1.5, dtype: torch.dtype = FLOAT) -> Tensor:
        return (torch.rand(shape, generator=self._generator) * (high - low) + low).to(dtype)

    def int8(self, *shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=self._generator, dtype=torch.int8)

    def ints(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.randint(low, high, shape, generator=self._generator, dtype=dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def angles(self, *shape: int, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor]:
        """cos and sin of rotations; both halves of the last dimension alike."""
        half = torch.rand((*shape[:-1], shape[-1] // 2), generator=self._generator) * 6
        whole = torch.cat((half, half), -1)
        return whole.cos().to(dtype), whole.sin().to(dtype)


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        make: the arguments by the schema's names, on CPU. The same tensor twice stays the same tensor on the card.
        outputs: a rule for each result, in the schema's order.
        mutated: rules for arguments that the call writes.
        private: weights that are cast to the matrix unit's format on the device before the call.
        idle: arguments that do not change what is compared, and why.
    """

    operator: str
    name: str
    make: Callable[[Draw], dict[str, Any]]
    outputs: tuple[Rule, ...]
    mutated: Mapping[str, Rule] = field(default_factory=dict)
    private: tuple[str, ...] = ()
    idle: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.operator.removeprefix('npu_')}-{self.name}"

    def arguments(self) -> dict[str, Any]:
        return self.make(Draw(str(self)))


@dataclass(frozen=True)
class Outcome:
    """Results and written arguments of a call, on CPU."""

    outputs: tuple[Tensor, ...]
    mutated: Mapping[str, Tensor]


def run(case: Case, arguments: Arguments, device: str = "cpu") -> Outcome:
    """The call on a device; ``arguments`` are not written."""
    moved = _moved(arguments, device)
    for argument in case.private:
        moved[argument] = _each(moved[argument], lambda weight: torch.ops.npu.npu_format_cast(weight, FRACTAL_NZ))
    results = getattr(torch.ops.npu, case.operator)(**moved)
    listed = () if results is None else (results,) if isinstance(results, Tensor) else tuple(results)
    return Outcome(tuple(each.cpu() for each in listed), {name: moved[name].cpu() for name in case.mutated})


def compare(case: Case, found: Outcome, wanted: Outcome, arguments: Arguments) -> None:
    """AssertionError that names what differs."""
    assert len(found.outputs) == len(wanted.outputs) == len(case.outputs), (
        f"{case.operator} has {len(found.outputs)} results"
    )
    for number, rule in enumerate(case.outputs):
        _checked(f"{case}: result {number}", rule, found.outputs[number], wanted.outputs[number], arguments)
    for argument, rule in case.mutated.items():
        _checked(f"{case}: {argument}", rule, found.mutated[argument], wanted.mutated[argument], arguments)


def _checked(what: str, rule: Rule, found: Tensor, wanted: Tensor, arguments: Arguments) -> None:
    try:
        rule.check(found, wanted, arguments)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def _moved(arguments: Arguments, device: str) -> dict[str, Any]:
    made: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor.clone().to(device)
        return made[id(tensor)]

    return {name: _each(value, move) for name, value in arguments.items()}


def _each(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    is_tensors = isinstance(value, list) and value and isinstance(value[0], Tensor)
    return [change(each) for each in value] if is_tensors else value
