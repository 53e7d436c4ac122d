from __future__ import annotations

import torch

from longcat_pd.models.batch import ForwardInputs, Rows
from longcat_pd.models.embedding import LmHead, VocabEmbedding
from tests.unit.stage import FakeAxis, make_context


def head(*axes: FakeAxis) -> LmHead:
    made = LmHead(make_context("chat", axes=axes))
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=draw))
    return made


def logits(made: LmHead, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    final = made.final(hidden, inputs_of(len(hidden), rows))
    return made(final, Rows.even(len(rows), 1))


def inputs_of(num_rows: int, output_rows: torch.Tensor) -> ForwardInputs:
    """A batch that only says how many rows there are and which are wanted."""
    nothing = torch.zeros(0, dtype=torch.int64)
    return ForwardInputs(
        token_ids=nothing,
        positions=nothing,
        row_seqs=nothing,
        slot_mapping=nothing,
        ngram_windows=None,
        cu_seqlens_q=(0,),
        kv_lens=(),
        block_tables=nothing,
        block_starts=nothing,
        table_stride=1,
        gather_blocks=None,
        output_rows=output_rows,
        rows=Rows.even(num_rows, 1),
        outputs=Rows.even(len(output_rows), 1),
    )


def test_embedding_looks_up_rows() -> None:
    embedding = VocabEmbedding(make_context("chat"))
    with torch.no_grad():
        embedding.weight.copy_(torch.arange(embedding.weight.numel()).view(embedding.weight.shape))
    assert torch.equal(embedding(torch.tensor([3, 0]), Rows.even(2, 1)), embedding.weight[[3, 0]])


def test_logits_of_the_wanted_rows_only_and_in_their_order() -> None:
    hidden = torch.randn(5, 96)
    whole = logits(head(), hidden, torch.arange(5))
    assert whole.dtype == torch.float32 and whole.shape == (5, 1024)
    assert torch.equal(logits(head(), hidden, torch.tensor([4, 1])), whole[[4, 1]])


def test_rows_of_other_ranks_come_from_the_sum() -> None:
    hidden, elsewhere = torch.randn(3, 96), torch.full((1, 96), 0.25)
    wanted = logits(head(), torch.cat((hidden, elsewhere)), torch.tensor([3, 2]))
    summed = head(FakeAxis("cp", 2, 0, others=torch.cat((elsewhere, 0 * elsewhere))))
    assert torch.equal(logits(summed, hidden, torch.tensor([-1, 2])), wanted)
    assert torch.equal(logits(summed, hidden[:0], torch.tensor([-1, -1]))[0], wanted[0])  # a rank without rows takes part
