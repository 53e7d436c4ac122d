"""Slow twins of operators against the table: random shapes, with padding rows, empty columns, keys of -1, and no rows."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.kernels.ops import Ops, PrologScales, PrologWeights

PARTS = ("attention", "experts", "norms", "prolog")
NOWHERE = 1 << 40
BLOCK_SIZE, NUM_BLOCKS = 4, 24

seeds = pytest.mark.parametrize("seed", range(6))
kinds = pytest.mark.parametrize("is_steady", [False, True])
types = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


class Draw:
    """Random sizes and numbers of one seed."""

    def __init__(self, seed: int) -> None:
        self.size = random.Random(seed)
        self._numbers = torch.Generator().manual_seed(seed)

    def randn(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._numbers).to(dtype)

    def below(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self._numbers)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._numbers)

    def rows(self) -> int:
        return self.size.choice([0, 1, 2, 7, 40])

    def rotation(self, rows: int, width: int) -> Tensor:
        angles = self.randn(rows, width // 2) * 10
        cos, sin = angles.cos(), angles.sin()
        return torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))


def both(*parts: str, is_steady: bool) -> tuple[Ops, Ops]:
    return kernels.load("cpu", is_steady=is_steady), kernels.load("cpu", is_steady=is_steady, unfused=parts)


def assert_close(found: Tensor, wanted: Tensor, dtype: torch.dtype | None = None) -> None:
    """``dtype``: of what it was computed from, where that is not the type of the result."""
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    tolerance = 2e-2 if torch.bfloat16 in (dtype, found.dtype) else 1e-5
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def twins_of(*parts: str) -> set[str]:
    operators = {name: op for name, op in vars(kernels.load("cpu", unfused=parts)).items() if callable(op)}
    return {name for name, op in operators.items() if "unfused" in op.__module__}


def test_each_part_replaces_its_own_operators_and_no_other() -> None:
    assert {part: twins_of(part) for part in PARTS} == {
        "attention": {"paged_attention", "sparse_attention"},
        "experts": {"grouped_experts"},
        "norms": {"rms_norm", "add_rms_norm", "layer_norm", "swiglu", "rope"},
        "prolog": {"mla_prolog"},
    }
    assert not twins_of()
    assert len(twins_of(*PARTS)) == 9


@seeds
@kinds
@types
def test_norms_and_activation(seed: int, is_steady: bool, dtype: torch.dtype) -> None:
    draw, (plain, twin) = Draw(seed), both("norms", is_steady=is_steady)
    lead, width = (draw.rows(), *draw.size.choice([(), (3,)])), 2 * draw.size.randrange(1, 40)
    x, delta = (draw.randn(*lead, width, dtype=dtype) * 3 for _ in range(2))
    weight, bias = (draw.randn(width, dtype=dtype) for _ in range(2))
    assert_close(twin.rms_norm(x, weight, 1e-5), plain.rms_norm(x, weight, 1e-5))
    total, normed = twin.add_rms_norm(x, delta, weight=weight, eps=1e-5)
    wanted = plain.add_rms_norm(x, delta, weight=weight, eps=1e-5)
    assert torch.equal(total, wanted[0])
    assert_close(normed, wanted[1])
    assert_close(twin.layer_norm(x, weight, bias=bias, eps=1e-5), plain.layer_norm(x, weight, bias=bias, eps=1e-5))
    assert_close(twin.swiglu(x * 30), plain.swiglu(x * 30))


@seeds
@kinds
@types
@pytest.mark.parametrize("is_interleaved", [False, True])
def test_rope(seed: int, is_steady: bool, dtype: torch.dtype, is_interleaved: bool) -> None:
    draw, (plain, twin) = Draw(seed), both("norms", is_steady=is_steady)
    rows, width = draw.rows(), 2 * draw.size.randrange(1, 20)
    wide = draw.randn(rows, *draw.size.choice([(), (3,)]), width + 4, dtype=dtype)
    rotation, x = draw.rotation(rows, width), wide[..., 4:]
    found = twin.rope(x, rotation, is_interleaved=is_interleaved)
    assert_close(found, plain.rope(x, rotation, is_interleaved=is_interleaved))


class Pages:
    """A cache and sequences that lie in it, with a column in the middle that another rank has, and columns of nothing."""

    def __init__(self, draw: Draw, *, batch: int, dtype: torch.dtype) -> None:
        self.latent_width, self.rope_width = draw.size.choice([(6, 4), (16, 8)])
        self.latent = draw.randn(NUM_BLOCKS, BLOCK_SIZE, self.latent_width, dtype=dtype)
        self.rope = draw.randn(NUM_BLOCKS, BLOCK_SIZE, self.rope_width, dtype=dtype)
        columns = draw.size.randrange(2, 6)
        self.tables = draw.below(NUM_BLOCKS, batch, columns)
        self.starts = torch.full((batch, columns), NOWHERE)
        for row in self.starts:
            held = draw.size.randrange(columns + 1)  # 0: a padding row, or a rank that holds nothing of it
            row[:held] = torch.arange(held) * BLOCK_SIZE * draw.size.choice([1, 2])
        self.where = {"latent": self.latent, "rope": self.rope, "block_tables": self.tables}


@seeds
@kinds
@types
@pytest.mark.parametrize("exe_mode", ["eager", "inductor"])
def test_attention(seed: int, is_steady: bool, dtype: torch.dtype, exe_mode: str) -> None:
    """A compiled step has it as one node, with the same result."""
    draw, plain = Draw(seed), kernels.load("cpu", is_steady=is_steady)
    twin = kernels.load("cpu", exe_mode=exe_mode, is_steady=is_steady, unfused=["attention"])
    batch, rows, heads = draw.size.choice([1, 3]), draw.size.choice([1, 4]), draw.size.choice([1, 3])
    pages = Pages(draw, batch=batch, dtype=dtype)
    q = draw.randn(batch, rows, heads, pages.latent_width + pages.rope_width, dtype=dtype)
    num_keys = pages.tables.shape[1] * BLOCK_SIZE
    positions = draw.below(num_keys, batch, rows)
    dense = {"block_starts": pages.starts, "scale": 0.4, **pages.where}
    for found, wanted in zip(
        twin.paged_attention(q, positions, **dense), plain.paged_attention(q, positions, **dense), strict=True
    ):
        assert_close(found, wanted, dtype)
    keys = torch.stack([draw.order(num_keys)[:7] for _ in range(batch * rows)])
    keys = keys.view(batch, rows, -1).masked_fill(draw.below(3, batch, rows, 1) == 0, -1)  # of some rows none
    keys = keys.masked_fill(draw.below(3, *keys.shape) == 0, -1)
    for found, wanted in zip(
        twin.sparse_attention(q, keys, scale=0.4, **pages.where),
        plain.sparse_attention(q, keys, scale=0.4, **pages.where),
        strict=True,
    ):
        assert_close(found, wanted, dtype)


@seeds
@types
@kinds
@pytest.mark.parametrize("exe_mode", ["eager", "inductor"])
@pytest.mark.parametrize("is_int8", [False, True])
def test_experts(seed: int, dtype: torch.dtype, is_steady: bool, exe_mode: str, is_int8: bool) -> None:
    """Ids from the number of experts on belong to nobody here; some experts are chosen by nobody."""
    draw, plain = Draw(seed), kernels.load("cpu", is_steady=is_steady)
    twin = kernels.load("cpu", exe_mode=exe_mode, is_steady=is_steady, unfused=["experts"])
    rows, experts, hidden, width = draw.rows(), draw.size.choice([1, 5, 12]), 8, 6
    ids = torch.stack([draw.order(experts + 4)[:3] for _ in range(rows)]) if rows else draw.below(1, 0, 3)
    x, weights = draw.randn(rows, hidden, dtype=dtype), draw.randn(rows, 3)
    if is_int8:
        gate_up, down = (draw.below(255, *s).sub(127).to(torch.int8) for s in ((experts, 12, 8), (experts, 8, 6)))
        scales = {"gate_up_scale": draw.randn(experts, 12) / 100, "down_scale": draw.randn(experts, 8) / 100}
    else:
        gate_up, down = (draw.randn(*s, dtype=dtype) / 2 for s in ((experts, hidden, 2 * width), (experts, width, hidden)))
        scales = {}
    found = twin.grouped_experts(x, ids, weights=weights, gate_up=gate_up, down=down, **scales)
    wanted = plain.grouped_experts(x, ids, weights=weights, gate_up=gate_up, down=down, **scales)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    if is_int8:  # a last bit can become a step of the second product
        tolerance += 5e-2
    assert found.dtype == wanted.dtype and found.shape == wanted.shape
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * max(1.0, float(wanted.abs().mean())))


@seeds
@types
@kinds
@pytest.mark.parametrize("parts", [("prolog",), ("norms", "prolog")])
def test_prolog(seed: int, dtype: torch.dtype, is_steady: bool, parts: tuple[str, ...]) -> None:
    """Padding rows all write the same slot, whichever is last."""
    draw, (plain, twin) = Draw(seed), both(*parts, is_steady=is_steady)
    rows, heads, hidden, q_rank = draw.rows(), draw.size.choice([1, 3]), 24, 10
    nope, latent, turned = 5, 12, 6
    weights = PrologWeights(
        down=draw.randn(hidden, q_rank + latent + turned, dtype=dtype) / 5,
        q_norm=draw.randn(q_rank, dtype=dtype),
        q_up=draw.randn(q_rank, heads * (nope + turned), dtype=dtype) / 3,
        key_up=draw.randn(heads, nope, latent, dtype=dtype) / 2,
        kv_norm=draw.randn(latent, dtype=dtype),
    )
    x, rotation = draw.randn(rows, hidden, dtype=dtype), draw.rotation(rows, turned)
    slots = draw.order(NUM_BLOCKS * BLOCK_SIZE - 1)[:rows] + 1
    slots[rows // 2 + 1 :] = 0
    found = []
    for ops in (twin, plain):
        cache = tuple(torch.zeros(NUM_BLOCKS, BLOCK_SIZE, width, dtype=dtype) for width in (latent, turned))
        results = ops.mla_prolog(
            x, rotation, weights=weights, slots=slots, cache=(cache[0], cache[1]), scales=PrologScales(1e-5, 1.7)
        )
        for entry in cache:
            entry[0, 0] = 0
        found.append((*results, *cache))
    assert found[0][0].shape == (rows, heads, latent + turned) and found[0][1].shape == (rows, q_rank)
    for got, wanted in zip(*found, strict=True):
        tolerance = {torch.float32: 2e-5, torch.bfloat16: 6e-2}[dtype]
        assert got.dtype == wanted.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def test_prolog_is_what_its_parts_make() -> None:
    """Against the formulas, in fp64."""
    draw, ops = Draw(3), kernels.load("cpu")
    heads, nope, turned, latent, q_rank = 2, 3, 4, 5, 6
    down, q_up = draw.randn(7, q_rank + latent + turned), draw.randn(q_rank, heads * (nope + turned))
    weights = PrologWeights(down, draw.randn(q_rank), q_up, draw.randn(heads, nope, latent), draw.randn(latent))
    x, angles = draw.randn(3, 7), draw.randn(3, turned // 2)
    cos, sin = angles.cos(), angles.sin()
    rotation = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))
    cache = (torch.zeros(4, 2, latent), torch.zeros(4, 2, turned))
    q, q_lora = ops.mla_prolog(
        x, rotation, weights=weights, slots=torch.tensor([5, 2, 7]), cache=cache, scales=PrologScales(1e-5, 1.5)
    )

    def norm(values: Tensor, weight: Tensor) -> Tensor:
        return values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    def turn(pairs: Tensor) -> Tensor:
        as_complex = torch.view_as_complex(pairs.double().reshape(*pairs.shape[:-1], -1, 2).contiguous())
        by = torch.polar(torch.ones_like(angles).double(), angles.double())
        by = by if pairs.dim() == 2 else by.unsqueeze(1)
        return torch.view_as_real(as_complex * by).flatten(-2)

    wide = x.double() @ down.double()
    wanted_lora = norm(wide[:, :q_rank], weights.q_norm)
    by_head = (wanted_lora @ q_up.double()).view(3, heads, nope + turned)
    absorbed = torch.einsum("thn,hnc->thc", by_head[..., :nope], weights.key_up.double())
    assert_close(q.double(), torch.cat((absorbed, turn(by_head[..., nope:])), -1))
    assert_close(q_lora.double(), wanted_lora)
    stored = [entry.flatten(0, 1) for entry in cache]
    assert_close(stored[0][[5, 2, 7]].double(), 1.5 * norm(wide[:, q_rank : q_rank + latent], weights.kv_norm))
    assert_close(stored[1][[5, 2, 7]].double(), turn(wide[:, q_rank + latent :]))
    assert all(entry.count_nonzero() == 3 * entry.shape[1] for entry in stored)
