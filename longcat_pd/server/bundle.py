"""A recorded request: what has to be known to ask for the same answer again, and what the answer was.

Owns the form of the file, and what is refused in one. Knows no folder and no engine. ``replay`` reads what ``record.py``
makes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from longcat_pd.config.checks import MOST_BUNDLE_BYTES
from longcat_pd.engine.request import SamplingParams
from longcat_pd.errors import ConfigError, InvalidRequest
from longcat_pd.wire import MalformedRecord, from_json, pack, to_json

SCHEMA = 1  # raised whenever a field changes its meaning
_LARGEST_ID = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class RecordedModel:
    """The checkpoint that answered. ``weights``: as in the configuration."""

    path: str
    digest: str
    tokenizer_digest: str
    dtype: str
    weights: str


@dataclass(frozen=True, kw_only=True)
class RecordedInstance:
    """One that computed a part of the answer. ``parallel``: sizes as in the configuration, those above 1."""

    name: str
    role: str
    device: str
    version: str
    block_size: int
    num_draft_tokens: int
    parallel: dict[str, int]
    layers_per_stage: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Of what recorded. ``wire``: of the records between instances."""

    package: str
    torch: str
    wire: int


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the request ended.

    ``finish``: the reason that the client was told. ``engine_finish``: the engine's own; None where something else ended
    the answer, as a stop string. ``code``: of the error.
    """

    outcome: Literal["finished", "failed", "cancelled"]
    hop: str
    finish: str | None = None
    engine_finish: str | None = None
    code: str | None = None


@dataclass(frozen=True, kw_only=True)
class Texts:
    """What was said, as text."""

    prompt: str
    answer: str
    grammar: str


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """One choice of one request.

    ``prompt_token_ids``: the last ``sampling.num_said`` of them belong to the answer: another instance began it.
    ``answer_token_ids``: those counted for the client. ``logprobs``: theirs, where they were asked for, else empty.
    ``ids_digest``: of both lists as they were recorded. ``sampling``: resolved, with the seed of its draws; a grammar is
    text and stands in ``texts``, and ``has_grammar`` says that there was one. ``events_ms``: since the first of them, as
    this instance saw them.
    """

    schema: int
    request_id: str
    recorded_at: str
    recorded_by: str
    attempt: int
    transfer_id: str | None
    model: RecordedModel
    versions: Versions
    instances: tuple[RecordedInstance, ...]
    sampling: SamplingParams
    has_grammar: bool
    prompt_token_ids: tuple[int, ...]
    answer_token_ids: tuple[int, ...]
    ids_digest: str
    ending: Ending
    logprobs: tuple[float | None, ...] = ()
    num_cached_tokens: int | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    events_ms: dict[str, float] = field(default_factory=dict)
    texts: Texts | None = None

    @property
    def is_as_recorded(self) -> bool:
        """Whether nobody has changed an id since."""
        return self.ids_digest == ids_digest(self.prompt_token_ids, self.answer_token_ids)

    def encoded(self) -> bytes:
        """The file."""
        return to_json(self).encode() + b"\n"


@dataclass(frozen=True)
class BundleHead:
    """What is looked at first."""

    schema: int


def ids_digest(prompt: Sequence[int], answer: Sequence[int]) -> str:
    """Of the ids of a request, in hex."""
    digest = hashlib.blake2b(len(prompt).to_bytes(8, "little"), digest_size=16)
    digest.update(pack(prompt))
    digest.update(pack(answer))
    return digest.hexdigest()


def read_bundle(path: str) -> Bundle:
    """The bundle in a file. Raises ConfigError, which names the field that is wrong."""
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_BUNDLE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MOST_BUNDLE_BYTES:
        raise ConfigError(f"{path}: is longer than {MOST_BUNDLE_BYTES} bytes, which no bundle is")
    try:
        head = from_json(BundleHead, data)
        if head.schema != SCHEMA:
            raise ConfigError(f"{path}: schema={head.schema}: this version reads {SCHEMA}")
        bundle = from_json(Bundle, data)
    except MalformedRecord as error:
        raise ConfigError(f"{path}: is no bundle, or a damaged one: {error}") from error
    except InvalidRequest as error:
        raise ConfigError(f"{path}: sampling.{error.message}") from error
    findings = _findings(bundle)
    if findings:
        raise ConfigError("\n".join(f"{path}: {finding}" for finding in findings))
    return bundle


def _findings(bundle: Bundle) -> list[str]:
    found = []
    for name, ids in (("prompt_token_ids", bundle.prompt_token_ids), ("answer_token_ids", bundle.answer_token_ids)):
        for place, token_id in enumerate(ids):
            if not 0 <= token_id <= _LARGEST_ID:
                found.append(f"{name}[{place}]={token_id}: must be 0 ... {_LARGEST_ID}")
                break
    sampling, num_answer = bundle.sampling, len(bundle.answer_token_ids)
    if not 0 <= sampling.num_said < len(bundle.prompt_token_ids):
        found.append(f"sampling.num_said={sampling.num_said}: {len(bundle.prompt_token_ids)} prompt_token_ids are too few")
    if num_answer > sampling.max_tokens:
        found.append(f"answer_token_ids has {num_answer} ids: sampling.max_tokens={sampling.max_tokens}")
    if len(bundle.logprobs) not in (0, num_answer):
        found.append(f"logprobs has {len(bundle.logprobs)} numbers, answer_token_ids {num_answer} ids")
    return found
