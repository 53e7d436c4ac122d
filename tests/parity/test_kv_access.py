"""n ranks against one, and against the formulas: selection, attention and whole models, whoever holds the keys."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.kv_access import make_kv_access
from tests.parity.conftest import MakeCheckpoint
from tests.parity.oracle import Oracle, read_checkpoint
from tests.parity.ranks import Member, Piece, Ranks

LAYOUTS = [(None, 1), ("cp", 2), ("cp", 3), ("kvp", 2), ("kvp", 3), ("kvp", 4)]
TOPK, INIT, LOCAL = 48, 4, 16  # of the small checkpoints
BLOCK = 8
EOS = 2


def some_tokens(count: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    tokens = [1] + [draw.randrange(1024) for _ in range(count - 1)]
    if count > 9:
        tokens[7] = EOS
    return tokens


# --- the selection alone ----------------------------------------------------------------------------------------------


class IntegerIndex:
    """Index keys, queries and weights of small whole numbers: scores are exact, and many are equal."""

    def __init__(self, heads: int, width: int, lengths: Sequence[int], seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.keys = [torch.randint(-1, 2, (n, width), generator=draw).float() for n in lengths]
        self.queries = [torch.randint(-1, 2, (n, heads, width), generator=draw).float() for n in lengths]
        self.weights = [torch.randint(-2, 3, (n, heads), generator=draw).float() for n in lengths]

    def fill(self, ranks: Ranks) -> None:
        for seq, keys in enumerate(self.keys):
            split = ranks.splits[seq]
            for position, key in enumerate(keys):
                number, offset = divmod(position, BLOCK)
                cache = ranks.members[split.rank_of(number)].context.cache
                cache.tensor("index.0")[ranks.blocks[seq][number], offset] = key

    def picked(self, seq: int, t: int) -> set[int]:
        """By the definition: the best of all keys, forced ones before everything else."""
        dots = (self.keys[seq][: t + 1] @ self.queries[seq][t].T).clamp_min(0)
        scores = (dots @ self.weights[seq][t]).tolist()
        for s in range(t + 1):
            if s < INIT or s > t - LOCAL:
                scores[s] = float("inf")
        return set(sorted(range(t + 1), key=lambda s: (-scores[s], s))[:TOPK])

    def select(self, member: Member, inputs: ForwardInputs) -> dict[tuple[int, int], set[int]]:
        """What a rank's KVAccess picks for its rows, as positions by (sequence, position of the row)."""
        rows = list(zip(inputs.row_seqs.tolist(), inputs.positions.tolist(), strict=True))
        queries = torch.stack([self.queries[0][:0].sum(0), *(self.queries[b][t] for b, t in rows)])[1:]
        weights = torch.stack([self.weights[0][:0].sum(0), *(self.weights[b][t] for b, t in rows)])[1:]
        keys = make_kv_access(member.context).select(0, queries, weights=weights, inputs=inputs)
        assert keys is not None
        found = {}
        for (seq, t), row in zip(rows, keys.tolist(), strict=True):
            starts = inputs.block_starts[seq].tolist()
            positions = [starts[key // BLOCK] + key % BLOCK for key in row if key >= 0]
            assert len(positions) == len(set(positions)), "a position counts once"
            found[seq, t] = set(positions)
        return found


@pytest.mark.parametrize(("axis", "size"), LAYOUTS)
def test_every_row_gets_the_defined_set(tiny: MakeCheckpoint, axis: str | None, size: int) -> None:
    """A window of rows, each with its own forced range; a row below, rows around and a row far above the limit."""
    lengths = [150, 12, 52, 5]
    ranks = Ranks(tiny("2.0"), [some_tokens(n, n) for n in lengths], axis=axis, size=size, block_size=BLOCK)
    assert ranks.config.indexer is not None
    index = IntegerIndex(ranks.config.indexer.index_n_heads, ranks.config.indexer.index_head_dim, lengths, seed=size)
    index.fill(ranks)
    pieces = [Piece(0, 146, 150), Piece(1, 11, 12), Piece(2, 44, 52), Piece(3, 0, 5)]
    by_rank = ranks.on_all(lambda member: index.select(member, member.inputs.build(ranks.spans(pieces))))
    union: dict[tuple[int, int], set[int]] = defaultdict(set)
    total: dict[tuple[int, int], int] = defaultdict(int)
    for found in by_rank:
        for row, positions in found.items():
            union[row] |= positions
            total[row] += len(positions)
    wanted = {(p.seq, t): index.picked(p.seq, t) for p in pieces for t in range(p.start, p.end)}
    assert union == wanted
    assert all(total[row] == min(row[1] + 1, TOPK) for row in wanted), "no two ranks attend to the same position"


@pytest.mark.parametrize(("axis", "size"), LAYOUTS)
def test_short_contexts_are_dense_on_all_ranks_alike(tiny: MakeCheckpoint, axis: str | None, size: int) -> None:
    ranks = Ranks(tiny("2.0"), [some_tokens(TOPK, 1), some_tokens(3, 2)], axis=axis, size=size)

    def select(member: Member) -> Tensor | None:
        inputs = member.inputs.build(ranks.spans([Piece(0, 40, TOPK), Piece(1, 0, 3)]))
        rows = len(inputs.positions)
        return make_kv_access(member.context).select(
            0, torch.zeros(rows, 4, 16), weights=torch.zeros(rows, 4), inputs=inputs
        )

    assert ranks.on_all(select) == [None] * size


# --- whole models -----------------------------------------------------------------------------------------------------


def run(ranks: Ranks, lengths: Sequence[int], *, chunk: int, decode_from: int) -> list[Tensor]:
    """All logits of every sequence: prompts in chunks, several in one step, then token by token, all together."""
    logits: list[list[Tensor]] = [[] for _ in lengths]
    done = [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        pieces = []
        for seq, (start, length) in enumerate(zip(done, lengths, strict=True)):
            prompt = max(length - decode_from, 1)
            if start < length:
                pieces.append(Piece(seq, start, min(start + chunk, prompt) if start < prompt else start + 1))
        for piece, rows in zip(pieces, ranks.step(*pieces), strict=True):
            logits[piece.seq].append(rows)
            done[piece.seq] = piece.end
    return [torch.cat(parts) for parts in logits]


@pytest.fixture(scope="module")
def judged(tiny: MakeCheckpoint) -> dict[str, list[Tensor]]:
    """The oracle's logits, by variant; computed when first wanted."""
    return {}


LENGTHS = [61, 1, 9, 20]  # above the limit of selection; one token; one above a block; below the limit


@pytest.mark.parametrize(("axis", "size"), LAYOUTS)
@pytest.mark.parametrize("variant", ["2.0", "lite-sparse", "lite", "chat"])
def test_any_layout_gives_the_logits_of_the_formulas(
    tiny: MakeCheckpoint, judged: dict[str, list[Tensor]], variant: str, axis: str | None, size: int
) -> None:
    path = tiny(variant)
    sequences = [some_tokens(n, n) for n in LENGTHS]
    if variant not in judged:
        oracle = Oracle(*read_checkpoint(path))
        judged[variant] = [oracle.logits(tokens).float() for tokens in sequences]
    got = run(Ranks(path, sequences, axis=axis, size=size, block_size=BLOCK), LENGTHS, chunk=16, decode_from=6)
    for found, wanted in zip(got, judged[variant], strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("overrides", [("cli_factor=1",), ("indexer_rope_interleave=false",), ("index_k_norm_type=layer",)])
@pytest.mark.parametrize(("axis", "size"), [(None, 1), ("kvp", 2)])
def test_less_usual_indexers(tiny: MakeCheckpoint, overrides: tuple[str, ...], axis: str | None, size: int) -> None:
    path, tokens = tiny("2.0", *overrides), some_tokens(70, 4)
    config, tensors = read_checkpoint(path)
    if "index_k_norm_type" in overrides[0]:
        tokens = tokens[:40]  # the oracle knows no LayerNorm; below the limit nothing is selected
    wanted = Oracle(config, tensors).logits(tokens).float()
    got = run(Ranks(path, [tokens], axis=axis, size=size), [len(tokens)], chunk=32, decode_from=3)[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("variant", "axis", "size"), [("2.0", None, 1), ("2.0", "cp", 3), ("2.0", "kvp", 2), ("chat", "kvp", 3)]
)
def test_company_and_chunks_do_not_change_a_bit(
    tiny: MakeCheckpoint, dtype: torch.dtype, variant: str, axis: str | None, size: int
) -> None:
    """Alone or among others (longer and shorter, so dense rows meet sparse ones), in small chunks or large ones."""
    path = tiny(variant)
    lengths = [30, 75, 4, 50]
    sequences = [some_tokens(n, n) for n in lengths]

    def logits(which: Sequence[int], chunk: int) -> list[Tensor]:
        ranks = Ranks(path, [sequences[i] for i in which], axis=axis, size=size, dtype=dtype)
        return run(ranks, [lengths[i] for i in which], chunk=chunk, decode_from=4)

    together = logits([0, 1, 2, 3], chunk=16)
    for i in range(4):
        alone = logits([i], chunk=24)[0]
        assert torch.equal(together[i], alone), (i, (together[i] - alone).abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_context_parallel_has_the_bits_of_one_rank(tiny: MakeCheckpoint, dtype: torch.dtype) -> None:
    tokens = some_tokens(75, 3)
    one, three = (
        run(Ranks(tiny("2.0"), [tokens], axis=axis, size=size, dtype=dtype), [75], chunk=40, decode_from=4)[0]
        for axis, size in ((None, 1), ("cp", 3))
    )
    assert torch.equal(one, three)


def test_tiny_tiles_change_no_bit(tiny: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that is cut between sequences and between rows."""
    lengths = [75, 30]
    sequences = [some_tokens(n, n) for n in lengths]
    whole = run(Ranks(tiny("2.0"), sequences), lengths, chunk=40, decode_from=4)
    small = replace(kernels.load("cpu"), tile_elements=5000)
    monkeypatch.setattr("tests.parity.ranks.kernels.load", lambda device: small)
    cut = run(Ranks(tiny("2.0"), sequences), lengths, chunk=40, decode_from=4)
    assert all(torch.equal(a, b) for a, b in zip(whole, cut, strict=True))
