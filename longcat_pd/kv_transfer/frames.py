"""The form of a message on a lane: a fixed header and, for data, a table of items with the blocks behind it.

Owns the layout and the digest. An item is one block of one cache entry of one layer; entries of a layer are numbered in
the order of its ``CacheSpec``, which is equal on both sides. Knows nothing of lanes and of who sends what.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from longcat_pd.kv_transfer.sides import DigestMode

HEADER_INTS = 8
NO_DIGEST = -1

_MAGIC = 0x4C43_5044_0001
_DATA, _END = 1, 2
_ITEM_INTS = 3
_ITEM_BYTES = 8 * _ITEM_INTS
_MAX_BODY_BYTES = 1 << 34  # of any cache; who receives knows better
_SAMPLE_ONE_IN = 8

Shape = tuple[tuple[int, int], torch.dtype]  # of a block of an entry: block_size, width


class MalformedFrame(ValueError):
    """What arrived is no message of ours."""


@dataclass(frozen=True, slots=True)
class Header:
    """First part of every message. ``layer``, ``num_items``, ``body_bytes`` only of data; ``ok`` only of an end."""

    key: int
    is_end: bool
    layer: int = 0
    num_items: int = 0
    body_bytes: int = 0
    ok: bool = False


def transfer_key(transfer_id: str, generation: int) -> int:
    """The number that stands for one transfer on the lanes; another generation of the same blocks is another number."""
    digest = hashlib.blake2b(f"{transfer_id}/{generation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def encode_header(header: Header) -> torch.Tensor:
    """[HEADER_INTS] int64."""
    kind = _END if header.is_end else _DATA
    fields = (_MAGIC, kind, header.key, header.layer, header.num_items, header.body_bytes, int(header.ok), 0)
    return torch.tensor(fields, dtype=torch.int64)


def decode_header(tensor: torch.Tensor) -> Header:
    """Inverse of ``encode_header``. Raises MalformedFrame."""
    magic, kind, key, layer, num_items, body_bytes, ok, _ = tensor.tolist()
    if magic != _MAGIC or kind not in (_DATA, _END):
        raise MalformedFrame(f"header begins with {magic:#x}, {kind}")
    if kind == _DATA and not 0 <= num_items * _ITEM_BYTES <= body_bytes <= _MAX_BODY_BYTES:
        raise MalformedFrame(f"{num_items} items in {body_bytes} bytes")
    return Header(key, kind == _END, layer, num_items, body_bytes, bool(ok))


@dataclass(frozen=True, slots=True)
class Run:
    """Blocks of one entry. ``data``: [n, block_size, width]; ``digests[i]`` of block ``blocks[i]``, or NO_DIGEST."""

    entry: int
    blocks: tuple[int, ...]
    digests: tuple[int, ...]
    data: torch.Tensor


def encode_body(runs: Sequence[Run]) -> torch.Tensor:
    """The table of all items, then all blocks: [body_bytes] uint8."""
    rows = [(run.entry, b, d) for run in runs for b, d in zip(run.blocks, run.digests, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64).reshape(-1)
    parts = [table, *(run.data for run in runs)]
    return torch.cat([part.contiguous().reshape(-1).view(torch.uint8) for part in parts])


def check_body(header: Header, shapes: Sequence[Shape], num_blocks: int) -> None:
    """Whether data of this size can come for a cache of ``num_blocks`` blocks. Arguments else as ``decode_body``.

    Raises MalformedFrame: more items than the layer has, or bytes that its items do not have.
    """
    sizes = [_ITEM_BYTES + shape[0] * shape[1] * dtype.itemsize for shape, dtype in shapes]
    count = header.num_items
    if not 0 <= count <= num_blocks * len(sizes):
        raise MalformedFrame(f"{count} items of layer {header.layer}, which has {num_blocks * len(sizes)}")
    if not count * min(sizes, default=0) <= header.body_bytes <= count * max(sizes, default=0):
        raise MalformedFrame(f"{header.body_bytes} bytes for {count} items of layer {header.layer}")


def decode_body(header: Header, body: torch.Tensor, shapes: Sequence[Shape]) -> list[Run]:
    """Inverse of ``encode_body``; ``data`` may be a view of ``body``.

    Args:
        shapes: block shape (block_size, width) and data type of each entry of the layer.
    """
    rows = body[: header.num_items * _ITEM_BYTES].view(torch.int64).view(-1, _ITEM_INTS).tolist()
    runs: list[Run] = []
    offset, start = header.num_items * _ITEM_BYTES, 0
    while start < len(rows):
        entry, end = rows[start][0], start
        while end < len(rows) and rows[end][0] == entry:
            end += 1
        if not 0 <= entry < len(shapes):
            raise MalformedFrame(f"entry {entry} of a layer with {len(shapes)}")
        shape, dtype = shapes[entry]
        size = (end - start) * shape[0] * shape[1] * dtype.itemsize
        data = body[offset : offset + size]
        if len(data) != size:
            raise MalformedFrame(f"{len(body)} bytes are too few for {len(rows)} items")
        if offset % dtype.itemsize:
            data = data.clone()  # a view as a wider type must begin at a multiple of its size
        blocks, digests = tuple(row[1] for row in rows[start:end]), tuple(row[2] for row in rows[start:end])
        runs.append(Run(entry, blocks, digests, data.view(dtype).view(-1, *shape)))
        offset, start = offset + size, end
    if offset != len(body):
        raise MalformedFrame(f"{len(body) - offset} bytes behind the last item")
    return runs


def block_digest(block: torch.Tensor, num_tokens: int) -> int:
    """CRC-32 of the first ``num_tokens`` rows of a block [block_size, width]: what lies behind them has no meaning."""
    return zlib.crc32(block[:num_tokens].contiguous().view(torch.uint8).numpy().data)


def wants_digest(mode: DigestMode, key: int, entry: int, block: int) -> bool:
    """Whether this item carries a digest; both sides come to the same answer."""
    if mode == "sample":
        return zlib.crc32(f"{key} {entry} {block}".encode()) % _SAMPLE_ONE_IN == 0
    return mode == "all"
