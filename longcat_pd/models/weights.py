"""Tensors between a checkpoint folder and parameters: the reader that streams, and the writer of the same format.

Owns safetensors files. Knows nothing of modules or ranks: what to read, which part of it and where it goes is said by
WeightSpecs; which names a model has is ``tensor_names.py``.
"""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ModelSection
from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    INT8,
    MAX_NAMED,
    Checkpoint,
    checkpoint_digest,
    int8_modules,
    open_checkpoint,
    stored_tensors,
)
from longcat_pd.models.random_weights import fill_random
from longcat_pd.models.tensor_names import (
    OFFSET,
    SCALE,
    can_be_int8,
    expected_tensors,
    is_ignorable,
    other_spelling,
    stand_in,
    weight_of,
)
from longcat_pd.models.weight_spec import Kind, WeightSpec
from longcat_pd.progress.steps import Tell, untold

FLOAT_TYPES = frozenset({"F64", "F32", "F16", "BF16"})
TYPES: Mapping[Kind, frozenset[str]] = MappingProxyType(
    {"float": FLOAT_TYPES, "int8": frozenset({INT8}), "scale": FLOAT_TYPES, "offset": FLOAT_TYPES | {INT8, "I32"}}
)
DEFAULT_SHARD_BYTES = 5_000_000_000


def fill_weights(specs: Iterable[WeightSpec], section: ModelSection, *, config: ModelConfig, tell: Tell = untold) -> int:
    """Hand every spec its region, from the checkpoint or from nowhere, as the section says; return the bytes."""
    if section.weights == "random":
        return fill_random(specs, tell)
    return load_weights(specs, Path(section.path), config=config, tell=tell)


def int8_names(section: ModelSection) -> frozenset[str]:
    """What the section's checkpoint stores in int8 (``int8_modules``); of random weights nothing. Raises ConfigError."""
    return int8_modules(open_checkpoint(Path(section.path))) if section.weights == "checkpoint" else frozenset()


def digest_of(section: ModelSection) -> str:
    """See ``checkpoint_digest``."""
    return checkpoint_digest(Path(section.path), has_weights=section.weights == "checkpoint")


def load_weights(specs: Iterable[WeightSpec], path: Path, *, config: ModelConfig, tell: Tell = untold) -> int:
    """Read every spec's region and hand it to its ``store``; return the bytes read. ``tell``: of those, as they come.

    Each shard is opened once and only the wanted regions are touched. Nothing is stored any more after the first
    problem, but the search goes on: missing, extra and wrongly shaped tensors and damaged shards end together in one
    ConfigError. A tensor is extra if the whole model (not only this rank's part) has no use for its name and it is not
    one of those that releases carry along unused. Where an int8 tensor has an offset too, it has to be zero.
    """
    checkpoint = open_checkpoint(path)
    wanted = list(_with_offsets(specs, checkpoint))
    expected = expected_tensors(config)
    aliases = _aliases(checkpoint, expected)
    problems = _Problems()
    by_shard: dict[str, list[WeightSpec]] = {}
    for spec in wanted:
        name = spec.name if spec.name in checkpoint.shard_of else stand_in(spec.name) or spec.name
        stored = replace(spec, name=aliases.get(name, name))
        if stored.name in checkpoint.shard_of:
            by_shard.setdefault(checkpoint.shard_of[stored.name], []).append(stored)
    needed = {name for name in expected if not is_ignorable(name)}
    needed |= {spec.name for spec in wanted if stand_in(spec.name) is None}
    useless = checkpoint.shard_of.keys() - expected.keys() - set(aliases.values())
    problems.add("missing", sorted(needed - checkpoint.shard_of.keys() - aliases.keys()))
    _check_scales(checkpoint, useless, config, problems=problems)
    problems.add("extra", sorted(name for name in useless if not is_ignorable(name) and weight_of(name) is None))
    ledger = _Ledger(sum(_bytes_of(checkpoint, shard, of_shard) for shard, of_shard in by_shard.items()), tell)
    for shard in sorted(by_shard):
        _read_shard(checkpoint, shard, by_shard[shard], problems=problems, ledger=ledger)
    problems.raise_if_any(path)
    return ledger.num_bytes


def write_checkpoint(
    path: Path,
    tensors: Iterable[tuple[str, torch.Tensor]],
    config: Mapping[str, Any],
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    files: Mapping[str, str] | None = None,
) -> None:
    """Write a checkpoint folder: shards, index, ``config.json`` and other text ``files`` (name -> text).

    The folder appears complete or not at all; it is made under another name and renamed at the end. Tensors are taken
    one by one, a shard's worth is held at a time, a tensor larger than ``max_shard_bytes`` gets a shard of its own. The
    same input gives the same bytes. Raises ConfigError when ``path`` exists and is not an empty folder.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigError(f"{path} exists already; it is not overwritten")
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        weight_map = _write_shards(draft, tensors, max_shard_bytes)
        texts = dict(files or {})
        texts[CONFIG_FILE] = _json(config)
        texts[INDEX_FILE] = _json(weight_map)
        for name, text in texts.items():
            (draft / name).write_text(text, encoding="utf-8")
        draft.chmod(0o755)
        try:
            draft.rename(path)
        except OSError as error:  # somebody else made the folder meanwhile
            raise ConfigError(f"{path} cannot be put in place ({error.strerror})") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class _Problems:
    """What is wrong with a checkpoint, by kind, in the order in which it was found."""

    def __init__(self) -> None:
        self._found: dict[str, list[str]] = {}

    def __bool__(self) -> bool:
        return bool(self._found)

    def add(self, kind: str, items: list[str]) -> None:
        """Note ``items`` under ``kind``; an empty list is no problem."""
        if items:
            self._found.setdefault(kind, []).extend(items)

    def raise_if_any(self, path: Path) -> None:
        """Raise the one ConfigError that says it all."""
        if not self._found:
            return
        parts = []
        for kind, items in self._found.items():
            more = f" and {len(items) - MAX_NAMED} more" if len(items) > MAX_NAMED else ""
            parts.append(f"{len(items)} {kind}: {', '.join(items[:MAX_NAMED])}{more}")
        raise ConfigError(f"checkpoint {path} does not fit: {'; '.join(parts)}", param="model.path")


class _Ledger:
    """Bytes that were read, of all that will be."""

    def __init__(self, total: int, tell: Tell) -> None:
        self.num_bytes = 0
        self._total = total
        self._tell = tell
        tell("weights", 0, total)

    def add(self, num_bytes: int) -> None:
        """So many more."""
        self.num_bytes += num_bytes
        self._tell("weights", self.num_bytes, self._total)


def _bytes_of(checkpoint: Checkpoint, shard: str, specs: Iterable[WeightSpec]) -> int:
    """What the specs ask of a shard, by its header; nothing of one that is damaged, as reading it will tell."""
    try:
        stored = stored_tensors(checkpoint.path / shard)
    except ConfigError:
        return 0
    wanted = [(spec, stored[spec.name]) for spec in specs if spec.name in stored]
    return sum((t.end - t.begin) * spec.num_wanted // max(math.prod(spec.shape), 1) for spec, t in wanted)


def _aliases(checkpoint: Checkpoint, expected: Mapping[str, object]) -> dict[str, str]:
    """Name in the model -> name in the file, for tensors that the file has under their other spelling only."""
    aliases = {}
    for name in checkpoint.shard_of.keys() - expected.keys():
        ours = other_spelling(name)
        if ours is not None and ours in expected and ours not in checkpoint.shard_of:
            aliases[ours] = name
    return aliases


def _read_shard(
    checkpoint: Checkpoint, shard: str, specs: list[WeightSpec], *, problems: _Problems, ledger: _Ledger
) -> None:
    """Check and store the tensors of one shard, and count their bytes."""
    try:
        with safe_open(checkpoint.path / shard, framework="pt", device="cpu") as file:
            present = set(file.keys())
            for spec in specs:
                if spec.name not in present:
                    problems.add("not in the shard that the index names", [f"{spec.name} ({shard})"])
                    continue
                part = file.get_slice(spec.name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                if shape not in _shapes(spec):
                    problems.add("wrongly shaped", [f"{spec.name} is {list(shape)}, not {list(spec.shape)}"])
                elif dtype not in TYPES[spec.kind]:
                    problems.add("of a data type that cannot be read", [f"{spec.name} is {dtype}{_remark(spec, dtype)}"])
                elif not problems:
                    tensor = part[spec.region] if spec.region else file.get_tensor(spec.name)
                    complaint = _complaint(spec.kind, tensor)
                    if complaint:
                        problems.add("corrupted", [f"{spec.name} {complaint}"])
                    else:
                        spec.store(tensor.view(-1) if spec.kind == "scale" else tensor)
                    ledger.add(tensor.numel() * tensor.element_size())
    except (SafetensorError, OSError) as error:
        problems.add("missing or damaged shard", [f"{shard} ({error})"])


def _shapes(spec: WeightSpec) -> tuple[tuple[int, ...], ...]:
    return (spec.shape, (*spec.shape, 1)) if spec.kind in ("scale", "offset") else (spec.shape,)


def _remark(spec: WeightSpec, dtype: str) -> str:
    """Why an int8 tensor is no use where floats are read."""
    if spec.kind != "float" or dtype != INT8:
        return ""
    return f" and {spec.name}_scale is missing" if can_be_int8(spec.name) else ", where the model takes floats only"


def _complaint(kind: Kind, tensor: torch.Tensor) -> str:
    """What is wrong with the numbers of a scale or an offset."""
    if kind == "scale":
        num_bad = int((~(torch.isfinite(tensor) & (tensor > 0))).sum())
        return f"has {num_bad} of {tensor.numel()} scales that are not finite and above 0" if num_bad else ""
    if kind == "offset" and bool((tensor != 0).any()):
        return "is not zero; only symmetric int8 is known"
    return ""


def _with_offsets(specs: Iterable[WeightSpec], checkpoint: Checkpoint) -> Iterator[WeightSpec]:
    """The specs, and for the scales of a checkpoint that has offsets too one that checks these."""
    for spec in specs:
        yield spec
        offset = spec.name.removesuffix(SCALE) + OFFSET
        if spec.kind == "scale" and offset in checkpoint.shard_of:
            yield replace(spec, name=offset, store=_forget, kind="offset")


def _forget(_: torch.Tensor) -> None:
    """A tensor that is only checked."""


def _check_scales(checkpoint: Checkpoint, useless: Iterable[str], config: ModelConfig, *, problems: _Problems) -> None:
    """Scales that have no tensor, and a config that speaks of int8 where nothing is."""
    pairs = [(name, weight_of(name)) for name in useless]
    orphans = [name for name, weight in pairs if weight is not None and weight not in checkpoint.shard_of]
    problems.add("without the tensor that it scales", sorted(orphans))
    if config.quantization is not None and not any(name.endswith(SCALE) for name in checkpoint.shard_of):
        problems.add("not as config.json says", ["quantization_config announces int8, and no tensor has a scale"])


def _write_shards(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], max_shard_bytes: int) -> dict[str, Any]:
    """Write the shards and return the index. Their number is known at the end only, and stands in every name."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = total_bytes = 0

    def flush() -> None:
        save_file(pending, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(pending))
        pending.clear()

    for name, tensor in tensors:
        num_bytes = tensor.numel() * tensor.element_size()
        if pending and pending_bytes + num_bytes > max_shard_bytes:
            flush()
            pending_bytes = 0
        pending[name] = tensor.contiguous()
        pending_bytes += num_bytes
        total_bytes += num_bytes
    flush()
    weight_map = {}
    for number, names in enumerate(shards):
        shard = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.part").rename(folder / shard)
        (folder / shard).chmod(0o644)  # the library makes its files private
        weight_map.update(dict.fromkeys(names, shard))
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2) + "\n"
