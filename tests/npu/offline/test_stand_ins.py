"""What the stand-ins make possible, and what they do not pretend."""

import pytest
import torch

from tests.npu.device import install
from tests.npu.offline.real import torch_npu
from tests.npu.offline.shapes import empty, fake
from tests.npu.schema_lines import kept


def test_the_loaded_library_registers_the_kept_schemas() -> None:
    assert torch_npu.__version__ == "2.13.0"
    for line in kept("2.13.0"):
        expected = torch._C.parse_schema(f"npu::{line}")
        packet = getattr(torch.ops.npu, expected.name.removeprefix("npu::"))
        assert str(getattr(packet, expected.overload_name or "default")._schema) == str(expected)


def test_the_device_uses_the_schemas_of_the_real_library() -> None:
    installed = install()
    assert installed.real
    assert installed.refused == ()


def test_shapes_are_those_of_the_release() -> None:
    with fake():
        normalised, rstd = torch.ops.npu.npu_rms_norm(empty(3, 64), empty(64), epsilon=1e-6)
        assert (normalised.shape, normalised.dtype, normalised.device.type) == ((3, 64), torch.bfloat16, "npu")
        assert (rstd.shape, rstd.dtype) == ((3, 1), torch.float32)
        lengths = torch.tensor([3, 5], dtype=torch.int32, device="npu")
        assert (lengths.shape, lengths.device.type, lengths.cpu().device.type) == ((2,), "npu", "cpu")
        with pytest.raises(RuntimeError, match="Unknown keyword argument 'eps'"):
            torch.ops.npu.npu_rms_norm(empty(3, 64), empty(64), eps=1e-6)


def test_matrices_that_do_not_fit_are_refused() -> None:
    with fake(), pytest.raises(RuntimeError, match=r"K|dim"):
        torch.ops.npu.npu_quant_matmul(
            empty(4, 128, dtype=torch.int8),
            empty(64, 32, dtype=torch.int8),
            empty(32, dtype=torch.float32),
            pertoken_scale=empty(4, dtype=torch.float32),
            output_dtype=torch.bfloat16,
        )


def test_nothing_runs() -> None:
    assert torch.npu.device_count() == 1
    with pytest.raises(RuntimeError, match="NPU function error"):
        torch.ones(2, device="npu")
