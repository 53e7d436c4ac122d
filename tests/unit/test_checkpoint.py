"""The table of contents of a checkpoint folder, and its digest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import checkpoint_digest, lacking, open_checkpoint, read_header
from longcat_pd.models.weights import write_checkpoint
from longcat_pd.tiny.make import write_tiny


def write(path: Path, *, scale: float = 1.0, config: dict[str, object] | None = None, shard_bytes: int = 200) -> Path:
    tensors = {f"t{i}": torch.arange(32, dtype=torch.float32).reshape(4, 8) * scale + i for i in range(5)}
    write_checkpoint(path, tensors.items(), config or {"hidden_size": 8}, max_shard_bytes=shard_bytes)
    return path


def test_index_tells_where_a_tensor_is(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "c"))
    assert checkpoint.shards[0] == "model-00001-of-00005.safetensors"
    assert len(checkpoint.shards) == 5
    assert checkpoint.shard_of["t4"] == "model-00005-of-00005.safetensors"


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    folder = write(tmp_path / "c", shard_bytes=10_000)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model-00001-of-00001.safetensors").rename(folder / "model.safetensors")
    assert open_checkpoint(folder).shard_of == {f"t{i}": "model.safetensors" for i in range(5)}


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds neither"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', "\xff"])
def test_damaged_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json"):
        open_checkpoint(tmp_path)


def test_an_index_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json: cannot be read \(Permission denied\)"):
        open_checkpoint(tmp_path)


def refused(path: Path) -> bytes:
    raise PermissionError(13, "Permission denied", str(path))


def test_index_does_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    with pytest.raises(ConfigError, match="not a file name inside the folder"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, (20).to_bytes(8, "little") + b"{", (2).to_bytes(8, "little") + b"[]"]
)
def test_damaged_header_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors: damaged"):
        read_header(tmp_path / "model.safetensors")


def test_digest_of_a_copy_is_the_same(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert checkpoint_digest(folder) == checkpoint_digest(tmp_path / "elsewhere")
    assert len(checkpoint_digest(folder)) == 16


def test_digest_sees_config_contents_and_shards(tmp_path: Path) -> None:
    digests = {
        checkpoint_digest(write(tmp_path / "a")),
        checkpoint_digest(write(tmp_path / "b", scale=1.001)),
        checkpoint_digest(write(tmp_path / "c", config={"hidden_size": 9})),
        checkpoint_digest(write(tmp_path / "d", shard_bytes=500)),
    }
    assert len(digests) == 4


def test_digest_names_a_missing_shard(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    (folder / "model-00002-of-00005.safetensors").unlink()
    with pytest.raises(ConfigError, match="model-00002-of-00005"):
        checkpoint_digest(folder)


def test_digest_without_weights_is_that_of_the_config(tmp_path: Path) -> None:
    folder = write(tmp_path / "c")
    before = checkpoint_digest(folder, has_weights=False)
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    assert checkpoint_digest(folder, has_weights=False) == before
    (folder / "config.json").write_text("{}")
    assert checkpoint_digest(folder, has_weights=False) != before


@pytest.mark.parametrize("variant", ["lite", "2.0", "chat"])
def test_nothing_is_lacking_of_a_whole_checkpoint(tmp_path: Path, variant: str) -> None:
    write_tiny(tmp_path / "c", variant, with_tokenizer=False, overrides=("num_layers=1",))
    assert list(lacking(tmp_path / "c", has_draft=variant != "lite")) == []


def test_what_is_lacking_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    write_tiny(folder, "lite", with_tokenizer=False, overrides=("num_layers=1",), max_shard_bytes=100_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    gone = index["weight_map"]["model.embed_tokens.weight"]
    (folder / gone).unlink()
    (
        shards,
        tensors,
    ) = lacking(folder, has_draft=False)
    assert f"1 of {len(set(index['weight_map'].values()))} shards are missing: {gone}" in shards
    assert "1 of " in tensors and tensors.endswith("are missing: model.norm.weight")
    *_, drafts = lacking(folder, has_draft=True)
    assert "model.mtp.layers.0.eh_proj.weight" in drafts
    (folder / "model.safetensors.index.json").unlink()
    (nothing,) = lacking(folder, has_draft=False)
    assert "holds neither" in nothing
