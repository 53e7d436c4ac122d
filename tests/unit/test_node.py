"""kernels/node.py and opaque.py: single nodes of a graph that compute what eager mode computes, without the compiler."""

from __future__ import annotations

import subprocess
import sys

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from longcat_pd import kernels
from longcat_pd.kernels.ops import Ops

PLAIN, SEALED = kernels.load("cpu"), kernels.load("cpu", exe_mode="inductor")
FIRST_CALL = """
import sys, torch
from longcat_pd import kernels
from longcat_pd.parallel import collectives
one = torch.ones(1, dtype=torch.int64)
kernels.load("cpu", exe_mode="inductor").keyed_uniform(one, one, one)
print([name for name in ("torch._dynamo", "torch._inductor.codecache", "sympy") if name in sys.modules])
"""


def test_the_first_call_does_not_import_the_compiler() -> None:
    """It takes seconds, in the middle of somebody's request."""
    found = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "[]"


def experts(ops: Ops, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1)
    gate_up, down = torch.randn(5, 8, 12, generator=draw), torch.randn(5, 6, 8, generator=draw)
    return ops.grouped_experts(x, ids, weights=weights, gate_up=gate_up, down=down)


def test_a_sealed_operator_is_one_node_with_the_bits_of_the_plain_one() -> None:
    draw = torch.Generator().manual_seed(0)
    x, weights = torch.randn(7, 8, generator=draw), torch.rand(7, 2, generator=draw)
    ids = torch.randint(0, 6, (7, 2), generator=draw)
    assert torch.equal(experts(SEALED, x, ids, weights), experts(PLAIN, x, ids, weights))
    graph = make_fx(lambda *inputs: experts(SEALED, *inputs), tracing_mode="fake", _allow_non_fake_inputs=True)(
        x, ids, weights
    )
    names = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
    assert [name for name in names if "longcat_pd" in name] == ["longcat_pd.grouped_experts.default"]
    assert not [name for name in names if "bincount" in name or "item" in name]


def test_sealed_attention_reads_no_more_than_there_is_and_gives_the_same_bits() -> None:
    """Tables with room for many blocks, of which few hold keys; columns that hold nothing start above every position."""
    draw = torch.Generator().manual_seed(0)
    latent, rope = torch.randn(9, 4, 16, generator=draw), torch.randn(9, 4, 8, generator=draw)
    latent[8], rope[8] = torch.nan, torch.nan  # a block that nobody may read
    tables = torch.tensor([[3, 5, 8, 8, 8], [1, 2, 7, 8, 8]])
    starts = torch.tensor([[0, 4, 1 << 40, 1 << 40, 1 << 40], [0, 4, 8, 1 << 40, 1 << 40]])
    q, positions = torch.randn(2, 2, 3, 24, generator=draw), torch.tensor([[5, 6], [9, 10]])
    where = {"latent": latent, "rope": rope, "scale": 0.3}
    found = SEALED.paged_attention(q, positions, block_tables=tables, block_starts=starts, **where)
    expected = PLAIN.paged_attention(
        q[1:], positions[1:], block_tables=tables[1:, :3], block_starts=starts[1:, :3], **where
    )
    assert torch.equal(found[0][1], expected[0][0]) and torch.equal(found[1][1], expected[1][0])
