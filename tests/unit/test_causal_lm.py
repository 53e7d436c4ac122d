"""What a stage wants from a checkpoint, and what it does with the pieces."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.tensor_names import expected_tensors
from longcat_pd.models.weight_spec import WeightSpec
from tests.unit.stage import FakeAxis, make_context

VARIANTS = ["2.0", "lite-sparse", "lite", "chat"]


def checkpoint(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def load(specs: Iterable[WeightSpec], tensors: dict[str, Tensor]) -> None:
    for spec in specs:
        spec.store(tensors[spec.name][spec.region] if spec.region else tensors[spec.name])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_whole_model_wants_every_tensor_once_and_fills_every_parameter(variant: str) -> None:
    context = make_context(variant)
    model = CausalLM(context)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    specs = list(model.weight_specs())
    expected = expected_tensors(context.config)
    assert len({spec.name for spec in specs}) == len(specs)
    assert {spec.name: spec.shape for spec in specs} == expected
    load(specs, checkpoint(expected))
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert sum(p.numel() for p in model.parameters()) == sum(torch.Size(s).numel() for s in expected.values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_stages_share_the_tensors_among_them(variant: str) -> None:
    whole = {spec.name for spec in CausalLM(make_context(variant)).weight_specs()}
    stages = [
        {spec.name for spec in CausalLM(make_context(variant, layers=layers)).weight_specs()}
        for layers in (range(1), range(1, 2), range(2, 3))
    ]
    assert set.union(*stages) == whole and sum(map(len, stages)) == len(whole)
    assert "model.embed_tokens.weight" in stages[0] and "lm_head.weight" in stages[2]
    assert all(name.startswith("model.layers.1.") for name in stages[1])


@pytest.mark.parametrize("size", [2, 3])
def test_heads_are_split_and_all_else_is_whole(size: int) -> None:
    """The shares of all ranks, side by side, are the parameters of a rank that has everything."""
    expected = expected_tensors(make_context().config)
    tensors = checkpoint(expected)

    def parameters(axes: tuple[FakeAxis, ...]) -> dict[str, Tensor]:
        model = CausalLM(make_context(axes=axes))
        load(model.weight_specs(), tensors)
        return dict(model.named_parameters())

    whole = parameters(())
    shares = [parameters((FakeAxis("attn_tp", size, rank),)) for rank in range(size)]
    for name, value in whole.items():
        parts = [share[name] for share in shares]
        if name.endswith(("o_proj.weight", "kv_up.key", "kv_up.value")):
            assert torch.equal(torch.cat(parts), value), name
        elif name.endswith("q_up.weight"):
            assert torch.equal(torch.cat(parts, 1), value), name
        else:
            assert all(torch.equal(part, value) for part in parts), name


def test_data_types_of_parameters() -> None:
    model = CausalLM(make_context(dtype=torch.bfloat16))
    wide = [name for name, p in model.named_parameters() if p.dtype == torch.float32]
    assert all(name.endswith(("classifier.weight", "router.bias", "weights_proj.weight")) for name in wide)
    assert len(wide) == 3 * 3


def test_a_tied_head_reads_the_embedding() -> None:
    specs = list(CausalLM(make_context("chat", "tie_word_embeddings=true")).weight_specs())
    assert [spec.name for spec in specs].count("model.embed_tokens.weight") == 2
    assert all(spec.name != "lm_head.weight" for spec in specs)
