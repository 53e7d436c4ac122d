"""Reading regions by name, refusing what does not fit in one message, and writing the same format."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.models import weights
from longcat_pd.models.checkpoint import open_checkpoint
from longcat_pd.models.tensor_names import draft_tensors, expected_tensors
from longcat_pd.models.weight_spec import WeightSpec
from longcat_pd.models.weights import load_weights, write_checkpoint
from longcat_pd.tiny.configs import make_config

FIELDS = make_config("2.0", ("num_layers=1", "n_routed_experts=3", "zero_expert_num=1", "vocab_size=64"), dtype="float32")
CONFIG = ModelConfig.from_dict(FIELDS)
HEAD = "lm_head.weight"
NORM = "model.norm.weight"
EXPERT = "model.layers.0.mlp.experts.2.down_proj.weight"


def contents(**changes: Any) -> dict[str, torch.Tensor]:
    """All tensors of the model, each element different from its neighbours."""
    shapes = expected_tensors(CONFIG) | changes
    return {name: torch.randn(shape) for name, shape in shapes.items() if shape is not None}


class Receiver:
    """Specs for some tensors, and what was stored for them."""

    def __init__(self) -> None:
        self.got: dict[str, torch.Tensor] = {}
        self.specs: list[WeightSpec] = []

    def want(self, name: str, region: tuple[slice, ...] = (), shape: tuple[int, ...] | None = None) -> Receiver:
        self.specs.append(WeightSpec(name, shape or expected_tensors(CONFIG)[name], self._store(name), region))
        return self

    def _store(self, name: str) -> Callable[[torch.Tensor], None]:
        return lambda tensor: self.got.update({name: tensor.clone()})


def complaint(receiver: Receiver, folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_weights(receiver.specs, folder, config=CONFIG)
    assert caught.value.param == "model.path"
    assert not receiver.got or "shard" in caught.value.message
    return caught.value.message


def test_whole_tensors_and_regions_arrive(tmp_path: Path) -> None:
    tensors = contents()
    write_checkpoint(tmp_path / "c", tensors.items(), FIELDS, max_shard_bytes=20_000)
    assert len(open_checkpoint(tmp_path / "c").shards) > 3
    receiver = Receiver().want(NORM).want(HEAD, (slice(16, 32),)).want(EXPERT, (slice(None), slice(8, 24)))
    num_bytes = load_weights(receiver.specs, tmp_path / "c", config=CONFIG)
    assert torch.equal(receiver.got[NORM], tensors[NORM])
    assert torch.equal(receiver.got[HEAD], tensors[HEAD][16:32])
    assert torch.equal(receiver.got[EXPERT], tensors[EXPERT][:, 8:24])
    assert num_bytes == 4 * (96 + 16 * 96 + 96 * 16)


def test_any_order_of_shards_each_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = contents()
    names = list(tensors)
    random.Random(5).shuffle(names)
    write_checkpoint(tmp_path / "c", ((name, tensors[name]) for name in names), FIELDS, max_shard_bytes=20_000)
    opened: Counter[str] = Counter()
    original = weights.safe_open

    def counting(path: Path, **options: Any) -> Any:
        opened[path.name] += 1
        return original(path, **options)

    monkeypatch.setattr(weights, "safe_open", counting)
    receiver = Receiver()
    for name in tensors:
        receiver.want(name)
    load_weights(receiver.specs, tmp_path / "c", config=CONFIG)
    assert all(torch.equal(receiver.got[name], tensors[name]) for name in tensors)
    assert set(opened.values()) == {1}


def test_shards_without_wanted_tensors_stay_closed(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", contents().items(), FIELDS, max_shard_bytes=20_000)
    checkpoint = open_checkpoint(tmp_path / "c")
    for shard in checkpoint.shards:
        if shard != checkpoint.shard_of[NORM]:
            (tmp_path / "c" / shard).unlink()
    load_weights(Receiver().want(NORM).specs, tmp_path / "c", config=CONFIG)


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    tensors = contents(**{HEAD: (64, 95), NORM: None, "model.layers.1.input_layernorm.0.weight": (96,)})
    write_checkpoint(tmp_path / "c", tensors.items(), FIELDS)
    message = complaint(Receiver().want(HEAD).want(NORM).want(EXPERT), tmp_path / "c")
    assert f"1 missing: {NORM}" in message
    assert "1 extra: model.layers.1.input_layernorm.0.weight" in message
    assert f"1 wrongly shaped: {HEAD} is [64, 95], not [64, 96]" in message


def test_a_tensor_of_another_rank_is_missed_too(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", contents(**{EXPERT: None}).items(), FIELDS)
    assert f"1 missing: {EXPERT}" in complaint(Receiver().want(NORM), tmp_path / "c")


def test_long_lists_are_cut_and_counted(tmp_path: Path) -> None:
    surplus = {f"surplus{i}": (2,) for i in range(25)}
    write_checkpoint(tmp_path / "c", contents(**surplus).items(), FIELDS)
    message = complaint(Receiver().want(NORM), tmp_path / "c")
    assert "25 extra: " in message
    assert "and 15 more" in message
    assert message.count("surplus") == 10


def test_tables_of_the_other_family_are_read(tmp_path: Path) -> None:
    theirs = {"oe_embed_tokens": "ngram_embeddings.embedders.", "oe_embed_proj": "ngram_embeddings.post_projs."}
    tensors = contents()
    renamed = {}
    for name, tensor in tensors.items():
        for ours in theirs:
            name = name.replace(ours, theirs[ours])
        renamed[name] = tensor.clone()
    assert renamed.keys() != tensors.keys()
    write_checkpoint(tmp_path / "c", renamed.items(), FIELDS)
    receiver = Receiver().want("model.oe_embed_tokens13.weight").want("model.oe_embed_proj1.weight")
    load_weights(receiver.specs, tmp_path / "c", config=CONFIG)
    assert len(receiver.got) == 2
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in receiver.got.items())
    write_checkpoint(tmp_path / "both", (renamed | tensors).items(), FIELDS)
    assert "32 extra: model.ngram_embeddings.embedders.0" in complaint(Receiver().want(NORM), tmp_path / "both")


def test_draft_tensors_are_carried_along_unread(tmp_path: Path) -> None:
    tensors = contents(**draft_tensors(CONFIG), **{"model.mtp.oe_embed_tokens0.weight": (3, 3)})
    write_checkpoint(tmp_path / "c", tensors.items(), FIELDS)
    load_weights(Receiver().want(NORM).specs, tmp_path / "c", config=CONFIG)


@pytest.mark.parametrize("has_own", [False, True])
def test_the_draft_layer_embeds_with_its_own_table_or_with_the_targets(tmp_path: Path, has_own: bool) -> None:
    own, target = "model.mtp.embed_tokens.weight", "model.embed_tokens.weight"
    tensors = contents(**({own: draft_tensors(CONFIG)[own]} if has_own else {}))
    write_checkpoint(tmp_path / "c", tensors.items(), FIELDS)
    receiver = Receiver().want(target).want(own, shape=draft_tensors(CONFIG)[own])
    load_weights(receiver.specs, tmp_path / "c", config=CONFIG)
    assert torch.equal(receiver.got[own], tensors[own if has_own else target])
    assert torch.equal(receiver.got[target], tensors[target])


def test_integers_are_refused(tmp_path: Path) -> None:
    tensors = contents() | {EXPERT: torch.zeros(96, 32, dtype=torch.int8)}
    write_checkpoint(tmp_path / "c", tensors.items(), FIELDS)
    assert f"{EXPERT} is I8" in complaint(Receiver().want(EXPERT), tmp_path / "c")


@pytest.mark.parametrize("damage", ["cut", "empty", "gone", "garbage"])
def test_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    write_checkpoint(tmp_path / "c", contents().items(), FIELDS, max_shard_bytes=20_000)
    name = open_checkpoint(tmp_path / "c").shard_of[NORM]
    shard = tmp_path / "c" / name
    content = shard.read_bytes()
    shard.write_bytes({"cut": content[:-100], "empty": b"", "gone": b"", "garbage": b"\xff" * len(content)}[damage])
    if damage == "gone":
        shard.unlink()
    assert f"missing or damaged shard: {name}" in complaint(Receiver().want(NORM).want(EXPERT), tmp_path / "c")


def test_index_that_lies_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "c", contents().items(), FIELDS, max_shard_bytes=20_000)
    path = tmp_path / "c" / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = "model-00001-of-" + index["weight_map"][NORM][-17:]
    path.write_text(json.dumps(index))
    assert f"{NORM} (model-00001" in complaint(Receiver().want(NORM), tmp_path / "c")


def test_single_file_of_somebody_else(tmp_path: Path) -> None:
    tensors = contents()
    save_file(tensors, tmp_path / "model.safetensors")
    receiver = Receiver().want(HEAD)
    load_weights(receiver.specs, tmp_path, config=CONFIG)
    assert torch.equal(receiver.got[HEAD], tensors[HEAD])


def test_written_index_counts_bytes_and_no_shard_is_too_large(tmp_path: Path) -> None:
    tensors = contents()
    write_checkpoint(tmp_path / "c", tensors.items(), FIELDS, max_shard_bytes=20_000, files={"note.txt": "你好"})
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(4 * tensor.numel() for tensor in tensors.values())
    held: dict[str, list[int]] = {}
    for name, shard in index["weight_map"].items():
        held.setdefault(shard, []).append(4 * tensors[name].numel())
    assert all(sum(sizes) <= 20_000 or len(sizes) == 1 for sizes in held.values())
    assert json.loads((tmp_path / "c" / "config.json").read_text()) == FIELDS
    assert (tmp_path / "c" / "note.txt").read_text(encoding="utf-8") == "你好"


def test_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    def broken() -> Any:
        yield "a", torch.zeros(3)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_checkpoint(tmp_path / "c", broken(), {}, max_shard_bytes=1)
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    write_checkpoint(tmp_path / "c", {"a": torch.zeros(3)}.items(), {})  # an empty folder is filled
    with pytest.raises(ConfigError, match="exists already"):
        write_checkpoint(tmp_path / "c", {"a": torch.ones(3)}.items(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
