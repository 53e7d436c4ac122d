"""The section of config.json about integer weights: one scheme is read, everything else is refused by name."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import QuantizationConfig, int8_section
from longcat_pd.errors import ConfigError
from longcat_pd.tiny.configs import make_config

PLAIN = make_config("chat", (), dtype="bfloat16")


def read(section: dict[str, Any] | None) -> QuantizationConfig | None:
    return ModelConfig.from_dict({**PLAIN, "quantization_config": section}).quantization


def changed(path: str, value: Any) -> dict[str, Any]:
    section = copy.deepcopy(int8_section(["lm_head"]))
    *parents, last = path.split(".")
    record = section
    for parent in parents:
        record = record[parent]
    if value is None:
        del record[last]
    else:
        record[last] = value
    return section


def test_absent_and_present() -> None:
    assert read(None) is None and read({}) is None
    assert read(int8_section(["lm_head"])) == QuantizationConfig(("lm_head",))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("format", "int_quantized"),
        ("format", None),
        ("quantization_status", None),
        ("config_groups", None),
        ("config_groups.group_0.targets", ["re:.*experts.*"]),
        ("config_groups.group_0.weights.observer", "minmax"),
        ("config_groups.group_0.weights.strategy", None),
        ("config_groups.group_0.format", "int-quantized"),
    ],
)
def test_what_other_writers_add_or_leave_out_does_not_matter(path: str, value: Any) -> None:
    assert read(changed(path, value)) == QuantizationConfig(("lm_head",))


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("quant_method", "fp8", "quant_method: fp8"),
        ("quant_method", None, "quant_method: unknown"),
        ("format", "pack-quantized", "format: pack-quantized"),
        ("kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme"),
        ("config_groups.group_0.weights.num_bits", 4, "config_groups.group_0.weights.num_bits: 4"),
        ("config_groups.group_0.weights.type", "float", "weights.type: float"),
        ("config_groups.group_0.weights.strategy", "group", "weights.strategy: group"),
        ("config_groups.group_0.weights.symmetric", False, "weights.symmetric: False"),
        ("config_groups.group_0.input_activations", None, "input_activations: nothing"),
        ("config_groups.group_0.input_activations.dynamic", False, "input_activations.dynamic: False"),
        ("config_groups.group_0.output_activations", {"num_bits": 8}, "output_activations"),
        ("ignore", ["re:("], r"ignore: re:\("),
        ("ignore", "lm_head", "ignore"),
    ],
)
def test_another_scheme_is_refused_by_name(path: str, value: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        read(changed(path, value))
    assert (caught.value.param or "").startswith("quantization_config")


def test_ignored_modules_by_name_by_what_is_around_them_and_by_pattern() -> None:
    config = QuantizationConfig(("model.layers.0.mlps.0", "model.layers.1.mlps.1.up_proj", r"re:.*experts\.3\..*"))
    assert not config.covers("model.layers.0.mlps.0.up_proj")
    assert config.covers("model.layers.0.mlps.01.up_proj")
    assert not config.covers("model.layers.1.mlps.1.up_proj")
    assert config.covers("model.layers.1.mlps.1.gate_proj")
    assert not config.covers("model.layers.7.mlp.experts.3.down_proj")
    assert config.covers("model.layers.7.mlp.experts.31.down_proj")
