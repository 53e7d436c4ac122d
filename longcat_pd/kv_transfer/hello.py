"""What two drivers tell each other first, and what must agree before cache changes hands. Pure."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass

from longcat_pd.config.model import ModelConfig, attentions_of
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.kv_transfer.plan import travelling_layers
from longcat_pd.wire import WIRE_VERSION

LANE_PORT_OFFSET = 5  # from http_port: where a decode instance serves its lanes
CONTROL_PORT_OFFSET = 1

_LAYOUT = ("pp_size", "cp_size", "dp_size", "kvp_size", "layers_per_stage", "block_size", "cache_entries", "device")
_ANSWER_DEPENDS_ON = ("role", "code_version", "model_digest", "tokenizer_digest", *_LAYOUT)
_EQUAL = ("wire_version", "model_digest", "tokenizer_digest", "block_size", "cache_entries", "digest_mode", "device")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A field on which two instances must agree and do not; values as they are shown."""

    field: str
    prefill: str
    decode: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What an instance knows of itself besides its configuration."""

    incarnation: str
    code_version: str
    model_digest: str
    tokenizer_digest: str


def make_hello(spec: InstanceSpec, model: ModelConfig, identity: Identity) -> Hello:
    """The hello of an instance."""
    parallel = spec.parallel
    return Hello(
        name=spec.name,
        role=spec.role,
        incarnation=identity.incarnation,
        wire_version=WIRE_VERSION,
        code_version=identity.code_version,
        model_digest=identity.model_digest,
        tokenizer_digest=identity.tokenizer_digest,
        block_size=spec.engine.block_size,
        cache_entries=cache_entries(model, spec.model.dtype, has_draft=spec.engine.num_draft_tokens > 0),
        digest_mode=spec.transfer.digest,
        max_model_len=spec.engine.max_model_len,
        pp_size=parallel.pp_size,
        cp_size=parallel.cp_size,
        dp_size=parallel.dp_size,
        kvp_size=parallel.kvp_size,
        layers_per_stage=travelling_layers(parallel.layers_per_stage, has_draft=spec.engine.num_draft_tokens > 0),
        device=spec.device,
        lane_host=spec.host,
        lane_port=spec.http_port + LANE_PORT_OFFSET,
        num_draft_tokens=spec.engine.num_draft_tokens,
        pairs_within_s=spec.transfer.pairing_timeout_s + spec.engine.queue_timeout_s,
        acks_within_s=spec.transfer.timeout_s + spec.engine.step_timeout_s,
    )


def cache_entries(model: ModelConfig, dtype: str, *, has_draft: bool = False) -> tuple[tuple[str, int, str], ...]:
    """Name, width and data type of every cache entry; what ``CacheSpec`` says, for a process without torch."""
    return tuple(
        (f"{kind}.{attention}", width, dtype)
        for layer in range(model.num_layers + has_draft)
        for attention in attentions_of(model, layer)
        for kind, width in model.cached_widths(attention).items()
    )


def fingerprint(*instances: Hello) -> str:
    """Eight hex digits: equal where the same request has the same answer, whoever of a pool takes part in it.

    Of code, model, tokenizer, cache layout, device and layout of every instance that computes a part of the answer.
    """
    seen = [[str(getattr(hello, name)) for name in _ANSWER_DEPENDS_ON] for hello in instances]
    return f"{zlib.crc32(repr(seen).encode()):08x}"


def mismatches(prefill: Hello, decode: Hello) -> tuple[Mismatch, ...]:
    """Everything that forbids a hand-over between these two; empty when they fit."""
    found = [
        _of(name, prefill, decode)
        for name in _EQUAL
        if name != "cache_entries" and getattr(prefill, name) != getattr(decode, name)
    ]
    if prefill.cache_entries != decode.cache_entries:
        found.append(_first_entry(prefill, decode))
    if (prefill.num_draft_tokens > 0) != (decode.num_draft_tokens > 0):
        found.append(_of("num_draft_tokens", prefill, decode))
    if decode.max_model_len < prefill.max_model_len:
        found.append(_of("max_model_len", prefill, decode))
    if (prefill.role, decode.role) != ("prefill", "decode"):
        found.append(_of("role", prefill, decode))
    if sum(prefill.layers_per_stage) != sum(decode.layers_per_stage):
        found.append(_of("layers_per_stage", prefill, decode))
    if not 0 < decode.lane_port < 1 << 16:
        found.append(_of("lane_port", prefill, decode))
    for name in ("pairs_within_s", "acks_within_s"):
        if not all(0 < seconds < math.inf for seconds in (getattr(prefill, name), getattr(decode, name))):
            found.append(_of(name, prefill, decode))
    return tuple(found)


def _of(name: str, prefill: Hello, decode: Hello) -> Mismatch:
    return Mismatch(name, str(getattr(prefill, name)), str(getattr(decode, name)))


def _first_entry(prefill: Hello, decode: Hello) -> Mismatch:
    ours, theirs = set(prefill.cache_entries), set(decode.cache_entries)
    only_prefill, only_decode = sorted(ours - theirs), sorted(theirs - ours)
    return Mismatch("cache_entries", _show(only_prefill), _show(only_decode))


def _show(entries: list[tuple[str, int, str]]) -> str:
    shown = ", ".join(f"{name} {width} x {dtype}" for name, width, dtype in entries[:1])
    return f"{shown} and {len(entries) - 1} more" if len(entries) > 1 else shown or "no other entries"
