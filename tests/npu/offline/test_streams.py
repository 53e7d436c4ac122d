"""What the stream-capture backend accepts, and which lengths it can change between replays."""

import pytest
import torch

from tests.npu.offline.shapes import empty, fake
from tests.npu.offline.streams import capture_code
from tests.npu.offline.test_operators import fused_attention


def attention(x: torch.Tensor, keys: list[int]) -> torch.Tensor:
    return fused_attention(torch.ops.npu.npu_fused_infer_attention_score_v2, [2, 4], keys)[0] + x


def test_what_has_no_ge_converter_is_captured() -> None:
    with fake():
        code = capture_code(lambda x: torch.cummax(x, 0)[0] + torch.isnan(x), empty(4, 8))
    assert "torch.ops.aten.cummax.default" in code


def test_lengths_of_a_static_function_are_constants_of_the_capture() -> None:
    with fake():
        code = capture_code(attention, empty(1), [90, 7])
    assert "npu_fused_infer_attention_score_v2.out" in code
    assert "actual_seq_kvlen = [90, 7]" in code
    assert "updated_ops_param={}" in code


def test_lengths_of_a_dynamic_function_are_updated_at_replay() -> None:
    with fake():
        code = capture_code(attention, empty(1), [90, 7], dynamic=True)
    assert "updated_param_name=['actual_seq_kvlen']" in code
    assert "unupdated_sym_input_index=[]" in code  # so that no length is part of a capture's key


def test_an_unknown_option_is_refused() -> None:
    with fake(), pytest.raises(Exception, match="run_eagerly"):
        capture_code(lambda x: x + 1, empty(4), options={"run_eagerly": True})
