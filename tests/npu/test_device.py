"""The stand-in device: schemas of a release are the dispatcher's, kernels are reached with every default filled in."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.npu.device import by_keyword, install
from tests.npu.schema_lines import OPERATORS, RELEASES, kept, operator_of

ROOT = Path(__file__).parents[2]
installed = install()


@pytest.mark.parametrize("release", RELEASES)
def test_kept_lines_are_schemas_sorted_and_complete(release: str) -> None:
    lines = kept(release)
    assert lines == sorted(set(lines))
    for line in lines:
        assert torch._C.parse_schema(f"npu::{line}").name == f"npu::{operator_of(line)}"
    needed = {
        "npu_mla_prolog_v3",
        "npu_lightning_indexer",
        "npu_sparse_flash_attention",
        "npu_grouped_matmul_swiglu_quant_v2",
    }
    assert needed <= {operator_of(line) for line in lines} <= OPERATORS


def test_every_line_of_the_newest_release_is_defined() -> None:
    assert installed.refused == ()
    for line in kept("2.13.0"):
        assert hasattr(torch.ops.npu, operator_of(line))


def test_only_one_release_a_process() -> None:
    assert install() is installed
    with pytest.raises(RuntimeError, match=r"2\.13\.0"):
        install("2.6.0.post5")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: torch.ops.npu.npu_rms_norm(x, x, eps=1e-6), "eps"),
        (lambda x: torch.ops.npu.npu_rms_norm(x), "gamma"),
        (lambda x: torch.ops.npu.npu_rms_norm(x, None, epsilon=1e-6), "Tensor"),
        (lambda x: torch.ops.npu.npu_grouped_matmul(x, [x], group_list=x), "List"),
    ],
    ids=["unknown keyword", "missing argument", "None for a tensor", "a tensor for a list"],
)
def test_the_dispatcher_refuses(call, message) -> None:
    with pytest.raises((RuntimeError, TypeError), match=message):
        call(torch.zeros(4))


def test_a_kernel_is_called_by_keyword_with_the_defaults_of_the_schema() -> None:
    seen = {}
    schema = torch._C.parse_schema("npu::planted(Tensor x, int k=3, *, float eps=0.5, int[] ranges=[]) -> Tensor")
    x = torch.zeros(1)
    by_keyword(schema, lambda **arguments: seen.update(arguments))(x, eps=0.25)
    assert seen == {"x": x, "k": 3, "eps": 0.25, "ranges": []}


def test_the_older_release_has_its_own_schemas() -> None:
    """In a process of its own: only one release fits into one."""
    code = (
        "from tests.npu.device import install; import torch; assert not install('2.6.0.post5').refused;"
        "print('dst_type' in str(torch.ops.npu.npu_dynamic_quant.default._schema),"
        " hasattr(torch.ops.npu, 'npu_ring_attention_update'),"
        " 'ScalarType' in str(torch.ops.npu.npu_quant_matmul.default._schema))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT, timeout=120)
    assert (done.stdout.split(), done.returncode) == (["True", "False", "True"], 0), done.stderr
