"""What an owner of a card runs, as far as it goes without one: the CPU kernels under the real schemas take every call."""

import pytest

from tests.npu.cards import cards
from tests.npu.case import Case, compare, run
from tests.npu.cases import CASES, FUSED, FusedCase
from tests.npu.device import install
from tests.npu.offline import real
from tests.npu.on_threads import fused_on_threads

assert install().real and real.torch_npu is not None


def test_no_card_is_made_of_stand_ins() -> None:
    assert cards() == (0, "link stand-ins are in place of CANN")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_call_is_taken_by_the_real_schema(case: Case) -> None:
    assert case.operator in install().computed
    arguments = case.arguments()
    compare(case, run(case, arguments), run(case, arguments), arguments)


@pytest.mark.parametrize("case", FUSED, ids=str)
def test_the_fused_pair_is_taken_by_the_real_schemas(case: FusedCase) -> None:
    assert all(set(each) >= {"rows", "counts", "y"} for each in fused_on_threads(case))
