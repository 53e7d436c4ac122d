"""Int8 tensors on their way into the model: taken as they are stored, refused with their names when they do not fit."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.models.batch import Rows
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.checkpoint import int8_modules, open_checkpoint
from longcat_pd.models.linear import Int8Linear, Piece
from longcat_pd.models.weights import load_weights, write_checkpoint
from longcat_pd.quantize import quantize
from longcat_pd.tiny.make import write_tiny
from tests.unit.stage import make_context

SMALL = ("num_layers=1", "n_routed_experts=3", "moe_topk=2", "hidden_size=48", "vocab_size=64")
DENSE, EXPERT = "model.layers.0.mlps.1", "model.layers.0.mlp.experts.2"
DRAFT = "model.mtp.layers.0.transformer_layer.mlp"

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("int8")
    write_tiny(folder / "plain", "2.0", dtype="float32", with_tokenizer=False, overrides=SMALL)
    quantize(folder / "plain", folder / "int8")
    return folder / "int8"


@pytest.fixture
def changed(source: Path, tmp_path: Path) -> Callable[[Callable[[Tensors], object]], Path]:
    """Writes the int8 checkpoint again after a change to its tensors."""

    def write(change: Callable[[Tensors], object]) -> Path:
        tensors = contents(source)
        change(tensors)
        write_checkpoint(tmp_path / "c", tensors.items(), json.loads((source / "config.json").read_text()))
        return tmp_path / "c"

    return write


def contents(folder: Path) -> Tensors:
    return {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}


def load(path: Path) -> CausalLM:
    config = ModelConfig.load(path)
    context = make_context("2.0", *SMALL)
    model = CausalLM(dataclasses.replace(context, config=config, int8=int8_modules(open_checkpoint(path))))
    load_weights(model.weight_specs(), path, config=config)
    return model


def test_every_tensor_arrives_in_its_place(source: Path) -> None:
    model, tensors = load(source), contents(source)
    layer = model.stack.layers[0]
    for half, place in ((layer.first, 0), (layer.second, 1)):
        name = f"model.layers.0.mlps.{place}"
        for linear, parts in ((half.mlp.gate_up, ("gate_proj", "up_proj")), (half.mlp.down.linear, ("down_proj",))):
            assert torch.equal(linear.weight, torch.cat([tensors[f"{name}.{part}.weight"] for part in parts]))
            assert torch.equal(linear.scale, torch.cat([tensors[f"{name}.{part}.weight_scale"] for part in parts])[:, 0])
    moe = layer.moe
    assert moe.gate_up.dtype == moe.down.dtype == torch.int8
    assert moe.gate_up_scale.dtype == moe.down_scale.dtype == torch.float32
    for e in range(3):
        name = f"model.layers.0.mlp.experts.{e}"
        gate_up = [tensors[f"{name}.{part}.weight"] for part in ("gate_proj", "up_proj")]
        scales = [tensors[f"{name}.{part}.weight_scale"] for part in ("gate_proj", "up_proj")]
        assert torch.equal(moe.gate_up[e], torch.cat(gate_up)) and torch.equal(
            moe.gate_up_scale[e], torch.cat(scales)[:, 0]
        )
        assert torch.equal(moe.down[e], tensors[f"{name}.down_proj.weight"])
        assert torch.equal(moe.down_scale[e], tensors[f"{name}.down_proj.weight_scale"][:, 0])


def parameters(model: CausalLM) -> Tensors:
    return dict(model.named_parameters())


def test_scales_in_other_shapes_and_types_and_zero_offsets(source: Path, changed: Callable[..., Path]) -> None:
    def respell(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("_scale")]:
            scale = tensors[name].bfloat16().float()
            tensors[name] = scale.view(-1).bfloat16() if "gate" in name else scale
            tensors[name.replace("_scale", "_offset")] = torch.zeros_like(scale)

    found, wanted = parameters(load(changed(respell))), parameters(load(source))
    for name, value in wanted.items():
        assert torch.equal(found[name], value.bfloat16().float() if "scale" in name else value), name


def as_floats(*modules: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for module in modules:
            tensors[f"{module}.weight"] = tensors[f"{module}.weight"] * tensors.pop(f"{module}.weight_scale")

    return change


def test_what_is_stored_as_floats_stays_floats(changed: Callable[..., Path]) -> None:
    """One MLP's second half, and all experts' first: decided tensor by tensor, whatever config.json says."""
    floats = [f"{DENSE}.down_proj"]
    floats += [f"model.layers.0.mlp.experts.{e}.{part}" for e in range(3) for part in ("gate_proj", "up_proj")]
    layer = load(changed(as_floats(*floats))).stack.layers[0]
    assert layer.second.mlp.gate_up.weight.dtype == torch.int8
    assert layer.second.mlp.down.linear.weight.dtype == torch.float32
    assert layer.moe.gate_up.dtype == torch.float32 and layer.moe.gate_up_scale is None
    assert layer.moe.down.dtype == torch.int8
    assert torch.isfinite(layer.moe(torch.randn(4, 48), Rows.even(4, 1))).all()


def test_without_a_word_in_config_json(source: Path, tmp_path: Path) -> None:
    fields = json.loads((source / "config.json").read_text())
    del fields["quantization_config"]
    write_checkpoint(tmp_path / "c", contents(source).items(), fields)
    assert load(tmp_path / "c").stack.layers[0].moe.down.dtype == torch.int8


def put(name: str, value: Callable[[Tensor], Tensor]) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({name: value(tensors[name])})


def all_scales_gone(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.endswith("_scale")]:
        del tensors[name]


def second_row(value: float) -> Callable[[Tensor], Tensor]:
    def change(scale: Tensor) -> Tensor:
        scale = scale.clone()
        scale[1] = value
        return scale

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop(f"{EXPERT}.up_proj.weight_scale"), f"{EXPERT}.up_proj.weight_scale is missing"),
        (all_scales_gone, f"{DENSE}.down_proj.weight is I8 and {DENSE}.down_proj.weight_scale is missing"),
        (put(f"{EXPERT}.down_proj.weight_scale", second_row(torch.nan)), f"{EXPERT}.down_proj.weight_scale has 1 of 48"),
        (put(f"{DENSE}.up_proj.weight_scale", second_row(torch.inf)), f"{DENSE}.up_proj.weight_scale has 1 of 128"),
        (put(f"{DENSE}.up_proj.weight_scale", second_row(0.0)), f"{DENSE}.up_proj.weight_scale has 1 of 128"),
        (put(f"{DENSE}.up_proj.weight_scale", second_row(-1.0)), f"{DENSE}.up_proj.weight_scale has 1 of 128"),
        (put(f"{DENSE}.up_proj.weight_scale", lambda s: s[1:]), f"{DENSE}.up_proj.weight_scale is [127, 1], not [128]"),
        (put(f"{DENSE}.up_proj.weight_scale", lambda s: s.t()), f"{DENSE}.up_proj.weight_scale is [1, 128], not [128]"),
        (put(f"{DENSE}.up_proj.weight_scale", lambda s: s.to(torch.int8)), f"{DENSE}.up_proj.weight_scale is I8"),
        (put(f"{DENSE}.up_proj.weight", lambda w: w.float()), f"{DENSE}.up_proj.weight is F32, where"),
        (lambda t: t.pop(f"{DENSE}.up_proj.weight"), f"{DENSE}.up_proj"),
        (lambda t: t.pop(f"{DRAFT}.up_proj.weight"), f"without the tensor that it scales: {DRAFT}.up_proj.weight_scale"),
        (as_floats(f"{EXPERT}.down_proj"), f"{EXPERT}.down_proj is not"),
        (as_floats(f"{DENSE}.up_proj"), f"{DENSE}.gate_proj is int8 with a scale and {DENSE}.up_proj is not"),
        (
            put("model.layers.0.self_attn.0.o_proj.weight", lambda w: w.to(torch.int8)),
            "model.layers.0.self_attn.0.o_proj.weight is I8, where the model takes floats only",
        ),
        (lambda t: t.update({"lm_head.weight_scale": torch.ones(64)}), "lm_head.weight is F32, where lm_head.weight_scale"),
        (
            lambda t: t.update({f"{DENSE}.up_proj.weight_offset": torch.ones(128, 1)}),
            f"{DENSE}.up_proj.weight_offset is not zero",
        ),
        (lambda t: t.update({f"{DENSE}.up_proj.smooth_scale": torch.ones(48)}), f"extra: {DENSE}.up_proj.smooth_scale"),
    ],
)
def test_what_does_not_fit_is_named(changed: Callable[..., Path], change: Callable[[Tensors], object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(changed(change))
    assert named in caught.value.message
    assert caught.value.param == "model.path"


def test_floats_where_config_json_announces_int8(source: Path, tmp_path: Path) -> None:
    write_checkpoint(
        tmp_path / "c", contents(source.parent / "plain").items(), json.loads((source / "config.json").read_text())
    )
    with pytest.raises(ConfigError, match="quantization_config announces int8, and no tensor has a scale"):
        load(tmp_path / "c")


def test_own_rows_of_an_int8_tensor() -> None:
    context = dataclasses.replace(make_context("chat"), int8=frozenset({"m.a", "m.b"}))
    linear = Int8Linear(context, 8, Piece("m.a", 6, slice(2, 4)), Piece("m.b", 3))
    weights = {name: torch.randint(-127, 128, shape) for name, shape in (("m.a", (6, 8)), ("m.b", (3, 8)))}
    scales = {name: torch.rand(len(weight)) + 0.1 for name, weight in weights.items()}
    stored = {f"{n}.weight": w.to(torch.int8) for n, w in weights.items()} | {
        f"{n}.weight_scale": s for n, s in scales.items()
    }
    for spec in linear.weight_specs():
        tensor = stored[spec.name]
        assert tuple(tensor.shape) == spec.shape
        spec.store(tensor[spec.region] if spec.region else tensor)
    x = torch.randn(5, 8)
    whole = context.ops.linear_int8(x, stored["m.a.weight"], scales["m.a"])
    assert torch.equal(linear(x)[:, :2], whole[:, 2:4])
    assert torch.equal(linear(x)[:, 2:], context.ops.linear_int8(x, stored["m.b.weight"], scales["m.b"]))
