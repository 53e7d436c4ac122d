"""What is asked of cards, on CPU in their place; and that comparing answers and messages notices what it should."""

from __future__ import annotations

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
    wanted = answers(spec, Mesh.single(), 3)
    install()
    monkeypatch.setattr(kernels, "load", load_in_16_bits)
    check_answers(answers(spec, Mesh.single(), 3), wanted)


def test_messages_between_processes(tiny: MakeCheckpoint) -> None:
    specs = specs_on("cpu", tiny("2.0", *WIDTHS["2.0"]), ParallelConfig(kvp_size=2, attn_tp_size=2))
    check_exchange(in_processes(specs, exchanged))


def said(*ids: int, logprob: float = -1.0) -> Said:
    return Said(list(ids), [logprob] * len(ids))


WANTED = [said(1, 2, 3, 4), said(5, 6, 7, 8)]


@pytest.mark.parametrize(
    ("found", "complaint"),
    [
        ([said(1, 9, 3, 4), said(5, 6, 9, 8)], "3 of 8 tokens"),
        ([replace(WANTED[0], logprobs=[-1.0, -1.5, -1.0, -1.0]), said(5, 6, 9, 8)], "3 of 8 tokens"),
        ([replace(WANTED[0], logprobs=[float("nan")] * 4), said(5, 6, 7, 9)], "3 of 8 tokens"),
        ([said(1, 2, 3, 4, logprob=-1.2), said(5, 6, 7, 8, logprob=-0.8)], "0.2 away on average"),
        ([said(1, 2, 3), said(5, 6, 7, 8)], "answer 0 has 3 tokens"),
        ([said(1, 2, 3, 4)], "there is 1 answer"),
    ],
    ids=["tokens", "a log-prob and a token", "NaN", "all log-probs", "a token fewer", "an answer fewer"],
)
def test_wrong_answers_are_noticed(found: list[Said], complaint: str) -> None:
    with pytest.raises(AssertionError, match=complaint):
        check_answers(found, WANTED)


def test_an_answer_may_go_another_way() -> None:
    check_answers(WANTED, WANTED)
    check_answers([said(1, 2, 9, 9, logprob=-1.05), said(5, 6, 7, 9)], WANTED)


@pytest.mark.parametrize("name", expected_exchange(0))
def test_a_wrong_message_is_noticed(name: str) -> None:
    right = [expected_exchange(rank) for rank in range(2)]
    check_exchange(right)
    with pytest.raises(AssertionError, match=f"{name} on rank 1"):
        check_exchange([right[0], {**right[1], name: right[1][name].flip(0)}])
