"""The one small interface between the HTTP face and an instance: what ``create_app`` needs, and no more."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, Role
from longcat_pd.engine.accounting import Health
from longcat_pd.engine.plan import RankReady
from longcat_pd.engine.request import Delta, Life, Request, SamplingParams, TransferRef
from longcat_pd.engine.roster import RankState
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.progress.steps import Stage, stages
from longcat_pd.server.take import Take


@dataclass(frozen=True, kw_only=True)
class Readiness:
    """What ``/ready`` says of a worker. ``reasons``: dicts with code, detail, rank; not empty = not ready."""

    busy: bool
    incarnation: str
    config_digest: str
    ranks_total: int
    ranks_ok: int
    peers: dict[str, str] = field(default_factory=dict)
    reasons: tuple[dict[str, Any], ...] = ()
    is_lost: bool = False  # /health is 503: the process cannot recover and is about to exit
    states: tuple[RankState, ...] = ()

    @classmethod
    def of(cls, health: Health, spec: InstanceSpec, incarnation: str, *, peers: Mapping[str, str]) -> Readiness:
        """Of an instance whose engine is in this state."""
        return cls(
            busy=health.busy,
            incarnation=incarnation,
            config_digest=spec.config_digest,
            ranks_total=health.ranks_total,
            ranks_ok=health.ranks_ok,
            peers=dict(peers),
            reasons=health.reasons,
            is_lost=health.is_lost,
            states=health.states,
        )

    def start(self, now: float) -> tuple[Stage, ...]:
        """How far the start is, or how it went. ``now``: of the service's clock."""
        return stages([state.parts for state in self.states], now)

    @property
    def is_starting(self) -> bool:
        """Whether the instance has not loaded yet what it serves."""
        return any(reason["code"] == "starting" for reason in self.reasons)


def layout_info(spec: InstanceSpec, ready: Sequence[RankReady]) -> dict[str, Any]:
    """``parallel`` and ``memory`` of ``/server_info``: all sizes, and of every rank its node and its bytes by part."""
    nodes = spec.nodes or (spec.host,)
    memory = [
        {"rank": rank.rank, "node": nodes[rank.rank // spec.ranks_per_node], "bytes": dict(rank.memory)} for rank in ready
    ]
    return {"parallel": asdict(spec.parallel), "memory": memory}


def decode_state(spec: InstanceSpec, mean_accepted: float | None) -> dict[str, Any]:
    """The entry of ``internal_states`` of an instance that decodes, as benchmarks read it."""
    engine, parallel = spec.engine, spec.parallel
    return {
        "avg_spec_accept_length": mean_accepted,
        "dp_size": parallel.dp_size,
        "attn_dp_size": 1,
        "effective_max_running_requests_per_dp": engine.max_num_seqs // parallel.dp_size,
        "memory_usage": {"token_capacity": (engine.num_blocks - 1) * engine.block_size * parallel.kvp_size},
    }


class Service(Protocol):
    """One instance behind a face. Implemented by the standalone engine, the prefill worker and the decode worker."""

    name: str
    role: Role
    model: ModelSection
    engine_config: EngineConfig

    def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Run one request. Closing the generator is the only cancel; errors are raised as LongcatError.

        Calls the request's ``on_room`` once nothing that others hold is waited for any more.

        A prefill worker yields exactly one Delta (no tokens, timings set) after the acknowledgement.
        """
        ...

    async def adopt(
        self, transfer: TransferRef, deadline: float, sampling: SamplingParams, *, is_patient: bool = False
    ) -> Request:
        """Decode worker only: wait for the offer of this transfer; the request with its prompt ids, max_tokens and seed.

        ``is_patient``: as of ``Request``, which then comes to the prefill side as one too.
        """
        ...

    def readiness(self) -> Readiness:
        """From what is known already; never waits."""
        ...

    async def accounting(self) -> dict[str, Any]:
        """The worker form of ``/debug/accounting``: fresh figures of all ranks that answer within 2 s."""
        ...

    def flush_cache(self) -> None:
        """No prefix is found any more; means over the latest steps in ``info`` begin anew."""
        ...

    def info(self) -> dict[str, Any]:
        """``parallel``, ``memory`` and ``internal_states`` of ``/server_info``."""
        ...

    def glance(self) -> dict[str, Any]:
        """Load, pace and every rank, from what is known already (``engine/accounting.py``); never waits."""
        ...

    def computed_by(self, peer: str | None) -> tuple[Hello, ...]:
        """Who computes an answer that belongs to a hand-over from ``peer`` (None: to none), as they say of themselves."""
        ...

    def now(self) -> float:
        """The instance's clock, on which deadlines are stated."""
        ...


class Recorder(Protocol):
    """Keeps a record of requests. It never waits and never fails."""

    def keep(self, take: Take, outcome: str) -> None:
        """A request has ended. ``outcome``: of its body: a finish reason, the code of an error, or "cancelled"."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedBody:
    """How a body went that has its end; times are on the service's clock. Names, counts and times only.

    ``outcome``: a finish reason, the code of an error, or "cancelled"; ``error``: the name of the typed error.
    ``traceparent``: that header of its call, as it came. ``lives``: of its choices.
    """

    request_id: str
    transfer: TransferRef | None
    attempt: int
    traceparent: str
    outcome: str
    error: str | None
    began: float
    ended: float
    num_prompt: int
    num_cached: int
    num_output: int
    lives: tuple[Life, ...]


class Bodies(Protocol):
    """Is told of bodies. It never waits and never fails."""

    def ended(self, body: EndedBody) -> None:
        """A body has its end; nothing of it changes any more."""
        ...


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What is kept of requests beside log and metrics; None where nobody wants it."""

    recorder: Recorder | None = None
    bodies: Bodies | None = None


NOTHING = Kept()


def pair_of(service: Service, peer: str) -> tuple[str, ...]:
    """The names of the prefill and of the decode instance of a hand-over between this one and ``peer``."""
    return (peer, service.name) if service.role == "decode" else (service.name, peer)
