"""What lies in the cache beside the keys that rows see never shows: other blocks, the rest of a block, block 0."""

import random

import pytest
import torch
from torch import Tensor

from longcat_pd.kernels import NpuSettings, load
from longcat_pd.kernels.reference import table as reference_table
from tests.npu import device
from tests.npu.paged import BLOCK, Paged, noise, paged

device.install()
OPS, REFERENCE = load("npu", npu=NpuSettings(dtype=torch.float32)), reference_table()


def world(draw: random.Random) -> Paged:
    """Contexts of nothing here, one token, whole blocks and one more; somewhere in a very long sequence."""
    ranks = draw.choice([1, 2, 3])
    lengths = [draw.choice([1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 70]) for _ in range(draw.choice([1, 2, 5]))]
    at = paged(lengths, draw.choice([1, 2, 4]), ranks=ranks, rank=draw.randrange(ranks), seed=draw.randrange(99))
    at.positions.clamp_(min=0)
    return at


def is_seen(at: Paged) -> Tensor:
    """[blocks, BLOCK]: whose keys some row sees."""
    seen = torch.zeros(at.num_blocks, BLOCK, dtype=torch.bool)
    for table, starts, positions in zip(at.tables, at.starts, at.positions, strict=True):
        for block, start in zip(table.tolist(), starts.tolist(), strict=True):
            seen[block] |= start + torch.arange(BLOCK) <= positions.max()
    return seen


def with_strays(cache: Tensor, at: Paged) -> Tensor:
    return torch.where(is_seen(at).unsqueeze(-1), cache, torch.nan)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention(seed: int, dtype: torch.dtype) -> None:
    draw = random.Random(seed)
    at = world(draw)
    q = noise(*at.positions.shape, 4, 576, seed=seed, dtype=dtype)
    latent, rope = (noise(at.num_blocks, BLOCK, width, seed=width, dtype=dtype) for width in (512, 64))
    where = {"block_tables": at.tables, "scale": 0.05}
    expected = REFERENCE.paged_attention(
        q.float(), at.positions, latent=latent.float(), rope=rope.float(), block_starts=at.starts, **where
    )
    latent, rope = with_strays(latent, at), with_strays(rope, at)
    got = OPS.paged_attention(q, at.positions, latent=latent, rope=rope, block_starts=at.starts, **where)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(got, expected, **close)
    keys = torch.arange(at.tables.shape[1] * BLOCK).expand(*at.positions.shape, -1)
    stands = at.starts.repeat_interleave(BLOCK, 1).unsqueeze(1) + keys % BLOCK
    keys = torch.where(stands <= at.positions.unsqueeze(-1), keys, -1)
    torch.testing.assert_close(OPS.sparse_attention(q, keys, latent=latent, rope=rope, **where), expected, **close)


@pytest.mark.parametrize("seed", range(24))
def test_candidates(seed: int) -> None:
    """As far away as positions go; more wanted than there are; ranges that leave nothing."""
    draw = random.Random(seed)
    at, heads = world(draw), draw.choice([1, 4])
    far = draw.choice([0, (1 << 21) - 256])
    starts = torch.where(at.starts < 1 << 40, at.starts + far, at.starts)
    q, weights = noise(*at.positions.shape, heads, 128, seed=seed), noise(*at.positions.shape, heads, seed=seed + 1)
    cache = noise(at.num_blocks, BLOCK, 128, seed=2)
    if draw.random() < 0.5:
        cache[:] = cache[:1, :1]  # equal scores everywhere
    high = at.positions + far + 1 - draw.choice([0, 1, 20])
    limits = (draw.choice([0, far, far + 4]) if far == 0 else 0, draw.choice([1, 3, 64, 200]))
    what = {"block_tables": at.tables, "block_starts": starts, "high": high, "limits": limits}
    scores, expected = REFERENCE.index_candidates(q, weights, cache=cache, **what)
    found = OPS.index_candidates(q, weights, cache=with_strays(cache, at), **what)
    for ours, theirs in zip(*(x.flatten(0, 1).sort(-1).values for x in (found[1], expected)), strict=True):
        assert ours.tolist() == theirs.tolist()
    torch.testing.assert_close(found[0].sort(-1).values, scores.sort(-1).values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows_each", [1, 3])
def test_nobody(rows_each: int) -> None:
    none = torch.zeros(0, 4, dtype=torch.int64)
    q, positions = torch.zeros(0, rows_each, 4, 576), torch.zeros(0, rows_each, dtype=torch.int64)
    where = {"latent": torch.zeros(3, BLOCK, 512), "rope": torch.zeros(3, BLOCK, 64), "block_tables": none, "scale": 1.0}
    for out, lse in (
        OPS.paged_attention(q, positions, block_starts=none, **where),
        OPS.sparse_attention(q, positions.unsqueeze(-1), **where),
    ):
        assert (out.shape, lse.shape) == ((0, rows_each, 4, 512), (0, rows_each, 4))
    scores, found = OPS.index_candidates(
        torch.zeros(0, rows_each, 4, 128),
        torch.zeros(0, rows_each, 4),
        cache=torch.zeros(3, BLOCK, 128),
        block_tables=none,
        block_starts=none,
        high=positions,
        limits=(0, 5),
    )
    assert scores.shape == found.shape == (0, rows_each, 5)
