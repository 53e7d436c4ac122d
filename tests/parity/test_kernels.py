"""Every operator of the reference table against a slow and obvious twin, and its rows alone against rows in a batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.config.model import OverEmbeddingConfig
from longcat_pd.kernels.reference.indexer import index_scores

OPS = kernels.load("cpu")
BLOCK_SIZE, NUM_BLOCKS, LATENT, ROPE = 4, 20, 6, 4
NOWHERE = 1 << 40


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(got: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype: torch.dtype) -> None:
    x, delta, weight, bias = (randn(*shape, seed=s, dtype=dtype) for s, shape in enumerate([(5, 8), (5, 8), (8,), (8,)]))

    def naive(rows: Tensor) -> Tensor:
        wide = rows.double()
        return wide / (wide.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()

    tolerance = 1e-6 if dtype == torch.float32 else 8e-3
    assert_close(OPS.rms_norm(x, weight, 1e-3), naive(x), tolerance)
    total, normed = OPS.add_rms_norm(x, delta, weight=weight, eps=1e-3)
    assert torch.equal(total, x + delta) and normed.dtype == dtype
    assert_close(normed, naive(x + delta), tolerance)
    wide = x.double()
    centred = (wide - wide.mean(-1, keepdim=True)) / (wide.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
    layer = OPS.layer_norm(x, weight, bias=bias, eps=1e-3)
    assert layer.dtype == dtype
    assert_close(layer, centred * weight.double() + bias.double(), 3 * tolerance)


def test_swiglu() -> None:
    x = randn(3, 10)
    wanted = [[g / (1 + math.exp(-g)) * u for g, u in zip(row[:5], row[5:], strict=True)] for row in x.tolist()]
    assert_close(OPS.swiglu(x), torch.tensor(wanted))


def turn(angles: Tensor) -> Tensor:
    cos, sin = angles.cos(), angles.sin()
    return torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))


@pytest.mark.parametrize("is_interleaved", [True, False])
@pytest.mark.parametrize("heads", [(), (3,)])
def test_rope(is_interleaved: bool, heads: tuple[int, ...]) -> None:
    x = randn(4, *heads, 6)
    angles = randn(4, 3, seed=1)
    wanted = x.clone()
    for t in range(4):
        for i in range(3):
            a, b = (2 * i, 2 * i + 1) if is_interleaved else (i, i + 3)
            c, s = angles[t, i].cos(), angles[t, i].sin()
            wanted[t, ..., a] = x[t, ..., a] * c - x[t, ..., b] * s
            wanted[t, ..., b] = x[t, ..., b] * c + x[t, ..., a] * s
    rotation = turn(angles)
    assert_close(OPS.rope(x, rotation, is_interleaved=is_interleaved), wanted, 1e-6)
    assert OPS.rope(x.bfloat16(), rotation, is_interleaved=is_interleaved).dtype == torch.bfloat16


def test_rope_takes_a_strided_slice() -> None:
    wide, rotation = randn(4, 10), turn(randn(4, 3, seed=1))
    assert torch.equal(
        OPS.rope(wide[:, 2:8], rotation, is_interleaved=True),
        OPS.rope(wide[:, 2:8].contiguous(), rotation, is_interleaved=True),
    )


def test_store_writes_the_named_slots_and_no_other() -> None:
    cache, values = torch.zeros(5, 3, 2), randn(3, 2)
    OPS.store(cache, torch.tensor([4, 12, 5]), values)
    flat = cache.view(-1, 2)
    assert torch.equal(flat[[4, 12, 5]], values)
    assert flat.count_nonzero() == values.count_nonzero()


class Pages:
    """A paged cache, sequences scattered over it, and what a naive reader finds at each position."""

    def __init__(self, lengths: Sequence[int], *, seed: int = 0, width: int = LATENT) -> None:
        self.latent = randn(NUM_BLOCKS, BLOCK_SIZE, width, seed=seed)
        self.rope = randn(NUM_BLOCKS, BLOCK_SIZE, ROPE, seed=seed + 1)
        free = (torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
        columns = max(-(-length // BLOCK_SIZE) for length in lengths)
        self.tables = torch.zeros(len(lengths), columns, dtype=torch.int64)
        self.starts = torch.full((len(lengths), columns), NOWHERE)
        for b, length in enumerate(lengths):
            for column in range(-(-length // BLOCK_SIZE)):
                self.tables[b, column] = free.pop()
                self.starts[b, column] = column * BLOCK_SIZE

    def slot(self, seq: int, position: int) -> tuple[int, int]:
        return int(self.tables[seq, position // BLOCK_SIZE]), position % BLOCK_SIZE

    def attention(self, q: Tensor, seq: int, positions: Sequence[int], scale: float) -> tuple[Tensor, Tensor]:
        """Of one head's query [C + R] to the tokens at ``positions``: sum of latents, log-sum-exp; in fp64."""
        slots = [self.slot(seq, p) for p in positions]
        latents = torch.stack([self.latent[slot] for slot in slots]).double()
        ropes = torch.stack([self.rope[slot] for slot in slots]).double()
        scores = scale * (latents @ q[:LATENT].double() + ropes @ q[LATENT:].double())
        return torch.softmax(scores, 0) @ latents, torch.logsumexp(scores, 0)


def test_paged_attention() -> None:
    pages = Pages([9, 3])
    q = randn(2, 2, 3, LATENT + ROPE, seed=7)
    positions = torch.tensor([[7, 8], [0, 2]])
    out, lse = OPS.paged_attention(
        q,
        positions,
        latent=pages.latent,
        rope=pages.rope,
        block_tables=pages.tables,
        block_starts=pages.starts,
        scale=0.7,
    )
    for b, r, h in [(b, r, h) for b in range(2) for r in range(2) for h in range(3)]:
        wanted = pages.attention(q[b, r, h], b, range(int(positions[b, r]) + 1), 0.7)
        assert_close(out[b, r, h], wanted[0])
        assert_close(lse[b, r, h], wanted[1])


def test_paged_attention_without_any_visible_key_is_zero() -> None:
    pages = Pages([4])
    starts = torch.full_like(pages.starts, NOWHERE)
    out, lse = OPS.paged_attention(
        randn(1, 1, 2, LATENT + ROPE),
        torch.tensor([[3]]),
        latent=pages.latent,
        rope=pages.rope,
        block_tables=pages.tables,
        block_starts=starts,
        scale=1.0,
    )
    assert torch.equal(out, torch.zeros_like(out)) and torch.all(lse == -torch.inf)


def test_sparse_attention() -> None:
    pages = Pages([11, 6])
    picked = [[[10, 0, 4], [3]], [[5, 1], []]]
    keys = torch.tensor([[(row + [-1] * 5)[:5] for row in seq] for seq in picked])
    keys = keys[..., [3, 0, 1, 4, 2]]  # -1 may stand anywhere
    q = randn(2, 2, 3, LATENT + ROPE, seed=7)
    out, lse = OPS.sparse_attention(q, keys, latent=pages.latent, rope=pages.rope, block_tables=pages.tables, scale=0.7)
    for b, r, h in [(b, r, h) for b in range(2) for r in range(2) for h in range(3)]:
        if not picked[b][r]:
            assert torch.equal(out[b, r, h], torch.zeros(LATENT)) and lse[b, r, h] == -torch.inf
            continue
        wanted = pages.attention(q[b, r, h], b, picked[b][r], 0.7)
        assert_close(out[b, r, h], wanted[0])
        assert_close(lse[b, r, h], wanted[1])


@pytest.mark.parametrize("width", [0, 3])
def test_sparse_attention_with_nothing_picked_by_anybody(width: int) -> None:
    pages = Pages([4])
    keys = torch.full((1, 2, width), -1)
    q = randn(1, 2, 3, LATENT + ROPE)
    out, lse = OPS.sparse_attention(q, keys, latent=pages.latent, rope=pages.rope, block_tables=pages.tables, scale=1.0)
    assert torch.equal(out, torch.zeros(1, 2, 3, LATENT)) and torch.all(lse == -torch.inf)


def test_sparse_attention_to_all_keys_has_the_bits_of_dense_attention() -> None:
    pages = Pages([11])
    q = randn(1, 3, 3, LATENT + ROPE)
    positions = torch.tensor([[4, 9, 10]])
    where = {"latent": pages.latent, "rope": pages.rope, "block_tables": pages.tables}
    dense = OPS.paged_attention(q, positions, block_starts=pages.starts, scale=0.7, **where)
    keys = torch.arange(16).expand(1, 3, -1)
    keys = keys.masked_fill(keys > positions.unsqueeze(-1), -1).flip(-1)
    sparse = OPS.sparse_attention(q, keys, scale=0.7, **where)
    assert torch.equal(dense[0], sparse[0]) and torch.equal(dense[1], sparse[1])


def test_merge_partials_is_attention_over_the_union() -> None:
    scores, values = randn(2, 3, 12), randn(12, 5, seed=1)
    parts = [slice(0, 5), slice(5, 6), slice(6, 12)]
    outs = torch.stack([torch.softmax(scores[..., p], -1) @ values[p] for p in parts])
    lses = torch.stack([torch.logsumexp(scores[..., p], -1) for p in parts])
    assert_close(OPS.merge_partials(outs, lses), torch.softmax(scores, -1) @ values)


def test_merge_partials_without_keys() -> None:
    outs, lses = torch.zeros(3, 2, 1, 4), torch.full((3, 2, 1), -torch.inf)
    outs[1, 0], lses[1, 0] = 2.5, -80.0  # row 0: one part has keys; row 1: none has
    merged = OPS.merge_partials(outs, lses)
    assert torch.equal(merged[0], torch.full((1, 4), 2.5)) and torch.equal(merged[1], torch.zeros(1, 4))


def test_index_scores() -> None:
    pages = Pages([9, 3])
    index_q, weights = randn(2, 2, 5, LATENT), randn(2, 2, 5, seed=3)
    got = index_scores(index_q, weights, cache=pages.latent, block_tables=pages.tables)
    assert got.dtype == torch.float32
    for b, r, s in [(b, r, s) for b, length in ((0, 9), (1, 3)) for r in range(2) for s in range(length)]:
        key = pages.latent[pages.slot(b, s)]
        wanted = sum(float(w) * max(0.0, float(q @ key)) for w, q in zip(weights[b, r], index_q[b, r], strict=True))
        assert float(got[b, r, s]) == pytest.approx(wanted, abs=1e-5)


def naive_selection(scores: Sequence[float], positions: Sequence[int], low: int, high: int, budget: int) -> set[int]:
    eligible = [(-score, p) for score, p in zip(scores, positions, strict=True) if low <= p < high]
    return {p for _, p in sorted(eligible)[:budget]}


@pytest.mark.parametrize("budget", [1, 4, 9, 30])
def test_select_positions(budget: int) -> None:
    """Many ties, both zeros, both signs, garbage where nothing is eligible, positions in any order."""
    draw = torch.Generator().manual_seed(budget)
    scores = torch.randint(-2, 3, (50, 20), generator=draw) / 2.0
    scores = torch.where((scores == 0) & (torch.rand(scores.shape, generator=draw) < 0.5), -0.0, scores)
    positions = torch.stack([torch.randperm(40, generator=draw)[:20] for _ in range(50)])
    high = torch.randint(-1, 41, (50,), generator=draw)
    scores = scores.masked_fill(positions >= high.unsqueeze(-1), torch.nan)
    got_scores, got = OPS.select_positions(scores, positions, low=3, high=high, budget=budget)
    assert got.shape == got_scores.shape == (50, budget)
    for t in range(50):
        found = [p for p in got[t].tolist() if p >= 0]
        wanted = naive_selection(scores[t].tolist(), positions[t].tolist(), 3, int(high[t]), budget)
        assert len(found) == len(set(found)) and set(found) == wanted
        by_position = dict(zip(positions[t].tolist(), scores[t].tolist(), strict=True))
        assert all(s == by_position[p] for p, s in zip(got[t].tolist(), got_scores[t].tolist(), strict=True) if p >= 0)
        assert torch.all(got_scores[t][got[t] < 0] == -torch.inf)


def test_select_positions_orders_extreme_scores() -> None:
    scores = torch.tensor([[-3e38, 3e38, -1e-40, 1e-40, 0.0, -0.0]])
    order = [
        int(OPS.select_positions(scores, torch.arange(6)[None], low=0, high=torch.tensor([6]), budget=n)[1].sum())
        for n in range(1, 7)
    ]
    assert [b - a for a, b in zip([0, *order], order, strict=False)] == [1, 3, 4, 5, 2, 0]


@pytest.mark.parametrize("is_normalized", [False, True])
def test_route_topk(is_normalized: bool) -> None:
    logits, bias = randn(6, 10), randn(10, seed=1)
    ids, weights = OPS.route_topk(logits, bias, topk=3, factor=2.5, is_normalized=is_normalized)
    for t in range(6):
        probs = torch.softmax(logits[t].double(), 0)
        chosen = sorted(range(10), key=lambda e: -float(probs[e] + bias[e]))[:3]
        total = float(sum(probs[e] for e in chosen)) if is_normalized else 1.0
        assert dict(zip(ids[t].tolist(), weights[t].tolist(), strict=True)) == pytest.approx(
            {e: 2.5 * float(probs[e]) / total for e in chosen}, rel=1e-5
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [0, 1, 7, 40])
def test_grouped_experts(num_rows: int, dtype: torch.dtype) -> None:
    experts, hidden, width = 5, 8, 6
    x, gate_up = randn(num_rows, hidden, dtype=dtype), randn(experts, hidden, 2 * width, seed=1, dtype=dtype)
    down, weights = randn(experts, width, hidden, seed=2, dtype=dtype), randn(num_rows, 3, seed=3)
    draw = torch.Generator().manual_seed(num_rows)
    ids = torch.stack([torch.randperm(8, generator=draw)[:3] for _ in range(num_rows)]) if num_rows else weights.long()
    got = OPS.grouped_experts(x, ids, weights=weights, gate_up=gate_up, down=down)
    wanted = torch.zeros(num_rows, hidden, dtype=torch.float64)
    for t, k in [(t, k) for t in range(num_rows) for k in range(3) if ids[t, k] < experts]:
        e = int(ids[t, k])
        both = x[t].double() @ gate_up[e].double()
        inner = both[:width] * torch.sigmoid(both[:width]) * both[width:]
        wanted[t] += float(weights[t, k]) * (inner @ down[e].double())
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-4 if dtype == torch.float32 else 0.5)


def test_grouped_experts_where_only_zero_experts_were_chosen() -> None:
    x, ids = randn(2, 4), torch.tensor([[3, 4], [4, 3]])
    got = OPS.grouped_experts(x, ids, weights=torch.ones(2, 2), gate_up=randn(3, 4, 4), down=randn(3, 2, 4))
    assert torch.equal(got, torch.zeros(2, 4))


def tables(ratio: float, order: int, vocab: int) -> OverEmbeddingConfig:
    return OverEmbeddingConfig(
        oe_vocab_size_ratio=ratio,
        oe_neighbor_num=order,
        oe_split_num=4,
        hash_vocab_size=vocab,
        ignored_ranges=(),
        tensor_family="oe_embed",
    )


def ngram_rows(
    over: OverEmbeddingConfig, tokens: Sequence[int], *, eos: Sequence[int] = (2,), ignored: Sequence[tuple[int, int]] = ()
) -> Tensor:
    order = over.oe_neighbor_num
    windows = [[tokens[i - j] if i >= j else -1 for j in range(order)] for i in range(len(tokens))]
    return OPS.ngram_ids(
        torch.tensor(windows),
        powers=torch.tensor([over.powers_of(b) for b in range(over.num_tables)]),
        moduli=torch.tensor(over.table_sizes),
        eos=torch.tensor(eos),
        ignored=torch.tensor(ignored, dtype=torch.int64).view(-1, 2),
    )


def test_ngram_rows_of_2_0() -> None:
    """Published row numbers; tables 0, 4, 8, 12, 15."""
    wanted = [
        [1, 1, 1, 1, 1],
        [163857, 163857, 163857, 163857, 163857],
        [2949119, 5614845, 5601813, 5588781, 5579007],
        [2514920, 14865418, 3978294, 10369658, 6926082],
        [5, 5, 5, 5, 5],
        [819207, 819207, 819207, 819207, 819207],
        [1146880, 14475510, 14410350, 14345190, 14296320],
        [11, 2183187, 14736951, 14821687, 14892043],
        [1802253, 1802253, 9619099, 16433733, 8826893],
    ]
    rows = ngram_rows(tables(100.567, 5, 163840), [1, 17, 163839, 2, 5, 7, 0, 11, 13])
    assert rows[:, [0, 4, 8, 12, 15]].tolist() == wanted


def test_ngram_rows_of_lite() -> None:
    """Published row numbers; tables 0, 4, 8, 11."""
    rows = ngram_rows(tables(78, 4, 131072), [1, 17, 131071, 2, 5, 7, 0, 11, 13])[:, [0, 4, 8, 11]].tolist()
    assert rows[2] == [2359295, 6538479, 6525039, 6514959]
    assert rows[3] == [4061554, 3528867, 2116828, 9482214]
    assert rows[7] == [11, 8807049, 2862638, 9855489]
    assert rows[8] == [1441805, 1441805, 3474997, 5184884]


def test_ngram_rows_naively() -> None:
    """EOS of both kinds (also doubled, first and last), ignored ids, id 0, against the definition."""
    over, eos, ignored = tables(3.3, 4, 50), (2, 9), ((20, 23), (40, 41))
    draw = torch.Generator().manual_seed(1)
    pool = torch.tensor([0, 2, 9, 2, 20, 22, 23, 40, 41, 5, 6, 7, 49, 48])
    tokens = [2, *pool[torch.randint(len(pool), (300,), generator=draw)].tolist(), 2]
    got = ngram_rows(over, tokens, eos=eos, ignored=ignored)
    for i in range(len(tokens)):
        window = []
        for j in range(over.oe_neighbor_num):
            token = tokens[i - j] if i >= j else None
            if token is None or (j > 0 and token in eos) or any(a <= token < b for a, b in ignored):
                break
            window.append(token)
        for b, modulus in enumerate(over.table_sizes):
            wanted = sum(token * 50**j for j, token in enumerate(window) if j < over.order_of(b)) % modulus
            assert int(got[i, b]) == wanted, (i, b)


def test_overlap_returns_both() -> None:
    assert OPS.overlap(lambda: 1, lambda: "x") == (1, "x")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("width", "columns"), [(96, 64), (32, 1024), (512, 512), (2048, 96), (1024, 512), (64, 3)])
def test_a_row_of_a_product_has_the_same_bits_in_every_batch(width: int, columns: int, dtype: torch.dtype) -> None:
    x, weight = randn(600, width, dtype=dtype), randn(width, columns, seed=1, dtype=dtype)
    whole = OPS.linear(x, weight)
    assert_close(whole, x.double() @ weight.double(), 1e-3 if dtype == torch.float32 else 0.3)
    for start, end in [(0, 1), (7, 8), (3, 5), (3, 8), (100, 117), (0, 64), (250, 600)]:
        assert torch.equal(OPS.linear(x[start:end], weight), whole[start:end]), (start, end)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_linear(dtype: torch.dtype) -> None:
    x, weight = randn(20, 3, 8, dtype=dtype), randn(3, 8, 5, seed=1, dtype=dtype)
    whole = OPS.head_linear(x, weight)
    wanted = torch.stack([x[:, h].double() @ weight[h].double() for h in range(3)], 1)
    assert_close(whole, wanted, 1e-5 if dtype == torch.float32 else 0.05)
    assert torch.equal(OPS.head_linear(x[4:5], weight), whole[4:5])


def test_a_row_of_the_experts_has_the_same_bits_in_every_batch() -> None:
    x, weights, ids = randn(60, 32), randn(60, 2, seed=3), torch.randint(0, 5, (60, 2))
    gate_up, down = randn(4, 32, 24, seed=1), randn(4, 12, 32, seed=2)
    whole = OPS.grouped_experts(x, ids, weights=weights, gate_up=gate_up, down=down)
    for start, end in [(0, 1), (7, 8), (3, 8), (10, 27)]:
        part = slice(start, end)
        alone = OPS.grouped_experts(x[part], ids[part], weights=weights[part], gate_up=gate_up, down=down)
        assert torch.equal(alone, whole[part]), (start, end)


@pytest.mark.parametrize(
    ("heads", "latent", "block_size", "length"), [(12, 32, 8, 37), (3, 32, 8, 300), (16, 64, 5, 450), (64, 512, 128, 700)]
)
def test_a_row_of_attention_has_the_same_bits_in_every_batch(heads: int, latent: int, block_size: int, length: int) -> None:
    """Alone or in a chunk, beside sequences of any length, dense or with all keys picked."""
    columns = 1200 // block_size
    cache = {"latent": randn(columns + 1, block_size, latent), "rope": randn(columns + 1, block_size, ROPE, seed=1)}
    tables = torch.randperm(columns, generator=torch.Generator().manual_seed(0)).view(1, -1) + 1
    starts = torch.arange(columns).view(1, -1) * block_size
    q, positions = randn(1, 20, heads, latent + ROPE, seed=2), torch.arange(length - 20, length).view(1, 20)

    def dense(rows: slice, columns: int) -> tuple[Tensor, Tensor]:
        where = {"block_tables": tables[:, :columns], "block_starts": starts[:, :columns], **cache}
        return OPS.paged_attention(q[:, rows], positions[:, rows], scale=0.1, **where)

    def sparse(rows: slice, columns: int) -> tuple[Tensor, Tensor]:
        own = positions[:, rows].unsqueeze(-1)
        keys = torch.arange(columns * block_size).expand(1, own.shape[1], -1)
        keys = keys.masked_fill(keys > own, -1)
        return OPS.sparse_attention(q[:, rows], keys, block_tables=tables[:, :columns], scale=0.1, **cache)

    whole = dense(slice(0, 20), columns)
    for rows, width in [(slice(0, 20), -(-length // block_size)), (slice(3, 4), columns), (slice(5, 7), columns - 1)]:
        for part in (dense(rows, width), sparse(rows, width)):
            assert torch.equal(part[0], whole[0][:, rows]) and torch.equal(part[1], whole[1][:, rows])


@pytest.mark.parametrize("heads", [2, 4, 32])
def test_a_score_has_the_same_bits_in_every_batch(heads: int) -> None:
    cache, tables = randn(40, 8, 16), torch.arange(40).view(1, -1)
    index_q, weights = randn(1, 20, heads, 16, seed=1), randn(1, 20, heads, seed=2)
    whole = index_scores(index_q, weights, cache=cache, block_tables=tables)
    for rows, columns in [(slice(0, 20), 7), (slice(3, 4), 40), (slice(5, 7), 11)]:
        part = index_scores(index_q[:, rows], weights[:, rows], cache=cache, block_tables=tables[:, :columns])
        assert torch.equal(part, whole[:, rows, : columns * 8])
