"""What is asked of an engine and what comes out of it: plain records, no queues and no tensors.

``Request`` is frozen and made by the face (``server/app.py``). ``Sequence`` is the scheduler's and nobody else writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from longcat_pd.errors import InvalidRequest

MAX_BIAS = 1024  # token ids that a request may favour or disfavour
STEPS_KEPT = 64  # of a life: when its first steps ended

Hop = Literal["queued", "offered", "prefilling", "transferring", "decoding"]


class FinishReason(str, Enum):
    """Why a sequence ended. Everything that goes wrong is an exception, not a reason."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are chosen. Validated at construction: InvalidRequest names the field.

    ``temperature`` 0 is arg-max; ``top_k`` 0 is off; ``num_logprobs`` None: no log-probs, n: those of the token and of the
    n best. ``seed`` and ``choice`` key every draw together with the position. ``min_p`` 0 is off; ``logit_bias``: ids and
    what is added to their logits. Fewer than ``min_tokens`` generated: no EOS and none of ``stop_token_ids``, also if EOS
    would not stop. ``grammar``: what the answer has to be a text of, see ``grammar.py``; empty: anything. ``num_said``: so
    many ids at the end of the prompt belong to the answer already; ``max_tokens`` and ``min_tokens`` count those to come.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 16
    seed: int = 0
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    ignore_eos: bool = False
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    num_said: int = 0

    def __post_init__(self) -> None:
        checks = (
            ("temperature", 0.0 <= self.temperature <= 2.0, self.temperature, "0 ... 2"),
            ("top_p", 0.0 < self.top_p <= 1.0, self.top_p, "0 < p <= 1"),
            ("top_k", 0 <= self.top_k < 2**63, self.top_k, ">= 0, 0 = off, 64-bit signed"),
            ("max_tokens", self.max_tokens >= 1, self.max_tokens, ">= 1"),
            ("seed", -(2**63) <= self.seed < 2**63, self.seed, "64-bit signed"),
            ("min_p", 0.0 <= self.min_p <= 1.0, self.min_p, "0 ... 1"),
            ("min_tokens", 0 <= self.min_tokens <= self.max_tokens, self.min_tokens, f"0 ... {self.max_tokens}"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, self.presence_penalty, "-2 ... 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, self.frequency_penalty, "-2 ... 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 2.0, self.repetition_penalty, "0 < r <= 2"),
            ("logit_bias", len(self.logit_bias) <= MAX_BIAS, f"{len(self.logit_bias)} ids", f"0 ... {MAX_BIAS}"),
            ("logprobs", self.num_logprobs is None or 0 <= self.num_logprobs <= 20, self.num_logprobs, "0 ... 20"),
        )
        for name, ok, value, allowed in checks:
            if not ok:
                raise InvalidRequest(f"{name} = {value} is outside {allowed}", param=name)


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferRef:
    """The hand-over that a request belongs to: id (one per attempt and choice) and the *name* of the other instance."""

    id: str
    peer: str


class Event(str, Enum):
    """Life events of a request, in the order of time. The one source of every latency figure."""

    ARRIVED = "arrived"
    OFFERED = "offered"
    GRANTED = "granted"
    PREFILL_STARTED = "prefill_started"
    PREFILL_ENDED = "prefill_ended"
    COMMITTED = "committed"
    FIRST_TOKEN = "first_token"
    FINISHED = "finished"


class Life:
    """The life of one request at one instance. Written by the engine; whoever tells of the request reads it.

    ``num_cached_tokens``: leading tokens of its prompt that were not computed for it, at the instance that computed the
    rest; None as long as that is not known. ``num_accepted``: tokens of its answer that drafts brought.
    rest; None as long as that is not known. ``steps``: when the first of the plans that it stood in were answered, chunks
    of a prompt or decode steps; ``num_steps``: all of them. ``moved_bytes``: of its cache, between two instances;
    ``early_bytes``: those that had left before the last layer was computed, as far as is known where they are sent.
    """

    def __init__(self) -> None:
        self.num_cached_tokens: int | None = None
        self.num_accepted = 0
        self.num_steps = 0
        self.steps: list[float] = []
        self.moved_bytes: int | None = None
        self.early_bytes: int | None = None
        self._at: dict[Event, float] = {}

    @property
    def events(self) -> tuple[tuple[Event, float], ...]:
        """What has happened, in the order of time."""
        return tuple(sorted(self._at.items(), key=lambda entry: entry[1]))

    def step(self, now: float) -> None:
        """A plan that it stood in has been answered."""
        self.num_steps += 1
        if self.num_steps <= STEPS_KEPT:
            self.steps.append(now)

    def stamp(self, event: Event, now: float) -> None:
        """Note an event once."""
        self._at.setdefault(event, now)

    def timings_ms(self) -> dict[str, float]:
        """Durations between the events that have happened; "transfer" ends with the acknowledgement."""
        spans = (
            ("queue", Event.ARRIVED, Event.GRANTED),
            ("queue", Event.ARRIVED, Event.PREFILL_STARTED),
            ("prefill", Event.PREFILL_STARTED, Event.PREFILL_ENDED),
            ("transfer", Event.GRANTED, Event.COMMITTED),
            ("transfer", Event.PREFILL_ENDED, Event.COMMITTED),
            ("first_token", Event.ARRIVED, Event.FIRST_TOKEN),
            ("decode", Event.FIRST_TOKEN, Event.FINISHED),
            ("total", Event.ARRIVED, Event.FINISHED),
        )  # of two with one name the later counts, where its events are known
        known = self._at
        return {name: 1000.0 * (known[b] - known[a]) for name, a, b in spans if a in known and b in known}

    def events_ms(self) -> dict[str, float]:
        """When each event happened, since the first of them; in the order of time."""
        began = min(self._at.values(), default=0.0)
        return {event.value: 1000.0 * (at - began) for event, at in sorted(self._at.items(), key=lambda pair: pair[1])}

    @property
    def hop(self) -> Hop:
        """How far the request has come. A grant is the beginning of the transfer where the cache goes, not where it comes
        from: there the prompt waits for its first plan."""
        marks: tuple[tuple[Event, Hop], ...] = (
            (Event.FIRST_TOKEN, "decoding"),
            (Event.PREFILL_ENDED, "transferring"),
            (Event.PREFILL_STARTED, "prefilling"),
            (Event.OFFERED, "offered"),
            (Event.GRANTED, "transferring"),
        )
        return next((hop for event, hop in marks if event in self._at), "queued")


def num_cached(lives: Iterable[Life]) -> int:
    """Prompt tokens that nobody had to compute, of a prompt that several requests have in common."""
    return min((life.num_cached_tokens for life in lives if life.num_cached_tokens is not None), default=0)


def _nobody_waits() -> None:
    """Nothing to do when there is room."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One choice of one client request. Prompt not empty; prompt + max_tokens <= max_model_len (the face checks).

    ``priority``: of those that wait, the lowest goes first. ``on_room``: called by a service once the request has all the
    room that it needs, at the other instance too; the face sends the next choice of the same body then. ``is_patient``:
    that room may be held by choices of the same body, so only the deadline ends the wait for it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    deadline: float  # on the instance's clock
    transfer: TransferRef | None = None
    priority: int = 0
    is_patient: bool = False
    on_room: Callable[[], None] = field(default=_nobody_waits, compare=False, repr=False)
    life: Life = field(default_factory=Life, compare=False, repr=False)

    @property
    def asked_token_ids(self) -> tuple[int, ...]:
        """The prompt without what belongs to the answer."""
        return self.prompt_token_ids[: len(self.prompt_token_ids) - self.sampling.num_said]

    @property
    def said_token_ids(self) -> tuple[int, ...]:
        """What of the prompt belongs to the answer."""
        return self.prompt_token_ids[len(self.prompt_token_ids) - self.sampling.num_said :]


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """One generated token. ``logprob`` and ``top`` (id, log-prob; best first) only where they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of an answer: tokens in order; ``finish`` is on the last piece and only there.

    ``matched_stop_token`` is the member of ``stop_token_ids`` that ended the answer (None for EOS and length).
    """

    tokens: tuple[TokenOutput, ...]
    finish: FinishReason | None = None
    matched_stop_token: int | None = None
