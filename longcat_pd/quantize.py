"""``python -m longcat_pd.quantize SRC DST``: a checkpoint with its MLPs and experts in int8, shard by shard.

Every shard of the source becomes one of the same name, written under another name and renamed when it is complete; index
and config.json come last, so an unfinished folder is no checkpoint. A run that was ended goes on where it was: a journal in
the folder has a checksum of every finished shard, and the journal's first line says what of. One run at a time writes a
folder, as drafts have one name. Holds one tensor at a time; tensors that stay as they are pass through in pieces. Knows
nothing of modules, and of names only which can be int8.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import SECTION, int8_section
from longcat_pd.errors import ConfigError
from longcat_pd.kernels.reference.int8 import quantise
from longcat_pd.models.checkpoint import (
    CONFIG_FILE,
    INDEX_FILE,
    INT8,
    Checkpoint,
    StoredTensor,
    checkpoint_digest,
    open_checkpoint,
    stored_tensors,
)
from longcat_pd.models.tensor_names import SCALE, WEIGHT, can_be_int8

JOURNAL = ".quantize.journal"
LOCK = ".quantize.lock"
PIECE_BYTES = 4 << 20
SPARE_BYTES = 64 << 20  # left free beside what is written
ITEM_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2, INT8: 1}
FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@dataclass(frozen=True)
class Target:
    """One shard to write: what comes from where, and where in the new file it goes."""

    name: str
    header: bytes
    places: Mapping[str, StoredTensor]
    sources: Sequence[StoredTensor]

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max((tensor.end for tensor in self.places.values()), default=len(self.header))


def quantize(source: Path, target: Path) -> None:
    """Write ``target``, or finish it. The same source gives the same bytes, however often the work was interrupted.

    Raises:
        ConfigError: the source is no checkpoint, is damaged or quantised already; the target is another thing or too little
            room is left; another run is at work on the target.
    """
    checkpoint = open_checkpoint(source)
    fields = _config_of(source)
    _refuse_overlap(source, target)
    plans = [_plan(checkpoint, shard) for shard in checkpoint.shards]
    _refuse_quantised(checkpoint, fields, plans)
    _refuse_foreign(target)
    with _alone(target):
        _finish(checkpoint, target, plans=plans, fields=fields)


def _finish(checkpoint: Checkpoint, target: Path, *, plans: Sequence[Target], fields: Mapping[str, Any]) -> None:
    source = checkpoint.path
    finished = _open_journal(target, checkpoint_digest(source))
    done = {plan.name for plan in plans if _is_finished(target / plan.name, plan, finished.get(plan.name))}
    others = [path for path in _other_files(source, checkpoint) if not _is_copy(path, target / path.relative_to(source))]
    _check_room(target, sum(p.size for p in plans if p.name not in done) + sum(path.stat().st_size for path in others))
    for number, plan in enumerate(plans, 1):
        if plan.name not in done:
            checksum = _write_shard(source / plan.name, target / plan.name, plan)
            _note(target, {"shard": plan.name, "sha256": checksum})
        sys.stdout.write(f"{number} of {len(plans)}: {plan.name}{' was there' if plan.name in done else ''}\n")
        sys.stdout.flush()
    for path in others:
        _copy(path, target / path.relative_to(source))
    if (source / INDEX_FILE).is_file():
        _write_text(target / INDEX_FILE, _json(_index_of(plans)))
    _write_text(target / CONFIG_FILE, _json({**fields, SECTION: int8_section(_kept_modules(plans))}))
    (target / JOURNAL).unlink()


def _config_of(source: Path) -> dict[str, Any]:
    """config.json as it is, after the proof that it is one of the family's."""
    ModelConfig.load(source)
    content: dict[str, Any] = json.loads((source / CONFIG_FILE).read_text(encoding="utf-8"))
    return content


def _plan(checkpoint: Checkpoint, shard: str) -> Target:
    """Lay out a shard: by size of an item, so that every tensor is aligned, then by name."""
    held = stored_tensors(checkpoint.path / shard)
    names = [name for name, where in checkpoint.shard_of.items() if where == shard]
    lost = sorted(set(names) - held.keys())
    if lost:
        raise ConfigError(f"{checkpoint.path / shard}: lacks {lost[0]}, which the index says it has", param="model.path")
    sources = [tensor for name, tensor in held.items() if checkpoint.shard_of.get(name) == shard]
    wanted = [part for tensor in sources for part in _parts(tensor)]
    wanted.sort(key=lambda part: (-ITEM_BYTES.get(part[1], 8), part[0]))
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, num_bytes in wanted:
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + num_bytes]}
        offset += num_bytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    places = {
        name: StoredTensor(name, e["dtype"], tuple(e["shape"]), start + e["data_offsets"][0], start + e["data_offsets"][1])
        for name, e in entries.items()
        if name != "__metadata__"
    }
    return Target(shard, len(text).to_bytes(8, "little") + text, places, sources)


def _parts(tensor: StoredTensor) -> Iterator[tuple[str, str, tuple[int, ...], int]]:
    """Name, type, shape and bytes of what a tensor becomes."""
    if not _is_quantised(tensor):
        yield tensor.name, tensor.dtype, tensor.shape, tensor.end - tensor.begin
        return
    rows, columns = tensor.shape
    yield tensor.name, INT8, (rows, columns), rows * columns
    yield _scale_name(tensor.name), "F32", (rows, 1), 4 * rows


def _scale_name(name: str) -> str:
    return name.removesuffix(WEIGHT) + SCALE


def _is_quantised(tensor: StoredTensor) -> bool:
    return can_be_int8(tensor.name) and len(tensor.shape) == 2 and tensor.dtype in FLOATS


def _refuse_quantised(checkpoint: Checkpoint, fields: Mapping[str, Any], plans: Sequence[Target]) -> None:
    tensors = [tensor for plan in plans for tensor in plan.sources]
    strange = [tensor for tensor in tensors if can_be_int8(tensor.name) and not _is_quantised(tensor)]
    scales = [tensor for tensor in tensors if tensor.name.endswith((SCALE, f"{SCALE}_inv"))]
    if fields.get(SECTION) or strange or scales:
        reason = f"{SECTION} is in its config.json" if fields.get(SECTION) else f"it holds {(strange or scales)[0].name}"
        raise ConfigError(f"{checkpoint.path} is quantised already: {reason}", param="source")
    if not any(map(_is_quantised, tensors)):
        raise ConfigError(f"{checkpoint.path} has nothing that can be int8", param="source")


def _refuse_overlap(source: Path, target: Path) -> None:
    ours, theirs = source.resolve(), target.resolve()
    if ours == theirs or ours in theirs.parents or theirs in ours.parents:
        raise ConfigError(f"{target} and {source} lie in each other; choose another folder", param="target")


def _refuse_foreign(target: Path) -> None:
    """What was there before must be unfinished work of this tool, or nothing."""
    journal = target / JOURNAL
    ours = {_draft_of(journal), target / LOCK}
    if target.exists() and not (target.is_dir() and (journal.is_file() or {*target.iterdir()} <= ours)):
        raise ConfigError(f"{target} exists already and is no unfinished work of this tool", param="target")


@contextlib.contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Make the folder and keep other runs out of it. Raises ConfigError if one is at work there.

    The file that is locked goes when the work ends; who opened it before that, and locks it behind it, is refused too.
    """
    target.mkdir(parents=True, exist_ok=True)
    path = target / LOCK
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = os.path.samestat(os.fstat(lock.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            is_ours = False
        if not is_ours:
            raise ConfigError(
                f"{target}: another run is at work there; wait for it, or choose another folder", param="target"
            )
        try:
            yield
        finally:
            path.unlink()


def _open_journal(target: Path, digest: str) -> dict[str, str]:
    """Checksums of the finished shards. A new folder gets a journal; any other must have one of the same source."""
    path = target / JOURNAL
    _refuse_foreign(target)  # what another run has finished since
    notes = list(_notes(path)) or [{"source": digest}]
    if notes[0].get("source") != digest:
        raise ConfigError(f"{target} was begun from another checkpoint or from other contents of it", param="target")
    _write_text(path, "".join(json.dumps(note) + "\n" for note in notes))
    return {note["shard"]: note["sha256"] for note in notes[1:]}


def _notes(journal: Path) -> Iterator[dict[str, str]]:
    """The journal's records; the last line may have been cut off."""
    for line in journal.read_text(encoding="utf-8").splitlines() if journal.is_file() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _note(target: Path, record: Mapping[str, str]) -> None:
    with (target / JOURNAL).open("a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
        _flush(file)


def _is_finished(path: Path, plan: Target, checksum: str | None) -> bool:
    if checksum is None or not path.is_file() or path.stat().st_size != plan.size:
        return False
    with path.open("rb") as file:
        return _checksum(file) == checksum


def _check_room(target: Path, needed: int) -> None:
    free = shutil.disk_usage(target).free
    if free < needed + SPARE_BYTES:
        text = f"{target}: {needed + SPARE_BYTES:,} bytes are needed and {free:,} are free"
        raise ConfigError(text, param="target")


def _write_shard(source: Path, target: Path, plan: Target) -> str:
    """Write a shard completely, or not under its name. Returns its checksum."""
    draft = _draft_of(target)
    with source.open("rb") as old, draft.open("w+b") as new:
        new.write(plan.header)
        for tensor in plan.sources:
            if not _is_quantised(tensor):
                _pass_through(old, new, tensor=tensor, begin=plan.places[tensor.name].begin)
                continue
            values, scale = _quantised(_read(old, tensor), tensor, shard=source)
            for name, part in ((tensor.name, values), (_scale_name(tensor.name), scale)):
                new.seek(plan.places[name].begin)
                new.write(part.contiguous().view(torch.uint8).numpy().data)
        new.seek(0)
        checksum = _checksum(new)
        _flush(new)
    draft.replace(target)
    return checksum


def _read(file: IO[bytes], tensor: StoredTensor) -> torch.Tensor:
    file.seek(tensor.begin)
    content = bytearray(tensor.end - tensor.begin)
    view = memoryview(content)
    while view:
        count = file.readinto(view)  # type: ignore[attr-defined]
        if not count:
            raise ConfigError(f"{file.name}: damaged, it ends inside {tensor.name}", param="source")
        view = view[count:]
    return torch.frombuffer(content, dtype=FLOATS[tensor.dtype]).view(tensor.shape)


def _quantised(weight: torch.Tensor, tensor: StoredTensor, *, shard: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [out, in] and fp32 scales [out, 1]. A row of zeros has scale 1: a scale of 0 would be taken for damage."""
    values, scale = quantise(weight)
    if not bool(torch.isfinite(scale).all()):
        raise ConfigError(f"{shard}: {tensor.name} holds numbers that are not finite", param="source")
    return values, scale.masked_fill(scale == 0, 1.0)


def _pass_through(old: IO[bytes], new: IO[bytes], *, tensor: StoredTensor, begin: int) -> None:
    old.seek(tensor.begin)
    new.seek(begin)
    left = tensor.end - tensor.begin
    while left:
        piece = old.read(min(left, PIECE_BYTES))
        if not piece:
            raise ConfigError(f"{old.name}: damaged, it ends inside {tensor.name}", param="source")
        new.write(piece)
        left -= len(piece)


def _other_files(source: Path, checkpoint: Checkpoint) -> list[Path]:
    """Tokenizer, templates and the like: all that is not hidden, and no weights."""
    made = {*checkpoint.shards, CONFIG_FILE, INDEX_FILE}
    found = []
    for path in sorted(source.rglob("*")):
        inside = path.relative_to(source)
        is_hidden = any(part.startswith(".") for part in inside.parts)
        if path.is_file() and not is_hidden and path.suffix != ".safetensors" and str(inside) not in made:
            found.append(path)
    return found


def _is_copy(path: Path, copy: Path) -> bool:
    if not copy.is_file() or copy.stat().st_size != path.stat().st_size:
        return False
    with path.open("rb") as one, copy.open("rb") as other:
        return _checksum(one) == _checksum(other)


def _copy(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft_of(target)
    with path.open("rb") as old, draft.open("wb") as new:
        shutil.copyfileobj(old, new, PIECE_BYTES)
        _flush(new)
    draft.replace(target)


def _index_of(plans: Sequence[Target]) -> dict[str, Any]:
    weight_map = {name: plan.name for plan in plans for name in plan.places}
    total = sum(tensor.end - tensor.begin for plan in plans for tensor in plan.places.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _kept_modules(plans: Sequence[Target]) -> list[str]:
    """Modules whose matrix stays as it is."""
    kept = (tensor for plan in plans for tensor in plan.sources if len(tensor.shape) == 2 and not _is_quantised(tensor))
    return sorted(tensor.name.removesuffix(WEIGHT) for tensor in kept)


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, ensure_ascii=False, indent=2) + "\n"


def _write_text(path: Path, text: str) -> None:
    draft = _draft_of(path)
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        _flush(file)
    draft.replace(path)


def _draft_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.part")


def _checksum(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(PIECE_BYTES):
        digest.update(piece)
    return digest.hexdigest()


def _flush(file: IO[Any]) -> None:
    """What is renamed or noted next must not be on the disk before this."""
    file.flush()
    os.fsync(file.fileno())


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 with one line on standard error."""
    parser = argparse.ArgumentParser(prog="python -m longcat_pd.quantize", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path, metavar="SRC", help="a checkpoint in float32 or bfloat16")
    parser.add_argument(
        "target", type=Path, metavar="DST", help="a folder that is new, empty, or unfinished work of this tool"
    )
    options = parser.parse_args(arguments)
    try:
        quantize(options.source, options.target)
    except ConfigError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
