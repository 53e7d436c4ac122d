"""What a rank really allocated for parameters and cache, part by part: the other side of the plan in ``sizing``.

Measures tensors that are there; knows no configuration. Memory that several modules share counts once.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from longcat_pd.kv_cache.storage import KVCache

Footprint = tuple[tuple[str, int], ...]


def footprint(
    model: nn.Module,
    cache: KVCache,
    *,
    ngram: nn.Module | None,
    word: nn.Module | None,
    draft: nn.Module | None,
    host_rows: Tensor | None = None,
) -> Footprint:
    """Bytes by part: weights, n-gram tables (with projections), those of them on the host, cache, index keys, drafts (all
    of the draft layer).

    Args:
        model: all parameters.
        cache: all entries; its last layer is the draft layer's if there is one.
        ngram, word: of ``model``, the n-gram embedding, and in it the word embedding, which counts as weights.
        draft: of ``model``, the draft layer.
        host_rows: of ``ngram``, what the host keeps.
    """
    on_host = 0 if host_rows is None else _bytes([host_rows])
    tables = 0 if ngram is None or word is None else _parameters(ngram) - _parameters(word)
    drafts = 0 if draft is None else _parameters(draft)
    first_draft = max((entry.layer for entry in cache.spec.entries), default=0) + (draft is None)
    cached = {"cache": 0, "index keys": 0, "drafts": 0}
    for entry in cache.spec.entries:
        part = "index keys" if entry.name.startswith("index.") else "cache"
        cached["drafts" if entry.layer >= first_draft else part] += _bytes([cache.tensor(entry.name)])
    return (
        ("weights", _parameters(model) - tables - drafts),
        ("n-gram tables", tables - on_host),
        ("n-gram tables on host", on_host),
        ("cache", cached["cache"]),
        ("index keys", cached["index keys"]),
        ("drafts", drafts + cached["drafts"]),
    )


def _parameters(module: nn.Module) -> int:
    return _bytes(module.parameters())


def _bytes(tensors: Iterable[Tensor]) -> int:
    storages = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in tensors)}
    return sum(storage.nbytes() for storage in storages.values())
