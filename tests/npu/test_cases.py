"""The calls that cards are asked for, on CPU kernels alone; and that comparing notices what it should."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.npu.case import Case, Outcome, compare, run
from tests.npu.cases import CASES, FUSED, FUSED_OPERATORS, FUSED_RULES, FusedCase
from tests.npu.compare import Arguments, Opaque, Rule
from tests.npu.device import install
from tests.npu.kernels import all_kernels
from tests.npu.on_threads import fused_on_threads

install()
each_case = pytest.mark.parametrize("case", CASES, ids=str)
each_fused = pytest.mark.parametrize("case", FUSED, ids=str)


def test_no_operator_is_left_out() -> None:
    covered = {case.operator for case in CASES}
    assert covered.isdisjoint(FUSED_OPERATORS)
    assert covered | set(FUSED_OPERATORS) == set(all_kernels())
    assert len({str(case) for case in CASES}) == len(CASES)


@each_case
def test_a_call_is_taken_and_gives_the_same_again(case: Case) -> None:
    arguments = case.arguments()
    first, again = run(case, arguments), run(case, case.arguments())
    compare(case, again, first, arguments)
    for rule, result in _compared(case, first):
        rule.check_defined(result)
    for name, value in case.arguments().items():
        assert _is_same(value, arguments[name]), f"{name} was written"


@each_case
def test_a_result_that_is_wrong_is_noticed(case: Case) -> None:
    arguments = case.arguments()
    right, compared = run(case, arguments), 0
    for number, rule in enumerate(case.outputs):
        kinds = set()
        for kind, bad in rule.damaged(right.outputs[number], arguments):
            outputs = (*right.outputs[:number], bad, *right.outputs[number + 1 :])
            with pytest.raises(AssertionError, match=f"result {number}"):
                compare(case, Outcome(outputs, right.mutated), right, arguments)
            kinds.add(kind)
        compared += bool(kinds)
        assert isinstance(rule, Opaque) or len(kinds) >= 2, f"result {number}: only {kinds}"
    for argument, rule in case.mutated.items():
        for _, bad in rule.damaged(right.mutated[argument], arguments):
            with pytest.raises(AssertionError, match=argument):
                compare(case, Outcome(right.outputs, {**right.mutated, argument: bad}), right, arguments)
            compared += 1
    assert compared, "nothing is compared"


@each_case
def test_every_argument_counts(case: Case) -> None:
    """A device that took another tensor, or another factor, would be noticed; or it is refused."""
    arguments = case.arguments()
    right = run(case, arguments)
    for name, changed in _changed(arguments):
        is_noticed = False
        try:
            compare(case, run(case, arguments | changed), right, arguments)
        except (AssertionError, ValueError):
            is_noticed = True
        assert is_noticed == (name not in case.idle), f"{name}: {case.idle.get(name, 'has no influence')}"


def test_a_write_that_does_not_happen_is_noticed() -> None:
    for case in CASES:
        arguments = case.arguments()
        right = run(case, arguments)
        if case.mutated and case.operator != "npu_prefetch":
            for argument in case.mutated:
                stale = Outcome(right.outputs, {**right.mutated, argument: arguments[argument]})
                with pytest.raises(AssertionError, match=argument):
                    compare(case, stale, right, arguments)


def test_a_result_of_another_type_or_shape_is_noticed() -> None:
    case = CASES[0]
    arguments = case.arguments()
    right = run(case, arguments)
    for bad in (right.outputs[0].float(), right.outputs[0][:-1]):
        with pytest.raises(AssertionError, match="result 0"):
            compare(case, replace(right, outputs=(bad, right.outputs[1])), right, arguments)


@pytest.mark.parametrize("case", [case for case in CASES if case.operator == "npu_moe_gating_top_k"], ids=str)
def test_the_choice_of_experts_is_clear(case: Case) -> None:
    """What is compared exactly must not depend on how a device rounds."""
    given = case.arguments()
    best = (given["x"].softmax(-1) + given["bias"]).sort(-1, descending=True).values[:, : given["k"] + 1]
    assert float((best[:, :-1] - best[:, 1:]).min()) > 1e-3


@each_fused
def test_the_fused_pair_among_threads(case: FusedCase) -> None:
    first, again = fused_on_threads(case), fused_on_threads(case)
    for rank in range(case.world):
        for name, rule in FUSED_RULES[case.quant_mode].items():
            wanted = first[rank][name]
            rule.check_defined(wanted)
            rule.check(again[rank][name], wanted, {})
            kinds = 0
            for _, bad in rule.damaged(wanted, {}):
                kinds += 1
                with pytest.raises(AssertionError):
                    rule.check(bad, wanted, {})
            assert kinds >= 1, name


def _compared(case: Case, outcome: Outcome) -> Iterator[tuple[Rule, Tensor]]:
    yield from zip(case.outputs, outcome.outputs, strict=True)
    for argument, rule in case.mutated.items():
        yield rule, outcome.mutated[argument]


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    return all(map(_is_same, one, other)) if isinstance(one, list) else one == other


def _changed(arguments: Arguments) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each tensor with its rows moved on by one, wherever it is passed; each factor with another value."""
    for name, value in arguments.items():
        if isinstance(value, float):
            yield name, {name: value * 1.25 + 0.5}
        if isinstance(value, Tensor):
            moved = _moved_on(value)
            yield name, {other: moved for other, same in arguments.items() if same is value}
        if isinstance(value, list) and value and isinstance(value[0], Tensor):
            for number, one in enumerate(value):
                yield name, {name: [*value[:number], _moved_on(one), *value[number + 1 :]]}


def _moved_on(tensor: Tensor) -> Tensor:
    dim = next(dim for dim, size in enumerate(tensor.shape) if size > 1)
    return tensor.roll(1, dim).contiguous()
