"""For every operator that has a CPU kernel, calls that a card takes too: seeded, small, of full widths, in bf16 and int8.

``CASES`` are for one card. ``FUSED`` need two cards and HCCL. Run on CPU by ``test_cases.py``, on cards by
``test_hardware.py``.
"""

from __future__ import annotations

from tests.npu import cases_attention, cases_experts, cases_rows
from tests.npu.case import Case
from tests.npu.cases_experts import FUSED, FUSED_OPERATORS, FUSED_RULES, FusedCase, fused

__all__ = ["CASES", "FUSED", "FUSED_OPERATORS", "FUSED_RULES", "FusedCase", "fused"]

CASES: tuple[Case, ...] = (*cases_rows.CASES, *cases_attention.CASES, *cases_experts.CASES)
