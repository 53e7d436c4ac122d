"""The offline dialect: what a file becomes, every shipped file, and that all that is wrong is told at once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from longcat_pd.config.offline import OfflineRun, in_dialect, load
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.schema import NpuConfig
from longcat_pd.errors import ConfigError
from longcat_pd.tiny.configs import make_config
from tests.releases import CHAT, LITE

SHIPPED = Path(__file__).parents[2] / "deploy" / "config" / "offline"
CPU = sorted(SHIPPED.glob("*_cpu.yaml"))
NPU = sorted(set(SHIPPED.glob("*.yaml")) - set(CPU))


def checkpoint(folder: Path, fields: dict[str, Any], *, is_int8: bool = False) -> str:
    section = {"quantization_config": int8_section(())} if is_int8 else {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields | section))
    return str(folder)


def read(tmp_path: Path, *, drop: tuple[str, ...] = (), **changes: Any) -> OfflineRun:
    """A file for one rank of the tiny Lite, with ``section__key=value`` laid over it."""
    tiny = tmp_path / "tiny"
    if not tiny.exists():
        checkpoint(tiny, make_config("lite", (), dtype="float32"))
    tree: dict[str, Any] = {
        "model_config": {"model_name": "longcat_flash_lite", "model_path": "tiny"},
        "data_config": {"input_truncated_len": 40},
        "parallel_config": {},
        "scheduler_config": {"batch_size": 4, "max_new_tokens": 8, "block_size": 16},
        "device": "cpu",
    }
    for name, value in changes.items():
        *sections, key = name.split("__")
        here = tree
        for section in sections:
            here = here.setdefault(section, {})
        here[key] = value
    for key in drop:
        del tree[key]
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(tree))
    return load(file)


def findings(tmp_path: Path, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, **changes)
    return caught.value.message.splitlines()


def test_every_section_reaches_its_record(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("{}")
    run = read(
        tmp_path,
        model_config__dtype="bfloat16",
        model_config__exe_mode="inductor",
        model_config__enable_cache_compile=True,
        model_config__output_path="out",
        model_config__custom_params={"enable_limit_core_num": False, "moe_aic_num": 6},
        data_config__dataset="lines.jsonl",
        scheduler_config__max_prefill_tokens=32,
    )
    spec = run.instance
    assert (spec.role, spec.name, spec.device, spec.model.dtype) == ("standalone", "offline", "cpu", "bfloat16")
    assert spec.model.path == str(tmp_path / "tiny")
    assert (spec.engine.exe_mode, spec.engine.buckets) == ("inductor", (4,))
    assert spec.engine.compile_cache == str(tmp_path / "out" / "compile_cache") and run.keeps_compiled
    assert (spec.engine.block_size, spec.engine.max_num_seqs, spec.engine.max_num_batched_tokens) == (16, 4, 32)
    assert spec.engine.max_model_len == 48
    assert not spec.engine.prefix_cache, "prompts that are alike would not be measured"
    assert (run.data.dataset, run.data.input_truncated_len) == (str(lines), 40)
    assert (run.batch_size, run.max_new_tokens) == (4, 8)
    assert run.idle == ("model_config.custom_params.moe_aic_num=6",)


def test_what_is_stated_and_says_nothing_to_the_device_is_found(tmp_path: Path) -> None:
    assert read(tmp_path).idle == ()
    stated = {"enable_prefetch": False, "enable_limit_core_num": True, "enable_mla_prolog": True}
    assert read(tmp_path, model_config__custom_params=stated).idle == (
        "model_config.custom_params.enable_limit_core_num=true",
    )


def test_the_whole_batch_fits_at_full_length_and_a_chunk_holds_its_prompts(tmp_path: Path) -> None:
    engine = read(tmp_path).instance.engine
    assert engine.num_blocks == 1 + 4 * 3  # 48 tokens
    assert engine.max_num_batched_tokens == 160


def test_random_weights_are_for_floats(tmp_path: Path) -> None:
    assert read(tmp_path, model_config__with_ckpt=False).instance.model.weights == "random"
    checkpoint(tmp_path / "int8", make_config("lite", (), dtype="float32"), is_int8=True)
    (line,) = findings(tmp_path, model_config__with_ckpt=False, model_config__model_path="int8")
    assert line.startswith("model_config.with_ckpt=false: random weights are floats")


def test_sections_but_the_model_may_be_left_out(tmp_path: Path) -> None:
    run = read(tmp_path, drop=("data_config", "parallel_config", "scheduler_config"))
    assert (run.data.dataset, run.batch_size, run.instance.parallel.world_size) == ("default", 1, 1)


def test_what_is_left_out_of_the_sizes_follows_from_the_world(tmp_path: Path) -> None:
    parallel = read(tmp_path, parallel_config={"world_size": 4, "attn_tp_size": 2}).instance.parallel
    assert (parallel.dp_size, parallel.ep_size, parallel.kvp_size, parallel.world_size) == (2, 4, 1, 4)
    parallel = read(tmp_path, parallel_config={"world_size": 4, "attn_tp_size": 4, "moe_tp_size": 4}).instance.parallel
    assert (parallel.dp_size, parallel.ep_size, parallel.moe_tp_size) == (1, 1, 4)


@pytest.mark.parametrize("names", [("attn_dp_size", "moe_ep_size"), ("dp_size", "ep_size")])
def test_both_spellings_are_read(tmp_path: Path, names: tuple[str, str]) -> None:
    sizes = {"world_size": 4, "attn_tp_size": 2, names[0]: 2, names[1]: 2, "o_proj_tp_size": 2}
    parallel = read(tmp_path, parallel_config=sizes).instance.parallel
    assert (parallel.dp_size, parallel.ep_size) == (2, 2)


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        (
            {"world_size": 8, "attn_tp_size": 4, "attn_dp_size": 1},
            "parallel_config: attn_tp_size 4 x attn_dp_size 1 = 4, but world_size=8",
        ),
        (
            {"world_size": 4, "attn_tp_size": 3},
            "parallel_config.attn_tp_size=3: does not divide world_size=4",
        ),
        ({"world_size": 4, "attn_tp_size": 8}, "parallel_config.attn_tp_size=8: does not divide world_size=4"),
        (
            {"world_size": 4, "attn_tp_size": 4, "moe_tp_size": 8},
            "parallel_config.moe_tp_size=8: does not divide world_size=4",
        ),
        (
            {"world_size": 4, "attn_tp_size": 4, "moe_tp_size": 2, "moe_ep_size": 4},
            "parallel_config: moe_tp_size 2 x moe_ep_size 4 = 8 does not divide world_size=4",
        ),
        (
            {"world_size": 4, "attn_tp_size": 4, "lmhead_tp_size": 8},
            "parallel_config.lmhead_tp_size=8: does not divide the 4 ranks of the instance",
        ),
        (
            {"world_size": 4, "attn_tp_size": 4, "ep_size": 2, "moe_ep_size": 4},
            "parallel_config.moe_ep_size=4: differs from parallel_config.ep_size=2; both mean the same",
        ),
        (
            {"world_size": 4, "attn_tp_size": 4, "o_proj_tp_size": 2},
            "parallel_config.o_proj_tp_size=2: differs from parallel_config.attn_tp_size=4, "
            "whose split it has; leave it out",
        ),
        (
            {"world_size": 2, "attn_tp_size": 2, "cp_size": 2},
            "parallel_config.cp_size=2: must be 1 in a standalone pool",
        ),
    ],
)
def test_wrong_products_of_sizes_are_told_once(tmp_path: Path, sizes: dict[str, int], told: str) -> None:
    assert findings(tmp_path, parallel_config=sizes) == [told]


def test_a_batch_that_the_groups_cannot_share_is_told_in_the_dialect(tmp_path: Path) -> None:
    sizes = {"world_size": 2, "attn_tp_size": 1}
    (line,) = findings(tmp_path, parallel_config=sizes, scheduler_config__batch_size=3)
    assert line == "scheduler_config.batch_size=3: must be a multiple of parallel_config.attn_dp_size=2"


def test_everything_wrong_is_told_at_once(tmp_path: Path) -> None:
    lines = findings(
        tmp_path,
        model_config__model_nam="x",
        model_config__next_n="one",
        model_config__custom_params={"enable_superkernel": True},
        model_config__enable_profiler=True,
        data_config__dataset="nowhere.jsonl",
        parallel_config={"world_size": 2},
        scheduler_config__max_new_tokens=0,
        device="gpu",
    )
    starts = [
        "model_config.model_nam: unknown key",
        "model_config.next_n=one: must be a whole number",
        "model_config.custom_params.enable_superkernel: unknown key",
        "scheduler_config.max_new_tokens=0: must be at least 1",
        "device=gpu: must be one of cpu, cuda, npu",
        "model_config.enable_profiler=true: is not supported yet",
        f"data_config.dataset={tmp_path / 'nowhere.jsonl'}: no such file",
    ]
    assert [start for start in starts if not any(line.startswith(start) for line in lines)] == []
    assert len(lines) == len(starts), lines


def test_a_checkpoint_that_is_not_there_is_told_under_the_key_of_the_dialect(tmp_path: Path) -> None:
    (line,) = findings(tmp_path, model_config__model_path="nowhere")
    assert line.startswith(f"model_config.model_path={tmp_path / 'nowhere'}: ")


@pytest.mark.parametrize(("name", "there"), [("longcat_flash", "has n-gram tables")])
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, name: str, there: str) -> None:
    (line,) = findings(tmp_path, model_config__model_name=name)
    assert line == f"model_config.model_name={name}: the checkpoint {tmp_path / 'tiny'} {there}"


def test_a_run_that_is_longer_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    (line,) = findings(tmp_path, data_config__input_truncated_len=4090)
    assert "data_config.input_truncated_len=4090: with scheduler_config.max_new_tokens=8 that is 4098" in line


@pytest.mark.parametrize("mode", ["ge_graph", "npugraph_ex"])
def test_graphs_of_another_device_are_refused(tmp_path: Path, mode: str) -> None:
    assert findings(tmp_path, model_config__exe_mode=mode) == [
        f"model_config.exe_mode={mode}: device=cpu has eager, inductor"
    ]


@pytest.mark.parametrize("name", ["enable_moe_stream_overlap", "enable_prefetch"])
def test_switches_of_npu_are_refused_elsewhere(tmp_path: Path, name: str) -> None:
    (line,) = findings(tmp_path, model_config__custom_params={name: True})
    assert line.startswith(f"model_config.custom_params.{name}=true: device=cpu")


def test_without_the_prolog_the_front_of_an_attention_is_computed_piece_by_piece(tmp_path: Path) -> None:
    assert read(tmp_path).instance.engine.unfused == ("prolog",)
    assert read(tmp_path, model_config__custom_params={"enable_mla_prolog": True}).instance.engine.unfused == ()


def test_a_setting_lies_over_the_file_and_is_told_of_like_it(tmp_path: Path) -> None:
    read(tmp_path)
    assert load(tmp_path / "run.yaml", ["scheduler_config.batch_size=2"]).batch_size == 2
    with pytest.raises(ConfigError, match=r"scheduler_config\.batch_sise: unknown key"):
        load(tmp_path / "run.yaml", ["scheduler_config.batch_sise=2"])


NPU_RUN: dict[str, Any] = {
    "device": "npu",
    "model_config__model_path": "wide",
    "model_config__exe_mode": "ge_graph",
}


def read_npu(tmp_path: Path, **changes: Any) -> OfflineRun:
    if not (tmp_path / "wide").exists():
        checkpoint(tmp_path / "wide", make_config("lite", ["num_attention_heads=8"], dtype="bfloat16"))
    return read(tmp_path, **{**NPU_RUN, **changes})


def test_switches_and_core_shares_reach_an_npu(tmp_path: Path) -> None:
    usual = read_npu(tmp_path).instance
    assert (usual.engine.exe_mode, usual.engine.buckets) == ("ge_graph", (4,))
    shares = {"moe_cube_cores": 8, "moe_vector_cores": 16, "main_cube_cores": 16, "main_vector_cores": 32}
    assert usual.npu == NpuConfig(**shares)
    custom = {"enable_moe_stream_overlap": True, "enable_prefetch": True, "moe_aic_num": 6, "main_aiv_num": 20}
    told = read_npu(tmp_path, soc="A3", model_config__custom_params=custom).instance.npu
    changed = {**shares, "moe_cube_cores": 6, "main_vector_cores": 20}
    assert told == NpuConfig(soc="A3", is_moe_overlapped=True, is_prefetched=True, **changed)
    unlimited = read_npu(tmp_path, model_config__custom_params={"enable_limit_core_num": False}).instance.npu
    assert unlimited == NpuConfig(**dict.fromkeys(shares, 0))


def test_rules_of_npu_are_told_in_the_dialect(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_npu(
            tmp_path,
            model_config__exe_mode="inductor",
            model_config__dtype="float32",
            model_config__custom_params={"moe_aic_num": 20},
            scheduler_config__block_size=24,
        )
    assert [line.partition(": ")[0] for line in caught.value.message.splitlines()] == [
        "model_config.exe_mode=inductor",
        "scheduler_config.block_size=24",
        "model_config.custom_params.moe_aic_num=20",
        "model_config.dtype=float32",
    ]


def test_files_are_shipped_for_both() -> None:
    assert [f"{file.stem}_cpu" for file in NPU] == [file.stem for file in CPU]
    assert len(NPU) == 5


@pytest.mark.parametrize("file", CPU, ids=lambda file: file.stem)
def test_a_shipped_cpu_file_reads(file: Path, tmp_path: Path) -> None:
    fields = make_config("lite" if "lite" in file.stem else "chat", (), dtype="bfloat16")
    path = checkpoint(tmp_path / "tiny", fields, is_int8="w8a8" in file.stem)
    run = load(file, [f"model_config.model_path={path}"])
    assert file.stem.startswith(f"{run.model_name}_rank")
    assert 2 <= run.instance.parallel.world_size <= 4


@pytest.mark.parametrize("file", NPU, ids=lambda file: file.stem)
def test_a_shipped_npu_file_fits_the_released_sizes(file: Path, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "real", LITE if "lite" in file.stem else CHAT, is_int8="w8a8" in file.stem)
    run = load(file, [f"model_config.model_path={path}"])
    stated = yaml.safe_load(file.read_text())["model_config"]
    assert (run.instance.device, run.idle) == ("npu", ())
    assert run.instance.engine.exe_mode == stated["exe_mode"]
    assert run.instance.npu.is_moe_overlapped == stated.get("custom_params", {}).get("enable_moe_stream_overlap", False)


@pytest.mark.parametrize("file", NPU, ids=lambda file: file.stem)
def test_a_shipped_npu_file_has_the_layout_of_its_name(file: Path, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "real", LITE if "lite" in file.stem else CHAT, is_int8="w8a8" in file.stem)
    off = "model_config.custom_params.enable_moe_stream_overlap=false"
    run = load(file, [f"model_config.model_path={path}", "device=cpu", "model_config.exe_mode=eager", off])
    parallel = run.instance.parallel
    words = file.stem.removeprefix(f"{run.model_name}_rank_").split("_")
    assert parallel.world_size == int(words[0])
    if words[1].endswith("ep"):
        assert (parallel.ep_size, parallel.moe_tp_size) == (int(words[1].removesuffix("ep")), 1)
    else:
        tp = int(words[1].removesuffix("tp"))
        assert {parallel.attn_tp_size, parallel.moe_tp_size, parallel.dense_tp_size, parallel.lmhead_tp_size} == {tp}
    assert ("mtp" in words) == (run.instance.engine.num_draft_tokens > 0)
    assert parallel.dense_tp_size == (8 if {"densetp8", "8tp"} & set(words) else 1)


def test_common_rules_about_tables_are_told_in_the_dialect(tmp_path: Path) -> None:
    key = "model_config.custom_params.ngram_embed_tp_size"
    sizes = {"world_size": 2, "attn_tp_size": 2}
    (line,) = findings(tmp_path, parallel_config=sizes, model_config__custom_params={"ngram_embed_tp_size": 4})
    assert line == f"{key}=4: does not divide the 2 ranks of the instance"
    checkpoint(tmp_path / "chat", make_config("chat", (), dtype="float32"))
    (line,) = findings(
        tmp_path,
        parallel_config=sizes,
        model_config__model_name="longcat_flash",
        model_config__model_path="chat",
        model_config__custom_params={"ngram_embed_tp_size": 2},
    )
    assert line == f"{key}=2: has no effect, the checkpoint has no n-gram tables; leave it out"


def test_texts_that_come_later_are_in_the_dialect_too() -> None:
    said = "standalone.engine.compile_cache=/x: no folder; model.dtype=float32 is needed by model.layers.0.mlp"
    wanted = "model_config.output_path=/x: no folder; model_config.dtype=float32 is needed by model.layers.0.mlp"
    assert in_dialect(said) == wanted
