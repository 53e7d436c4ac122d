"""What a rank really allocated for parameters and cache, part by part: the other side of the plan in ``sizing``.

Measures tensors that are there; knows no configuration. Memory that several modules share counts once.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from longcat_pd.kv_cache.storage import KVCache

Footprint = tuple[tuple[str, int], ...]


def footprint(
    model: nn.Module, cache: KVCache, *, ngram: nn.Module | None, word: nn.Module | None, draft: nn.Module | None
) -> Footprint:
    """Bytes by part: weights, n-gram tables (with projections), cache, index keys, drafts (all of the draft layer).

    Args:
        model: all parameters.
        cache: all entries; its last layer is the draft layer's if there is one.
        ngram, word: of ``model``, the n-gram embedding, and in it the word embedding, which counts as weights.
        draft: of ``model``, the draft layer.
    """
    tables = 0 if ngram is None or word is None else _parameters(ngram) - _parameters(word)
    drafts = 0 if draft is None else _parameters(draft)
    first_draft = max((entry.layer for entry in cache.spec.entries), default=0) + (draft is None)
    cached = {"cache": 0, "index keys": 0, "drafts": 0}
    for entry in cache.spec.entries:
        part = "index keys" if entry.name.startswith("index.") else "cache"
        cached["drafts" if entry.layer >= first_draft else part] += _bytes([cache.tensor(entry.name)])
    return (
        ("weights", _parameters(model) - tables - drafts),
        ("n-gram tables", tables),
        ("cache", cached["cache"]),
        ("index keys", cached["index keys"]),
        ("drafts", drafts + cached["drafts"]),
    )


def _parameters(module: nn.Module) -> int:
    return _bytes(module.parameters())


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
