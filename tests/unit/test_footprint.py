"""Measured bytes, on modules small enough to count by hand."""

from __future__ import annotations

import torch
from torch import nn

from longcat_pd.kv_cache.spec import CacheEntry, CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.footprint import footprint
from tests.unit.stage import make_context

FLOAT = 4


class Ngram(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word = nn.Linear(3, 5, bias=False)
        self.rows = nn.Parameter(torch.zeros(7, 2))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ngram = Ngram()
        self.stack = nn.Linear(3, 3, bias=False)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.ngram.word.weight  # tied
        self.first_row = nn.Parameter(self.stack.weight.detach()[:1])  # a view
        self.draft = nn.Linear(4, 2, bias=False)


def cache(*entries: tuple[str, int, int]) -> KVCache:
    spec = CacheSpec(tuple(CacheEntry(name, number, width, torch.float32) for name, number, width in entries))
    return KVCache(spec, 2, 8, torch.device("cpu"))


def test_every_byte_is_in_one_part_and_counts_once() -> None:
    model = Model()
    blocks = cache(("latent.0", 0, 3), ("index.0", 0, 5), ("rope.1", 1, 1), ("latent.2", 2, 3), ("index.2", 2, 5))
    with_draft = footprint(model, blocks, ngram=model.ngram, word=model.ngram.word, draft=model.draft)
    assert dict(with_draft) == {
        "weights": (9 + 15) * FLOAT,
        "n-gram tables": 14 * FLOAT,
        "n-gram tables on host": 0,
        "cache": 4 * 16 * FLOAT,
        "index keys": 5 * 16 * FLOAT,
        "drafts": (8 + 8 * 16) * FLOAT,
    }
    parts = {"ngram": model.ngram, "word": model.ngram.word, "draft": model.draft}
    apart = footprint(model, blocks, host_rows=model.ngram.rows, **parts)
    assert dict(apart) == dict(with_draft) | {"n-gram tables": 0, "n-gram tables on host": 14 * FLOAT}
    plain = dict(footprint(model, blocks, ngram=None, word=None, draft=None))
    assert (plain["weights"], plain["n-gram tables"]) == ((9 + 15 + 14 + 8) * FLOAT, 0)
    assert (plain["cache"], plain["index keys"], plain["drafts"]) == (7 * 16 * FLOAT, 10 * 16 * FLOAT, 0)


def test_a_model_tells_all_of_its_parameters_and_its_cache() -> None:
    context = make_context("2.0")
    model = CausalLM(context)
    told = dict(model.memory(context.cache))
    assert told["weights"] + told["n-gram tables"] == sum(p.numel() * p.element_size() for p in model.parameters())
    tokens = context.cache.num_blocks * context.cache.block_size
    assert told["cache"] + told["index keys"] == tokens * context.cache.spec.token_bytes
    assert min(told["n-gram tables"], told["index keys"]) > 0 == told["drafts"]
