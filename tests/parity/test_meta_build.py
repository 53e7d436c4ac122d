"""Ranks built without memory against what the loader really reads, and at full size against layout and plan."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors import safe_open

from longcat_pd import kernels
from longcat_pd.config import resolve
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.schema import InstanceSpec, NpuConfig, Role
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models import weights
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.checkpoint import int8_modules, open_checkpoint
from longcat_pd.models.stage import Stage, data_type, stage_context
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from longcat_pd.quantize import quantize
from longcat_pd.sizing.memory import instance_memory
from longcat_pd.sizing.meta_build import check_ranks
from longcat_pd.sizing.meta_instance import check_instance
from longcat_pd.sizing.meta_rank import BuiltRank, Read, build_rank
from longcat_pd.sizing.readers import int8_of, tensors_of
from longcat_pd.tiny.configs import make_config
from tests.parity.conftest import MakeCheckpoint
from tests.parity.test_memory import spec_of
from tests.releases import CHAT, FULL_2_0, LITE

Reads = Counter[tuple[str, tuple[tuple[int, int], ...]]]
PREFILL = {"pp_size": 2, "cp_size": 2, "ep_size": 2, "embed_tp_size": 2, "lmhead_tp_size": 2, "dense_tp_size": 2}
DECODE = {
    "dp_size": 2,
    "kvp_size": 2,
    "attn_tp_size": 2,
    "dense_tp_size": 2,
    "ep_size": 4,
    "embed_tp_size": 2,
    "lmhead_tp_size": 4,
    "ngram_embed_tp_size": 4,
}
LAYOUTS: list[tuple[Role, dict[str, Any]]] = [
    ("prefill", PREFILL),
    ("decode", DECODE),
    ("standalone", {"attn_tp_size": 2, "moe_tp_size": 2, "lmhead_tp_size": 2}),
    ("standalone", {}),
]


class Reader:
    """The library's reader, and what it was asked for."""

    def __init__(self, reads: Reads, *arguments: Any, **options: Any) -> None:
        self._reads, self._opened = reads, safe_open(*arguments, **options)

    def __enter__(self) -> Reader:
        self._file = self._opened.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._opened.__exit__(*error)

    def keys(self) -> Collection[str]:
        return list(self._file.keys())

    def get_tensor(self, name: str) -> torch.Tensor:
        whole = self._file.get_tensor(name)
        shape = whole.shape[:1] if name.endswith("_scale") else whole.shape  # of a scale also [n, 1]
        self._reads[name, tuple((0, size) for size in shape)] += 1
        return whole  # type: ignore[no-any-return]

    def get_slice(self, name: str) -> Any:
        return _Slice(self._reads, name, self._file.get_slice(name))


class _Slice:
    def __init__(self, reads: Reads, name: str, part: Any) -> None:
        self._reads, self._name, self._part = reads, name, part
        self.get_shape, self.get_dtype = part.get_shape, part.get_dtype

    def __getitem__(self, region: tuple[slice, ...]) -> torch.Tensor:
        self._reads[self._name, tuple((r.start, r.stop) for r in region)] += 1
        return self._part[region]  # type: ignore[no-any-return]


def loaded(rank: int, spec: InstanceSpec, config: ModelConfig, path: Path, monkeypatch: pytest.MonkeyPatch) -> Reads:
    """What the loader reads of a checkpoint for a rank."""
    reads: Reads = Counter()
    monkeypatch.setattr(weights, "safe_open", lambda *given, **options: Reader(reads, *given, **options))
    mesh = Mesh(ParallelLayout.of(spec.parallel), rank, {}, platform=platform_of("cpu"))
    stage, dtype = Stage.of(spec, config, mesh.axis("pp").rank), data_type(spec, config)
    cache = KVCache.of_layers(config, stage.cached, engine=spec.engine, dtype=dtype, device=mesh.device)
    int8 = int8_modules(open_checkpoint(path))
    model = CausalLM(stage_context(stage, spec, config=config, mesh=mesh, ops=kernels.load("cpu"), cache=cache, int8=int8))
    weights.load_weights(model.weight_specs(), path, config=config)
    return reads


@pytest.mark.parametrize("is_int8", [False, True], ids=["float", "int8"])
@pytest.mark.parametrize("variant", ["2.0", "lite-sparse", "lite", "chat"])
def test_what_is_seen_without_memory_is_what_the_loader_reads(
    tiny: MakeCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, is_int8: bool
) -> None:
    path = tiny(variant)
    if is_int8:
        quantize(path, tmp_path / "int8")
        path = tmp_path / "int8"
    config = ModelConfig.load(path)
    assert int8_of(config) >= int8_modules(open_checkpoint(path))
    for role, sizes in LAYOUTS:
        if is_int8 and "moe_tp_size" in sizes:
            continue
        spec = spec_of(role, config, num_drafts=int(variant != "lite"), **sizes)
        spec = replace(spec, model=replace(spec.model, path=str(path)))
        for rank in range(spec.parallel.world_size):
            built = build_rank(rank, spec, config, int8=int8_of(config))
            seen: Reads = Counter((read.name, read.part) for read in built.reads)
            assert seen == loaded(rank, spec, config, path, monkeypatch) and seen
        report = check_instance(spec, config, stored=open_checkpoint(path).shard_of)
        assert report.findings == ()
        assert report.num_tensors + report.num_scales == len(open_checkpoint(path).shard_of) and report.unread == ()


def large(*, is_int8: bool = True, **fields: Any) -> ModelConfig:
    section = {"quantization_config": int8_section(["lm_head", "re:.*self_attn"])} if is_int8 else {}
    return ModelConfig.from_dict(FULL_2_0 | {"torch_dtype": "bfloat16"} | section | fields)


PREFILL_64 = {
    "pp_size": 8,
    "cp_size": 8,
    "ep_size": 8,
    "lmhead_tp_size": 8,
    "ngram_embed_tp_size": 8,
    "ngram_tables": "host",
    "layers_per_stage": (4, 5, 5, 5, 5, 5, 5, 4),
}
DECODE_128 = {
    "dp_size": 16,
    "kvp_size": 8,
    "attn_tp_size": 8,
    "dense_tp_size": 8,
    "ep_size": 128,
    "lmhead_tp_size": 16,
    "ngram_embed_tp_size": 128,
}


def large_spec(role: Role, config: ModelConfig, **sizes: Any) -> InstanceSpec:
    return replace(spec_of(role, config, num_drafts=3, **sizes), device="npu", npu=NpuConfig(soc="A3"))


@pytest.mark.parametrize("dispatch", ["gather", "fused"])
def test_all_ranks_of_a_decode_pool_of_full_width_and_two_layers(dispatch: str) -> None:
    config = large(num_layers=2)
    report = check_instance(large_spec("decode", config, **DECODE_128, moe_dispatch=dispatch), config)
    assert report.findings == () and report.num_ranks == 128
    assert (report.num_tensors, report.num_scales) == (2 * 2334 + 35 + 21, 2 * 2310 + 3)
    once = 2 * 768 * 3 * 2 + 16  # experts with their scales, tables
    assert report.times[1] == once and set(report.times) == {1, 8, 16, 128}  # head, heads and dense MLPs, all else
    assert report.times[8] == 1 and sum(report.times.values()) == report.num_tensors + report.num_scales


def test_all_ranks_of_a_prefill_pool_of_full_width_and_eight_layers() -> None:
    config = large(num_layers=8)
    spec = large_spec("prefill", config, **PREFILL_64 | {"layers_per_stage": (1,) * 8})
    report = check_instance(spec, config)
    assert report.findings == () and report.num_ranks == 64
    assert report.times[1] == 8 * 768 * 3 * 2 + 16 + 1 and set(report.times) == {1, 8}
    assert report.bytes_of["n-gram tables on host"] == 263_630_608 * 512 * 2
    assert any("n-gram tables on host 251.4" in line for line in report.lines())


@pytest.mark.parametrize(
    ("role", "sizes", "ranks"), [("prefill", PREFILL_64, (0, 21, 63)), ("decode", DECODE_128, (0, 77))]
)
def test_chosen_ranks_of_the_large_one(role: Role, sizes: dict[str, Any], ranks: tuple[int, ...]) -> None:
    config = large()
    spec, int8 = large_spec(role, config, **sizes), int8_of(config)
    planned, shapes = instance_memory(spec, config), tensors_of(config, int8)
    for rank in ranks:
        built = build_rank(rank, spec, config, int8=int8)
        assert built.num_stored == built.num_parameters
        assert all(shapes[read.name] == read.shape for read in built.reads)
        for part in ("weights", "n-gram tables", "cache", "index keys", "drafts"):
            assert built.memory[part] == planned[rank].parts[part], (rank, part)


# -- planted faults

Change = Callable[[BuiltRank], BuiltRank]


def changed_read(name: str, change: Callable[[Read], list[Read]]) -> Change:
    def change_rank(built: BuiltRank) -> BuiltRank:
        assert any(read.name == name for read in built.reads), "or nothing would be changed"
        reads = [new for read in built.reads for new in (change(read) if read.name == name else [read])]
        return replace(built, reads=tuple(reads))

    return change_rank


def shifted(read: Read) -> list[Read]:
    (first, end), *others = read.part
    return [replace(read, part=((first + 1, end + 1), *others))]


def halved(read: Read) -> list[Read]:
    return [replace(read, part=((0, read.shape[0] // 2), *read.part[1:]))]


LAYER = "model.layers.1"
FAULTS: dict[str, tuple[int, Change, str]] = {
    "a shard off by one row": (
        1,
        changed_read(f"{LAYER}.self_attn.0.q_b_proj.weight", shifted),
        f"1 tensors are not read as the layout says: {LAYER}.self_attn.0.q_b_proj.weight by ranks 0..1 of attn_tp: "
        "144..145 of 288 in dimension 0 read by none",
    ),
    "a run of table rows off by one": (
        2,
        changed_read("model.oe_embed_tokens9.weight", shifted),
        "1 tensors are not read as the layout says: model.oe_embed_tokens9.weight by ranks 0..3 of ngram_embed_tp: ",
    ),
    "an expert read twice": (
        2,
        changed_read(f"{LAYER}.mlp.experts.9.up_proj.weight", lambda read: [read, read]),
        f"1 tensors are read where the layout does not say it: {LAYER}.mlp.experts.9.up_proj.weight by rank 2",
    ),
    "another rank's expert": (
        3,
        changed_read(
            f"{LAYER}.mlp.experts.12.up_proj.weight",
            lambda read: [replace(read, name=f"{LAYER}.mlp.experts.9.up_proj.weight")],
        ),
        f"2 tensors are not read as the layout says: {LAYER}.mlp.experts.9.up_proj.weight by ranks 0..3 of ep: "
        "by places [2, 3], not by place 2",
    ),
    "a replicated tensor sharded": (
        0,
        changed_read(f"{LAYER}.self_attn.1.kv_a_proj_with_mqa.weight", halved),
        f"1 tensors are not read as the layout says: {LAYER}.self_attn.1.kv_a_proj_with_mqa.weight by rank 0: "
        "20..40 of 40 in dimension 0 read by none",
    ),
    "a tensor forgotten": (
        3,
        changed_read("model.norm.weight", lambda read: []),
        "1 tensors are not read as the layout says: model.norm.weight by rank 3: not at all",
    ),
    "a shape": (
        3,
        changed_read("model.norm.weight", lambda read: [replace(read, shape=(95,))]),
        "1 tensors are of another shape: model.norm.weight [95], it is [96]",
    ),
    "bytes of a part": (
        2,
        lambda built: replace(built, memory={**built.memory, "index keys": built.memory["index keys"] + 1}),
        "1 parts of ranks have other bytes than planned: rank 2: index keys ",
    ),
    "a parameter that is not filled": (
        0,
        lambda built: replace(built, num_stored=built.num_stored - 1),
        "1 ranks are given other than as many numbers as they have parameters: rank 0: ",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_found(fault: str) -> None:
    config = ModelConfig.from_dict(make_config("2.0", (), dtype="float32"))
    place, change, line = FAULTS[fault]

    def build(rank: int, *given: Any, **options: Any) -> BuiltRank:
        built = build_rank(rank, *given, **options)
        return change(built) if rank == place else built

    report = check_instance(spec_of("decode", config, num_drafts=1, **DECODE), config, build=build)
    assert len(report.findings) == 1 and report.findings[0].startswith(f"decode x: {line}"), report.findings


# -- from the file of a cluster


def cluster_of(folder: Path, fields: dict[str, Any], tensors: Collection[str] = ()) -> Path:
    (folder / "weights").mkdir()
    (folder / "weights" / "config.json").write_text(json.dumps(fields))
    if tensors:
        index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00001.safetensors")}
        (folder / "weights" / "model.safetensors.index.json").write_text(json.dumps(index))
    nodes = [f"10.0.0.{number}" for number in range(12)]
    engine = {"max_model_len": 131072, "num_blocks": 1024, "num_draft_tokens": 3}
    tree = {
        "model": {"path": "weights"},
        "device": "npu",
        "prefill": {
            "parallel": {**PREFILL_64, "layers_per_stage": list(PREFILL_64["layers_per_stage"])},  # type: ignore[call-overload]
            "engine": {**engine, "max_num_seqs": 8},
            "instances": [{"name": "p0", "http_port": 30000, "nodes": nodes[8:]}],
        },
        "decode": {
            "parallel": DECODE_128,
            "engine": {**engine, "max_num_seqs": 64},
            "instances": [{"name": "d0", "http_port": 31000, "nodes": nodes[:8]}],
        },
    }
    path = folder / "cluster.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@pytest.mark.slow
@pytest.mark.parametrize("is_int8", [True, False], ids=["int8", "bf16"])
def test_all_192_ranks_at_full_size(tmp_path: Path, is_int8: bool) -> None:
    """And all 88,780 tensors of the release, of which the draft layer's tables are read by nobody."""
    fields = FULL_2_0 | {"torch_dtype": "bfloat16"}
    if is_int8:
        fields = fields | {"quantization_config": int8_section(["lm_head"])}
    config = ModelConfig.from_dict(fields)
    draft = [f"model.mtp.oe_embed_{kind}{b}.weight" for kind in ("tokens", "proj") for b in range(16)]
    stored = [*tensors_of(config, int8_of(config)), *draft]
    assert len([name for name in stored if not name.endswith("_scale")]) == 88_780
    report = check_ranks(resolve.load(cluster_of(tmp_path, fields, stored)))
    assert report.findings == ()
    for instance, num_ranks in zip(report.instances, (64, 128), strict=True):
        assert instance.num_ranks == num_ranks and instance.unread == tuple(draft)
        assert (instance.num_tensors, instance.num_scales) == (88_748, 87_783 if is_int8 else 0)
        assert instance.num_tensors + instance.num_scales == sum(instance.times.values())
    print(*report.lines(), sep="\n")


def test_a_cluster_of_chat_and_lite_layouts_at_full_size() -> None:
    """The draft layer without an index, tables of the other spelling, vocabulary and experts over all ranks."""
    chat = ModelConfig.from_dict(CHAT | {"torch_dtype": "bfloat16", "num_layers": 2})
    sizes = {"dp_size": 32, "dense_tp_size": 8, "ep_size": 32, "embed_tp_size": 8, "lmhead_tp_size": 8}
    assert check_instance(large_spec("standalone", chat, **sizes), chat).findings == ()
    lite = ModelConfig.from_dict(LITE | {"torch_dtype": "bfloat16", "num_layers": 2})
    sizes = {"dp_size": 2, "attn_tp_size": 4, "ep_size": 8, "lmhead_tp_size": 8, "ngram_embed_tp_size": 8}
    assert check_instance(spec_of("standalone", lite, **sizes), lite).findings == ()
