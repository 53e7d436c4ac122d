from __future__ import annotations

import pytest
import torch

from longcat_pd.models.batch import Rows
from longcat_pd.models.ngram import NgramEmbedding
from tests.unit.stage import make_context


@pytest.mark.parametrize(("variant", "divisor"), [("2.0", 17), ("lite", 13)])
def test_word_and_ngrams_are_averaged(variant: str, divisor: int) -> None:
    """With tables that hold their own row numbers and projections that copy: every part can be told apart."""
    context = make_context(variant)
    made, tables, width = NgramEmbedding(context), context.config.over_embedding, context.config.oe_width
    assert tables is not None and tables.num_tables + 1 == divisor
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
        made.word.weight[:, :] = torch.arange(1024.0).unsqueeze(-1)
        names = {spec.name: spec for spec in made.weight_specs()}
        for b, size in enumerate(tables.table_sizes):
            table, projection = (
                (f"model.oe_embed_tokens{b}", f"model.oe_embed_proj{b}")
                if variant == "2.0"
                else (f"model.ngram_embeddings.embedders.{b}", f"model.ngram_embeddings.post_projs.{b}")
            )
            assert names[f"{table}.weight"].shape == (size, width)
            names[f"{table}.weight"].store(torch.arange(float(size)).unsqueeze(-1).expand(-1, width))
            picks = torch.zeros(96, width)
            picks[b, 0] = 1.0  # table b goes to dimension b alone
            names[f"{projection}.weight"].store(picks)
    order = tables.oe_neighbor_num
    tokens = [5, 1000, 2, 7]
    windows = torch.tensor([[tokens[i - j] if i >= j else -1 for j in range(order)] for i in range(4)])
    got = made(torch.tensor(tokens), windows, Rows.even(4, 1)) * divisor
    for i, token in enumerate(tokens):
        seen = {0: [5], 1: [1000, 5], 2: [2, 1000, 5], 3: [7]}[i]
        for b, size in enumerate(tables.table_sizes):
            row = sum(t * 1024**j for j, t in enumerate(seen) if j < tables.order_of(b)) % size
            assert float(got[i, b]) == pytest.approx(token + row, rel=1e-5)
        assert float(got[i, 95]) == pytest.approx(token, rel=1e-5)


def test_rounds_once_in_bf16() -> None:
    context = make_context("lite", dtype=torch.bfloat16)
    made = NgramEmbedding(context)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
        made.word.weight.fill_(1.0)
    got = made(torch.tensor([3]), torch.tensor([[3, -1, -1, -1]]), Rows.even(1, 1))
    assert torch.equal(got, torch.full((1, 96), 1 / 13).bfloat16())
