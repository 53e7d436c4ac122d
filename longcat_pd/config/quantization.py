"""QuantizationConfig: what config.json says about integer weights, in the words of the compressed-tensors format.

One scheme is known: int8 weights with one scale a row, activations quantised on the fly with one scale a token. Anything
else is refused by name. Which tensors really are int8 is decided by what is stored, not here; this record says what to
expect, for the memory plan and for noticing a checkpoint that lost its scales.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longcat_pd.config.fields import Fields
from longcat_pd.errors import ConfigError

METHOD, FORMAT = "compressed-tensors", "int-quantized"
SECTION = "quantization_config"

_WEIGHTS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
_ACTIVATIONS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}


@dataclass(frozen=True)
class QuantizationConfig:
    """``ignore``: modules that stay floats; a name, the name of a module around it, or ``re:`` and a pattern."""

    ignore: tuple[str, ...]

    def covers(self, module: str) -> bool:
        """Whether a module that can be int8 is meant to be."""
        parts = module.split(".")
        names = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        return self._names.isdisjoint(names) and not any(pattern.match(module) for pattern in self._patterns)

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(item for item in self.ignore if not item.startswith("re:"))

    @cached_property
    def _patterns(self) -> tuple[re.Pattern[str], ...]:
        return tuple(re.compile(item[3:]) for item in self.ignore if item.startswith("re:"))


def read_quantization(read: Fields) -> QuantizationConfig | None:
    """The section of a config.json; None where there is none. Raises ConfigError that names what is not supported."""
    section = read.record(SECTION)
    if section is None:
        return None
    method = section.text("quant_method", default="unknown")
    if method != METHOD:
        raise _refused("quant_method", method)
    kind = section.text("format", default=FORMAT).replace("_", "-")
    if kind != FORMAT:
        raise _refused("format", kind)
    if section.has("kv_cache_scheme"):
        raise _refused("kv_cache_scheme", "a quantised cache")
    groups = section.record("config_groups")
    for name in groups.names() if groups is not None else ():
        group = groups.record(name) if groups is not None else None
        if group is not None:
            _check_group(group, f"config_groups.{name}")
    return QuantizationConfig(tuple(_ignored(section)))


def _check_group(group: Fields, path: str) -> None:
    """Every field that is given must be as in the one known scheme; without activations the weights alone are int8."""
    for part, wanted in (("weights", _WEIGHTS), ("input_activations", _ACTIVATIONS)):
        record = group.record(part)
        if record is None:
            raise _refused(f"{path}.{part}", "nothing")
        for field, value in wanted.items():
            found = record.value(field, default=value)
            if found != value:
                raise _refused(f"{path}.{part}.{field}", found)
    if group.has("output_activations"):
        raise _refused(f"{path}.output_activations", "quantised results")


def _ignored(section: Fields) -> Iterator[str]:
    for item in section.texts("ignore"):
        if item.startswith("re:"):
            try:
                re.compile(item[3:])
            except re.error as error:
                raise _refused("ignore", item) from error
        yield item


def _refused(field: str, value: object) -> ConfigError:
    known = f"known is {METHOD}, {FORMAT}: int8 weights by channel, int8 activations by token"
    return ConfigError(f"{SECTION}.{field}: {value} is not supported; {known}", param=SECTION)


def int8_section(ignore: list[str]) -> dict[str, Any]:
    """The section for a checkpoint whose other modules are all int8."""
    group = {"targets": ["Linear"], "weights": _WEIGHTS, "input_activations": _ACTIVATIONS, "output_activations": None}
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }
