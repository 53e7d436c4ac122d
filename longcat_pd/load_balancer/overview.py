"""What the balancer tells of the whole cluster: readiness, information, accounts, and the end-to-end proof.

Owns the shapes of those answers. Asks the instances, and changes nothing but their caches of prefixes.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longcat_pd.clock import PROBE_FRESH_S, PROBE_TIMEOUT_S
from longcat_pd.errors import LongcatError, WorkerUnavailable
from longcat_pd.load_balancer.attempt import Call, Means
from longcat_pd.load_balancer.pool import Instance
from longcat_pd.load_balancer.progress import Progress
from longcat_pd.load_balancer.proxy import Proxy
from longcat_pd.server.gate import Gate
from longcat_pd.server.openai import COMPLETIONS_ROUTE
from longcat_pd.version import VERSION

ANSWER_S = 4.0  # how long an instance may take for its accounts; it asks its own ranks for up to 2 s
_INFO_KEYS = ("instance", "tokenizer_path", "parallel", "internal_states")
_SHARED_KEYS = ("sampling_defaults", "determinism")
# ids in and ids out, so that a checkpoint without tokenizer is proved as well; several steps of the decode instance
_PROBE = {"prompt": [5, 6, 7, 8], "max_tokens": 4, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@dataclass(frozen=True, kw_only=True)
class Served:
    """The one model of the cluster, and who tells of it."""

    name: str
    path: str
    max_model_len: int
    created: int
    instance: str
    incarnation: str
    config_digest: str
    version: str = VERSION


class Overview:
    """Answers about the cluster, from the pool's view and from the instances' own words."""

    def __init__(self, means: Means, gate: Gate, served: Served) -> None:
        self._means = means
        self._gate = gate
        self._served = served

    def readiness(self) -> dict[str, Any]:
        """``/ready``, from what is known already."""
        instances = list(self._means.pool.instances.values())
        reasons = self._means.pool.reasons()
        if self._gate.is_draining:
            reasons = [{"code": "draining", "detail": f"{self._gate.num_open} requests are open", "rank": None}]
        elif reasons and any(i.out_reason == "starting" and not i.is_in for i in instances):
            reasons = [{"code": "starting", "detail": "an instance is starting", "rank": None}, *reasons]
        ranks = [i.said["ranks"] for i in instances if isinstance(i.said.get("ranks"), dict)]
        return {
            "ready": not reasons,
            "busy": any(i.said.get("busy") is True for i in instances),
            "role": "load_balancer",
            "instance": self._served.instance,
            "incarnation": self._served.incarnation,
            "config_digest": self._served.config_digest,
            "ranks": {key: sum(_count(r, key) for r in ranks) for key in ("total", "ok")},
            "peers": {i.name: _link_to(i) for i in instances},
            "reasons": reasons,
            "instances": {i.name: {"ready": i.is_ready, "reasons": list(i.reasons)} for i in instances},
        }

    def models(self) -> dict[str, Any]:
        """The one entry of ``/v1/models``. Raises WorkerUnavailable until the cluster was ready once."""
        if not self._means.pool.has_been_ready.is_set():
            raise WorkerUnavailable("this server is starting", code="starting")
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "longcat",
            "root": self._served.path,
            "parent": None,
            "max_model_len": self._served.max_model_len,
        }

    def model_info(self) -> dict[str, Any]:
        """``/model_info``."""
        return {"model_path": self._served.path, "tokenizer_path": self._served.path, "is_generation": True}

    async def server_info(self) -> dict[str, Any]:
        """``/server_info``: our own line, and those of the instances that answer."""
        told = await self._ask_all("/server_info")
        sides: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": []}
        shared: dict[str, Any] = {}
        for instance, info in told.items():
            if info is None:
                continue
            entry = {key: info.get(key) for key in _INFO_KEYS}
            entry["instance"] = instance.name
            sides[instance.target.role].append(entry)
            shared = {key: info.get(key) for key in _SHARED_KEYS}
        states = [state for entry in sides["decode"] for state in entry["internal_states"] or []]
        return {
            "version": self._served.version,
            "role": "load_balancer",
            "model_path": self._served.path,
            "tokenizer_path": self._served.path,
            "served_model_name": self._served.name,
            "max_model_len": self._served.max_model_len,
            **shared,
            **sides,
            "internal_states": states,
        }

    async def accounting(self) -> dict[str, Any]:
        """``/debug/accounting``: idle only when nothing is open here and every instance says the same of itself."""
        told = await self._ask_all("/debug/accounting")
        accounts = {instance.name: account for instance, account in told.items() if account is not None}
        unreachable = [instance.name for instance in told if instance.name not in accounts]
        legs = {"prefill": 0, "decode": 0}
        for instance in told:
            legs[instance.target.role] += instance.open_legs
        own = self._gate.num_open + sum(legs.values())
        return {
            "role": "load_balancer",
            "idle": not own and not unreachable and all(a.get("idle") is True for a in accounts.values()),
            "outstanding": own + sum(_count(a, "outstanding") for a in accounts.values()),
            "balancer": {"clients": self._gate.num_open, "legs": legs},
            "instances": accounts,
            "unreachable": unreachable,
        }

    async def flush_cache(self) -> None:
        """Let every instance forget its prefixes. Raises WorkerUnavailable where one that is in did not; the others did."""
        told = await self._ask_all("/flush_cache", body=b"")
        missing = [instance.name for instance, answer in told.items() if answer is None and instance.is_in]
        if missing:
            raise WorkerUnavailable(f"no answer from {', '.join(missing)}: its cache may not be empty")

    async def _ask_all(self, path: str, *, body: bytes | None = None) -> dict[Instance, dict[str, Any] | None]:
        instances = list(self._means.pool.instances.values())
        answers = await asyncio.gather(*(self._ask(instance, path, body) for instance in instances))
        return dict(zip(instances, answers, strict=True))

    async def _ask(self, instance: Instance, path: str, body: bytes | None) -> dict[str, Any] | None:
        """The answer of one instance, or None where there is no good one in time."""
        fetch = self._means.workers.fetch(instance.target.url + path, body=body)
        try:
            reply = await self._means.clock.within(ANSWER_S, fetch)
            return reply.json_object() if reply.status == 200 else None
        except (LongcatError, TimeoutError):
            return None


def _link_to(instance: Instance) -> str:
    if instance.is_in:
        return "up"
    return "mismatch" if instance.out_reason == "mismatch" else "down"


def _count(values: Mapping[str, Any], key: str) -> int:
    value = values.get(key)
    return value if isinstance(value, int) else 0


class _ProbeClient:
    """A client of the probe: keeps the status, drops the answer."""

    def __init__(self) -> None:
        self.is_started = False
        self.status = 0

    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.is_started, self.status = True, status

    async def send(self, data: bytes) -> None:
        pass

    async def finish(self, data: bytes = b"") -> None:
        pass


class Probe:
    """The end-to-end proof: one small greedy request through both pools, shared by all who ask at the same time."""

    def __init__(self, means: Means, proxy: Proxy) -> None:
        self._means = means
        self._proxy = proxy
        self._running: asyncio.Task[dict[str, Any]] | None = None

    async def prove(self) -> dict[str, Any]:
        """What ``/health_generate`` answers with 200. Raises WorkerUnavailable with the hop that failed."""
        proof, now = self._proxy.proof, self._means.clock.now()
        if proof is not None and now - proof.at <= PROBE_FRESH_S:
            return {"status": "ok", "by": "traffic", "ms": round((now - proof.at) * 1000), "pair": list(proof.pair)}
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
            self._running.add_done_callback(_retrieve)
        return await asyncio.shield(self._running)  # who leaves early does not take the probe from the others

    async def close(self) -> None:
        """End a probe that runs."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self) -> dict[str, Any]:
        clock, client = self._means.clock, _ProbeClient()
        started = clock.now()
        call = Call(
            route=COMPLETIONS_ROUTE,
            body=json.dumps(_PROBE).encode(),
            request_id=f"probe-{secrets.token_hex(8)}",
            deadline=started + PROBE_TIMEOUT_S,
            is_stream=False,
        )
        progress = await self._proxy.serve(call, client, gone=asyncio.Event().wait(), cuts=[], counts=False)
        if client.status != 200 or progress.pair is None:
            raise WorkerUnavailable(f"the probe failed at {_hop(progress)}")
        return {
            "status": "ok",
            "by": "probe",
            "ms": round((clock.now() - started) * 1000),
            "pair": list(progress.pair.names),
        }


def _retrieve(task: asyncio.Task[dict[str, Any]]) -> None:
    """Everybody may have left before the probe failed."""
    if not task.cancelled():
        task.exception()


def _hop(progress: Progress) -> str:
    """Which instance the probe got stuck at, and with what."""
    code = progress.failure.code if progress.failure is not None else "no answer"
    if progress.pair is None:
        return f"the choice of a pair: {code}"
    stuck = progress.pair.prefill if progress.prefilled is None else progress.pair.decode
    return f"{progress.failed_at or stuck.name}: {code}"
