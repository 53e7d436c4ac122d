"""The converter: the numbers of the definition, everything else byte by byte, and no trace of an interruption."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from longcat_pd import quantize as tool
from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import open_checkpoint
from longcat_pd.models.tensor_names import can_be_int8
from longcat_pd.quantize import JOURNAL, main, quantize
from longcat_pd.tiny.configs import VARIANTS
from longcat_pd.tiny.make import write_tiny

SMALL = ("num_layers=1", "n_routed_experts=2", "moe_topk=2", "hidden_size=48")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quantize") / "plain"
    write_tiny(path, "2.0", overrides=SMALL, max_shard_bytes=400_000)
    (path / "assets").mkdir()
    (path / "assets" / "card.md").write_text("你好\n", encoding="utf-8")
    (path / ".cache").mkdir()
    (path / ".cache" / "lock").write_text("")
    (path / "stale.safetensors").write_bytes(b"old")
    return path


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What an undisturbed run writes."""
    path = tmp_path_factory.mktemp("whole") / "int8"
    quantize(source, path)
    return files(path)


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    checkpoint = open_checkpoint(folder)
    found = {shard: load_file(folder / shard) for shard in checkpoint.shards}
    return {name: found[shard][name] for name, shard in checkpoint.shard_of.items()}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_tensor_of_every_variant(tmp_path: Path, variant: str, dtype: str) -> None:
    write_tiny(tmp_path / "plain", variant, dtype=dtype, overrides=SMALL, with_tokenizer=False)
    quantize(tmp_path / "plain", tmp_path / "int8")
    before, after = tensors(tmp_path / "plain"), tensors(tmp_path / "int8")
    num_int8 = 0
    for name, tensor in before.items():
        if not can_be_int8(name):
            assert after[name].dtype == tensor.dtype and torch.equal(after[name], tensor), name
            continue
        num_int8 += 1
        values, scale = after.pop(name), after.pop(name.replace(".weight", ".weight_scale"))
        assert values.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == (len(tensor), 1)
        wide = tensor.double()
        assert torch.equal(scale, (tensor.float().abs().amax(1, keepdim=True) / 127))
        assert values.abs().amax(1).eq(127).all()
        assert ((values.double() * scale.double() - wide).abs() <= 0.5001 * scale.double()).all(), name
    assert after.keys() == {name for name in before if not can_be_int8(name)}
    assert num_int8 == 3 * (2 + 2 + (variant != "lite"))
    config = ModelConfig.load(tmp_path / "int8")
    assert config.quantization is not None
    for name in before:
        if name.endswith(".weight") and before[name].dim() == 2:
            assert config.quantization.covers(name.removesuffix(".weight")) == can_be_int8(name)
    index = json.loads((tmp_path / "int8" / "model.safetensors.index.json").read_text())
    everything = tensors(tmp_path / "int8").values()
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in everything)


def test_other_files_are_copied_and_config_keeps_its_fields(source: Path, whole: dict[str, bytes]) -> None:
    plain = files(source)
    same = {name for name in plain if whole.get(name) == plain[name]}
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"} < same
    assert "assets/card.md" in same
    assert plain.keys() - whole.keys() == {".cache/lock", "stale.safetensors"}
    assert whole.keys() <= plain.keys()
    config = json.loads(whole["config.json"])
    section = config.pop("quantization_config")
    assert config == json.loads(plain["config.json"])
    assert (section["quant_method"], section["format"], section["kv_cache_scheme"]) == (
        "compressed-tensors",
        "int-quantized",
        None,
    )
    assert "lm_head" in section["ignore"] and "model.layers.0.self_attn.1.o_proj" in section["ignore"]


class KilledError(Exception):
    pass


def test_a_run_that_was_ended_anywhere_ends_with_the_same_bytes(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ended at every tensor and wherever something reaches the disk, with a torn line and torn drafts left over."""
    count = 0

    def counted(name: str) -> None:
        original = vars(tool)[name]

        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count == stop:
                raise KilledError
            return original(*arguments, **named)

        monkeypatch.setattr(tool, name, call)

    for name in ("_flush", "_read", "_pass_through"):
        counted(name)
    stop = 0
    quantize(source, tmp_path / "undisturbed")
    num_points, target = count, tmp_path / "c"
    assert num_points > 60
    for stop in (*range(1, 9), *range(9, num_points - 12, 7), *range(num_points - 12, num_points + 1)):
        count = 0
        with pytest.raises(KilledError):
            quantize(source, target)
        assert not (target / "config.json").exists() and (target / JOURNAL).exists() == (stop > 1)
        finished = [name for name in files(target) if name in whole and name != JOURNAL]
        assert all(files(target)[name] == whole[name] for name in finished), "nothing half-written under a final name"
        if stop > 1:
            with (target / JOURNAL).open("a") as journal:
                journal.write('{"shard": "model-0')
        count, unchanged = -1_000_000, {name: (target / name).stat().st_mtime_ns for name in finished}
        quantize(source, target)
        assert files(target) == whole
        noted = [name for name in finished if not name.endswith("json") and name.endswith(".safetensors")]
        kept = [name for name in noted if (target / name).stat().st_mtime_ns == unchanged[name]]
        assert len(noted) - len(kept) <= 1  # the last one may lack its note
        shutil.rmtree(target)


def unfinished(source: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """A folder whose work stopped before config.json; its shards."""
    with monkeypatch.context() as patch:
        patch.setattr(tool, "_index_of", lambda plans: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            quantize(source, target)
    return sorted(target.glob("*.safetensors"))


def test_a_finished_shard_that_was_damaged_meanwhile_is_written_again(
    source: Path, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = unfinished(source, tmp_path / "c", monkeypatch)
    content = bytearray(shards[1].read_bytes())
    content[-1] ^= 1
    shards[1].write_bytes(content)
    shards[2].write_bytes(b"")
    quantize(source, tmp_path / "c")
    assert files(tmp_path / "c") == whole


def test_work_on_another_source_is_not_continued(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unfinished(source, tmp_path / "c", monkeypatch)
    write_tiny(tmp_path / "other", "2.0", overrides=SMALL, seed=1, max_shard_bytes=400_000)
    before = files(tmp_path / "c")
    with pytest.raises(ConfigError, match="begun from another checkpoint"):
        quantize(tmp_path / "other", tmp_path / "c")
    assert files(tmp_path / "c") == before


def refusal(capsys: pytest.CaptureFixture[str], source: Path, target: Path) -> str:
    assert main([str(source), str(target)]) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and message.count("\n") == 1
    return message


def test_foreign_folders_are_left_alone(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for target in (tmp_path / "full", tmp_path / "file"):
        assert "exists already" in refusal(capsys, source, target)
    for target in (source, source / "int8", source.parent):
        assert "lie in each other" in refusal(capsys, source, target)
    assert files(tmp_path) == {"full/note": b"mine", "file": b"mine"}


def test_a_quantised_source_is_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quantize(source, tmp_path / "int8")
    assert "quantised already" in refusal(capsys, tmp_path / "int8", tmp_path / "again")
    fields = json.loads((tmp_path / "int8" / "config.json").read_text())
    del fields["quantization_config"]
    (tmp_path / "int8" / "config.json").write_text(json.dumps(fields))
    assert "quantised already: it holds model." in refusal(capsys, tmp_path / "int8", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_too_little_room(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(1, 1, 64 << 20))
    assert "bytes are needed and 67,108,864 are free" in refusal(capsys, source, tmp_path / "c")
    assert [path.name for path in (tmp_path / "c").iterdir()] == [JOURNAL]


def test_damage_and_strange_numbers_in_the_source_are_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(source, tmp_path / "cut")
    shard = sorted((tmp_path / "cut").glob("model*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-5])
    assert f"{shard.name}: damaged" in refusal(capsys, tmp_path / "cut", tmp_path / "c")
    shutil.copytree(source, tmp_path / "nan")
    name = "model.layers.0.mlps.0.up_proj.weight"
    shard = tmp_path / "nan" / open_checkpoint(source).shard_of[name]
    content = load_file(shard)
    content[name][3, 5] = torch.nan
    save_file(content, shard)
    assert f"{name} holds numbers that are not finite" in refusal(capsys, tmp_path / "nan", tmp_path / "d")
    assert not (tmp_path / "d" / shard.name).exists()
    assert "neither" in refusal(capsys, tmp_path, tmp_path / "e")


def test_one_file_without_an_index_and_a_row_of_zeros(source: Path, tmp_path: Path) -> None:
    plain = tensors(source)
    name = "model.layers.0.mlp.experts.1.down_proj.weight"
    plain[name][7] = 0
    (tmp_path / "one").mkdir()
    save_file(plain, tmp_path / "one" / "model.safetensors")
    shutil.copy(source / "config.json", tmp_path / "one")
    quantize(tmp_path / "one", tmp_path / "c")
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == ["config.json", "model.safetensors"]
    after = tensors(tmp_path / "c")
    assert after[name][7].eq(0).all() and float(after[f"{name}_scale"][7]) == 1.0
