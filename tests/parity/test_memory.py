"""What every rank of a layout allocates against what the plan says, part by part. Ranks are built, and never talk."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, cast

import pytest
import torch

from longcat_pd import kernels
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, Role, TransferConfig
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.context import ModelContext
from longcat_pd.models.tensor_names import can_be_int8, draft_tensors, expected_tensors
from longcat_pd.parallel.layout import CacheShard, ParallelLayout, layers_of_stage
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.sizing.memory import instance_memory
from longcat_pd.tiny.configs import make_config

CPU = torch.device("cpu")
MEASURED = ("weights", "n-gram tables", "n-gram tables on host", "cache", "index keys", "drafts")
ENGINE = EngineConfig(block_size=8, num_blocks=7, max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)


@dataclass
class MuteAxis:
    """One rank's place on an axis, without anybody there."""

    name: str
    size: int
    rank: int


class MuteMesh:
    """A rank in a layout."""

    def __init__(self, layout: ParallelLayout, rank: int) -> None:
        self.layout = layout
        self.rank = rank
        self.device = torch.device("cpu")

    def axis(self, name: Any) -> MuteAxis:
        return MuteAxis(name, self.layout.axis(name).size, self.layout.coordinate(self.rank, name))

    def coordinate(self, name: Any) -> int:
        return self.layout.coordinate(self.rank, name)

    @property
    def cache_shard(self) -> CacheShard:
        return self.layout.cache_shard(self.rank)


def spec_of(role: Role, model: ModelConfig, *, num_drafts: int = 0, **parallel: Any) -> InstanceSpec:
    sizes = ParallelConfig(**parallel)
    stages = tuple(len(layers_of_stage(sizes, model.num_layers, stage)) for stage in range(sizes.pp_size))
    return InstanceSpec(
        name="x",
        role=role,
        host="127.0.0.1",
        http_port=30000,
        device="cpu",
        model=ModelSection(path="/x", dtype=model.torch_dtype),
        parallel=replace(
            sizes, layers_per_stage=stages, ngram_embed_tp_size=sizes.ngram_embed_tp_size or sizes.embed_tp_size
        ),
        engine=replace(ENGINE, num_draft_tokens=num_drafts),
        transfer=TransferConfig(),
    )


def allocated(spec: InstanceSpec, config: ModelConfig, rank: int) -> dict[str, int]:
    layout = ParallelLayout.of(spec.parallel)
    mesh = MuteMesh(layout, rank)
    stage, last = layout.coordinate(rank, "pp"), spec.parallel.pp_size - 1
    layers = layers_of_stage(spec.parallel, config.num_layers, stage)
    has_draft = stage == last and spec.engine.num_draft_tokens > 0
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[spec.model.dtype]
    cached = range(layers.start, layers.stop + has_draft)
    names = [name for name in (*expected_tensors(config), *draft_tensors(config)) if can_be_int8(name)]
    stored = config.quantization
    context = ModelContext(
        config=config,
        ops=kernels.load("cpu"),
        mesh=cast(Mesh, mesh),
        cache=KVCache.of_layers(config, cached, engine=spec.engine, dtype=dtype, device=CPU),
        layers=layers,
        is_first=stage == 0,
        is_last=stage == last,
        kv_access=mesh.cache_shard.access,
        dtype=dtype,
        device=CPU,
        moe_dispatch=spec.parallel.moe_dispatch,
        int8=frozenset(n.removesuffix(".weight") for n in names if stored and stored.covers(n.removesuffix(".weight"))),
        has_draft=has_draft,
    )
    return dict(CausalLM(context).memory(context.cache))


def compare(spec: InstanceSpec, config: ModelConfig) -> list[dict[str, int]]:
    """All ranks; what they allocated."""
    found = []
    for planned in instance_memory(spec, config):
        measured = allocated(spec, config, planned.rank)
        assert tuple(measured) == MEASURED
        for part in MEASURED:
            on_host = planned.host_parts.get(part.removesuffix(" on host"), 0)
            expected = on_host if part.endswith(" on host") else planned.parts[part]
            assert measured[part] == expected, (planned.rank, part)
        found.append(measured)
    return found


def model(variant: str, *overrides: str, dtype: str = "float32", **fields: Any) -> ModelConfig:
    return ModelConfig.from_dict(make_config(variant, overrides, dtype=dtype) | fields)


LAYOUTS: list[tuple[Role, dict[str, Any]]] = [
    ("standalone", {}),
    ("prefill", {"pp_size": 2, "cp_size": 2, "ep_size": 2, "lmhead_tp_size": 2, "embed_tp_size": 2}),
    ("prefill", {"pp_size": 3, "cp_size": 2, "moe_tp_size": 2, "dense_tp_size": 2, "ngram_embed_tp_size": 2}),
    (
        "decode",
        {
            "dp_size": 2,
            "kvp_size": 2,
            "attn_tp_size": 2,
            "ep_size": 4,
            "dense_tp_size": 2,
            "lmhead_tp_size": 4,
            "embed_tp_size": 2,
            "ngram_embed_tp_size": 4,
        },
    ),
    ("decode", {"dp_size": 2, "kvp_size": 2, "attn_tp_size": 2, "ep_size": 4, "moe_dispatch": "two_level", "node_size": 2}),
    ("decode", {"kvp_size": 3, "attn_tp_size": 3, "ngram_embed_tp_size": 3}),
    (
        "standalone",
        {"dp_size": 2, "attn_tp_size": 4, "ep_size": 4, "ngram_embed_tp_size": 8, "lmhead_tp_size": 8},
    ),
]


@pytest.mark.parametrize("variant", ["2.0", "lite", "chat"])
@pytest.mark.parametrize(("role", "sizes"), LAYOUTS)
def test_every_rank_allocates_what_the_plan_says(variant: str, role: Role, sizes: dict[str, Any]) -> None:
    config = model(variant)
    ranks = compare(spec_of(role, config, **sizes), config)
    assert len(ranks) == ParallelConfig(**sizes).world_size
    assert all(bool(rank["index keys"]) == (variant == "2.0") for rank in ranks)
    assert bool(ranks[0]["n-gram tables"]) == (variant != "chat")


@pytest.mark.parametrize(("role", "sizes"), LAYOUTS)
def test_the_draft_layer_is_counted_apart(role: Role, sizes: dict[str, Any]) -> None:
    config = model("2.0", dtype="bfloat16")
    ranks = compare(spec_of(role, config, num_drafts=2, **sizes), config)
    assert [rank["drafts"] > 0 for rank in ranks] == [
        rank * sizes.get("pp_size", 1) // len(ranks) == sizes.get("pp_size", 1) - 1 for rank in range(len(ranks))
    ]


@pytest.mark.parametrize(("role", "sizes"), [layout for layout in LAYOUTS if "moe_tp_size" not in layout[1]])
def test_int8_is_counted_as_it_is_stored(role: Role, sizes: dict[str, Any]) -> None:
    section = int8_section(["lm_head", "model.layers.1.mlps.0"])
    config = model("2.0", dtype="bfloat16", quantization_config=section)
    plain = model("2.0", dtype="bfloat16")
    small = compare(spec_of(role, config, num_drafts=1, **sizes), config)
    large = compare(spec_of(role, plain, num_drafts=1, **sizes), plain)
    assert all(s["weights"] < p["weights"] and s["drafts"] <= p["drafts"] for s, p in zip(small, large, strict=True))


@pytest.mark.parametrize("override", ["index_k_norm_type=layer", "cli_factor=1", "tie_word_embeddings=true"])
def test_what_some_checkpoints_have_is_counted(override: str) -> None:
    config = model("2.0", override)
    compare(spec_of("standalone", config, num_drafts=1), config)
