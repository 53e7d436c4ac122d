"""What a checkpoint folder holds: its shards, which shard has which tensor, and a digest that tells checkpoints apart.

Owns the folder's format (``config.json``, ``model.safetensors.index.json`` with its shards, or one ``model.safetensors``)
and the JSON header of a safetensors file. Knows neither torch nor the contents of tensors: ``weights.py`` reads and
writes those; which names a model wants and how scales are called is ``tensor_names.py``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.models.tensor_names import (
    SCALE,
    WEIGHT,
    can_be_int8,
    draft_tensors,
    expected_tensors,
    is_ignorable,
    other_spelling,
    stand_in,
)

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
INT8 = "I8"  # as headers call it
MAX_NAMED = 10  # of a list of problems; the rest is counted
SAMPLES_PER_SHARD = 64
SAMPLE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The folder and its table of contents.

    Args:
        path: the folder.
        shard_of: tensor name -> file name inside the folder.
    """

    path: Path
    shard_of: Mapping[str, str]

    @property
    def shards(self) -> tuple[str, ...]:
        """File names of the shards, sorted."""
        return tuple(sorted(set(self.shard_of.values())))


def open_checkpoint(path: Path) -> Checkpoint:
    """Read the table of contents. Raises ConfigError, which names the file, when there is none or it is damaged."""
    index = path / INDEX_FILE
    if index.is_file():
        try:
            weight_map = json.loads(index.read_bytes())["weight_map"]
        except OSError as error:
            raise ConfigError(f"{index}: cannot be read ({error.strerror})", param="model.path") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(f"{index}: not an index of safetensors shards ({error})", param="model.path") from error
        if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ConfigError(f"{index}: weight_map is not a map from tensor to file name", param="model.path")
        outside = sorted(shard for shard in set(weight_map.values()) if Path(shard).name != shard)
        if outside:
            raise ConfigError(f"{index}: {outside[0]!r} is not a file name inside the folder", param="model.path")
        return Checkpoint(path, weight_map)
    single = path / SINGLE_FILE
    if not single.is_file():
        raise ConfigError(f"{path} holds neither {INDEX_FILE} nor {SINGLE_FILE}", param="model.path")
    names = [name for name in json.loads(read_header(single)) if name != "__metadata__"]
    return Checkpoint(path, dict.fromkeys(names, SINGLE_FILE))


def read_header(shard: Path) -> bytes:
    """The JSON text in front of a safetensors file. Raises ConfigError that names a shard which is missing or cut."""
    try:
        with shard.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise ConfigError(f"{shard}: damaged, its header would be {length} bytes long", param="model.path")
            header = file.read(length)
    except OSError as error:
        raise ConfigError(f"{shard}: cannot be read ({error.strerror})", param="model.path") from error
    try:
        entries = json.loads(header)
    except ValueError as error:
        raise ConfigError(f"{shard}: damaged, its header is not JSON", param="model.path") from error
    if not isinstance(entries, dict):
        raise ConfigError(f"{shard}: damaged, its header is not a JSON object", param="model.path")
    return header


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One entry of a shard's header. ``begin`` and ``end`` are places in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def stored_tensors(shard: Path) -> dict[str, StoredTensor]:
    """What a shard's header lists, by name, in the order of the file. Raises ConfigError that names a damaged shard."""
    header = read_header(shard)
    start, size = 8 + len(header), shard.stat().st_size
    found = []
    try:
        for name, entry in json.loads(header).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found.append(StoredTensor(name, entry["dtype"], tuple(entry["shape"]), start + begin, start + end))
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{shard}: damaged, its header does not describe tensors", param="model.path") from error
    if any(not start <= tensor.begin <= tensor.end <= size for tensor in found):
        raise ConfigError(f"{shard}: damaged, its tensors reach beyond its end", param="model.path")
    return {tensor.name: tensor for tensor in sorted(found, key=lambda tensor: tensor.begin)}


def int8_modules(checkpoint: Checkpoint) -> frozenset[str]:
    """Names, without ``.weight``, of the tensors that are stored as int8 with a scale beside them.

    Reads the headers of the shards that hold such pairs. Raises ConfigError that names tensors which have a scale and are
    not int8, and those that are int8 and have none although their neighbours do.
    """
    modules = {name.removesuffix(SCALE) for name in checkpoint.shard_of if name.endswith(SCALE)}
    shards = {checkpoint.shard_of[m + WEIGHT] for m in modules if m + WEIGHT in checkpoint.shard_of}
    stored = {name: t.dtype for shard in sorted(shards) for name, t in stored_tensors(checkpoint.path / shard).items()}
    found = {name.removesuffix(WEIGHT) for name, dtype in stored.items() if dtype == INT8 and can_be_int8(name)}
    problems = [f"{m}{SCALE} is missing, and {m}{WEIGHT} is int8" for m in sorted(found - modules)]
    others = [(m, stored[m + WEIGHT]) for m in sorted(modules - found) if m + WEIGHT in stored]
    problems += [f"{m}{WEIGHT} is {dtype}, where {m}{SCALE} makes no sense" for m, dtype in others]
    if problems:
        more = f" and {len(problems) - MAX_NAMED} more" if len(problems) > MAX_NAMED else ""
        text = f"checkpoint {checkpoint.path} does not fit: {'; '.join(problems[:MAX_NAMED])}{more}"
        raise ConfigError(text, param="model.path")
    return frozenset(found)


def lacking(path: Path, *, has_draft: bool) -> Iterator[str]:
    """What of a checkpoint is not there, told before anybody loads it: its table of contents, shards, tensors.

    ``has_draft``: the draft layer is wanted too.
    """
    try:
        checkpoint, config = open_checkpoint(path), ModelConfig.load(path)
    except ConfigError as error:
        yield f"model.path={path}: {error.message}"
        return
    gone = [shard for shard in checkpoint.shards if not (path / shard).is_file()]
    if gone:
        yield f"model.path={path}: {len(gone)} of {len(checkpoint.shards)} shards are missing: {_named(gone)}"
    there = checkpoint.shard_of.keys()
    wanted = {name for name in expected_tensors(config) if not is_ignorable(name)}
    wanted |= {name for name in draft_tensors(config) if stand_in(name) is None} if has_draft else set()
    lost = sorted(name for name in wanted - there if other_spelling(name) not in there)
    if lost:
        yield f"model.path={path}: {len(lost)} of {len(wanted)} tensors are missing: {_named(lost)}"


def _named(items: list[str]) -> str:
    more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
    return f"{', '.join(items[:MAX_NAMED])}{more}"


def checkpoint_digest(path: Path, *, has_weights: bool = True) -> str:
    """Sixteen hex digits: equal for copies of one checkpoint wherever they lie, different for other weights.

    Covers ``config.json``, the table of contents, every shard's length and header (names, shapes, data types) and a spread
    of small samples of each shard. It tells checkpoints apart; it does not prove that every byte is right.
    Without ``has_weights`` they are not looked at: random ones follow from ``config.json``.
    """
    digest = hashlib.sha256()
    _add(digest, (path / CONFIG_FILE).read_bytes())
    if not has_weights:
        return digest.hexdigest()[:16]
    checkpoint = open_checkpoint(path)
    _add(digest, json.dumps(sorted(checkpoint.shard_of.items())).encode())
    for shard in checkpoint.shards:
        header = read_header(path / shard)
        _add(digest, header)
        begin, size = 8 + len(header), (path / shard).stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with (path / shard).open("rb") as file:
            for sample in range(SAMPLES_PER_SHARD):
                file.seek(begin + (size - begin) * sample // SAMPLES_PER_SHARD)
                _add(digest, file.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, part: bytes) -> None:
    """Length first, so that no two lists of parts run together to the same bytes."""
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
