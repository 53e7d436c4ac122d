"""What is asked of cards, on CPU in their place; and that comparing answers and messages notices what it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from longcat_pd import kernels
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.parallel.mesh import Mesh
from tests.compiled import Said
from tests.npu.cards import (
    answers,
    check_answers,
    check_exchange,
    exchanged,
    expected_exchange,
    in_processes,
    load_in_16_bits,
    specs_on,
)
from tests.npu.device import install
from tests.npu.widths import WIDTHS
from tests.parity.conftest import MakeCheckpoint


def test_steps_in_16_bits(tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NPU's table over CPU kernels in place of a card, against the reference table, which rounds elsewhere."""
    (spec,) = specs_on("cpu", tiny("2.0", *WIDTHS["2.0"]))
    wanted = answers(spec, Mesh.single())
    install()
    monkeypatch.setattr(kernels, "load", load_in_16_bits)
    check_answers(answers(spec, Mesh.single()), wanted)


def test_messages_between_processes(tiny: MakeCheckpoint) -> None:
    specs = specs_on("cpu", tiny("2.0", *WIDTHS["2.0"]), ParallelConfig(kvp_size=2, attn_tp_size=2))
    check_exchange(in_processes(specs, exchanged))


def said(*ids: int, logprob: float = -1.0) -> Said:
    return Said(list(ids), [logprob] * len(ids))


WANTED = [said(1, 2, 3, 4), said(5, 6, 7, 8)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda one: replace(one, logprobs=[-1.0, -1.5, -1.0, -1.0]), "token 1: the log-prob is 0.5 away"),
        (lambda one: replace(one, logprobs=[-1.3] * 4), "0.15 away on average"),
        (lambda one: replace(one, logprobs=[-1.0, float("nan"), -1.0, -1.0]), "token 1"),
        (lambda one: said(1, 9, 3, 4, logprob=-3.0), "the log-prob is 2 away"),
        (lambda one: replace(one, ids=one.ids[:3]), "3 tokens"),
    ],
    ids=["a log-prob", "all of them", "NaN", "a token that was no near tie", "a token fewer"],
)
def test_a_wrong_answer_is_noticed(change: Callable[[Said], Said], complaint: str) -> None:
    check_answers(WANTED, WANTED)
    with pytest.raises(AssertionError, match=complaint):
        check_answers([change(WANTED[0]), WANTED[1]], WANTED)


def test_near_ties_may_fall_otherwise_but_not_all_of_them() -> None:
    check_answers([said(1, 2, 9, 4, logprob=-1.05), WANTED[1]], WANTED)
    with pytest.raises(AssertionError, match="1 of 8 tokens"):
        check_answers([said(1, 9, 9, 9), said(9, 9, 9, 9)], WANTED)


@pytest.mark.parametrize("name", expected_exchange(0))
def test_a_wrong_message_is_noticed(name: str) -> None:
    right = [expected_exchange(rank) for rank in range(2)]
    check_exchange(right)
    with pytest.raises(AssertionError, match=f"{name} on rank 1"):
        check_exchange([right[0], {**right[1], name: right[1][name].flip(0)}])
