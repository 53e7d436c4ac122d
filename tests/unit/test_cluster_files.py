"""deploy/config: every cluster file resolves by itself, and the config.json that they name are those of the releases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.checks import pools
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import load
from longcat_pd.models.tensor_names import can_be_int8, draft_tensors, expected_tensors
from longcat_pd.plan.survey import survey
from tests.releases import CHAT, FULL_2_0

CONFIG = Path(__file__).parents[2] / "deploy" / "config"
ON_CARDS = sorted(file for file in (CONFIG / "cluster").glob("*.yaml") if not file.stem.endswith("-cpu"))
WORLDS = {
    "longcat2-a2-192": (64, 128),
    "longcat2-a3-192": (64, 128),
    "lite-sparse-a2-twin": (16, 16),
    "chat-a2-64": (32, 32),
}


def test_all_files_are_known() -> None:
    assert {file.stem for file in ON_CARDS} == WORLDS.keys()


@pytest.mark.parametrize("file", ON_CARDS, ids=lambda file: file.stem)
def test_a_file_resolves_with_the_config_json_that_it_names(file: Path) -> None:
    config = load(file)
    assert tuple(pool.parallel.world_size for _, pool in pools(config)) == WORLDS[file.stem]
    assert Path(config.model.path).parent == CONFIG / "model"
    assert config.load_balancer.node == pools_of(config)[0].instances[-1].nodes[-1]


def pools_of(config: Any) -> list[Any]:
    return [pool for _, pool in pools(config)]


@pytest.mark.parametrize("file", ON_CARDS, ids=lambda file: file.stem)
def test_a_file_fits_its_cards(file: Path) -> None:
    plan = survey(str(file), [])
    assert (plan.findings, plan.advice) == ((), ())
    for instance in plan.instances:
        able = instance.capacity
        assert able.most_blocks is not None and able.num_blocks <= able.most_blocks
        assert able.sequences[instance.spec.engine.max_model_len] >= instance.spec.parallel.dp_size


@pytest.mark.parametrize(
    ("name", "fields"), [("LongCat-2.0", FULL_2_0), ("LongCat-2.0-INT8", FULL_2_0), ("LongCat-Flash-Chat", CHAT)]
)
def test_the_config_json_are_those_of_the_releases(name: str, fields: dict[str, Any]) -> None:
    ours, released = ModelConfig.load(CONFIG / "model" / name), ModelConfig.from_dict(fields)
    same = {"max_position_embeddings": ours.max_position_embeddings, "quantization": ours.quantization}
    assert ours == replace(released, draft=ours.draft, **same)
    assert (ours.draft is None) == ("Chat" in name)


def test_int8_are_mlps_and_experts() -> None:
    model = ModelConfig.load(CONFIG / "model" / "LongCat-2.0-INT8")
    assert model.quantization is not None
    for name in (*expected_tensors(model), *draft_tensors(model)):
        module = name.removesuffix(".weight")
        if can_be_int8(name) or any(part in name for part in ("self_attn", "router", "lm_head", "oe_embed", "eh_proj")):
            assert model.quantization.covers(module) == can_be_int8(name), name
    assert any(can_be_int8(name) for name in draft_tensors(model))
