"""A whole topology for tests: real HTTP, control sockets and rank processes; the drivers share the test's event loop.

The forkserver of the ranks is shared by all topologies of a test run, so one comes up in a second or two.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvicorn
import yaml

from longcat_pd.clock import MonotonicClock
from longcat_pd.config import resolve
from longcat_pd.config.schema import ClusterConfig, LoadBalancerConfig
from longcat_pd.decode_worker import __main__ as decode_main
from longcat_pd.errors import WorkerUnavailable
from longcat_pd.load_balancer import app as balancer_app
from longcat_pd.load_balancer import assemble
from longcat_pd.load_balancer.pool import Pool
from longcat_pd.prefill_worker import __main__ as prefill_main
from longcat_pd.server.app import worker_front
from longcat_pd.server.faced import faced
from longcat_pd.server.gate import Gate
from longcat_pd.server.http_heads import BoundedHeads
from longcat_pd.server.parts import Parts, make_parts
from longcat_pd.server.peered import PeeredInstance
from longcat_pd.server.run import listen
from longcat_pd.standalone.service import StandaloneService
from tests.forks import start_server
from tests.ports import free_base

BLOCK, CHUNK = 16, 64
STATED_IDLE_S = 2.0  # accounts are back so long after the last request ended, on a machine that does nothing else
IDLE_S = 8.0
UP_S = 30.0

Build = Callable[[Parts], tuple[Any, Any]]
ROLES: dict[str, tuple[str, Build]] = {
    "prefill": ("longcat_pd.prefill_worker.rank:main", prefill_main.build),
    "decode": ("longcat_pd.decode_worker.rank:main", decode_main.build),
}


@dataclass(frozen=True)
class Topology:
    """What a test talks to. ``parts`` by instance name, for a look behind the face."""

    url: str
    client: httpx.AsyncClient
    parts: dict[str, Parts]

    async def complete(self, prompt: list[int], **fields: Any) -> dict[str, Any]:
        """A completion with ids in and out; the choice, plus ``usage``."""
        body = {"prompt": prompt, "temperature": 0, "max_tokens": 6, "return_token_ids": True, "ignore_eos": True, **fields}
        answer = await self.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        return {**answer.json()["choices"][0], "usage": answer.json()["usage"]}

    async def account(self) -> dict[str, Any]:
        return dict((await self.client.get("/debug/accounting")).json())

    async def idle_within(self, seconds: float = IDLE_S) -> dict[str, Any]:
        """The accounts, as soon as they are idle with every block back; fails with them when the time is over."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        while True:
            account = await self.account()
            took = loop.time() - began
            if account["idle"] and all(map(_is_all_free, _workers(account))):
                if took > STATED_IDLE_S:
                    print(f"idle after {took:.1f} s")
                return account
            assert took < seconds, account
            await asyncio.sleep(0.02)


def _workers(account: dict[str, Any]) -> list[dict[str, Any]]:
    return list(account["instances"].values()) if "instances" in account else [account]


def _is_all_free(worker: dict[str, Any]) -> bool:
    return all(r["blocks"]["free"] + r["blocks"]["cached"] == r["blocks"]["total"] for r in worker["ranks"])


def cluster_file(folder: Path, checkpoint: Path, **sections: Any) -> Path:
    """A cluster YAML with free ports. ``prefill`` and ``decode`` are ``parallel`` sections; others go in as they are.

    ``num_prefill`` and ``num_decode`` instances, at most ten of each; ``prefill_nodes`` and ``decode_nodes`` of each.
    """
    base = free_base(400)
    counts = {"p": sections.pop("num_prefill", 1), "d": sections.pop("num_decode", 1)}
    nodes = {"p": sections.pop("prefill_nodes", ["127.0.0.1"]), "d": sections.pop("decode_nodes", ["127.0.0.1"])}
    engine = {"block_size": BLOCK, "max_num_seqs": 16, "num_blocks": 129, "max_model_len": 512}
    tree: dict[str, Any] = {
        "model": {"path": str(checkpoint)},
        "load_balancer": {"port": base, **sections.pop("load_balancer_settings", {})},
        "prefill": {
            "parallel": sections.pop("prefill", {}),
            "engine": {**engine, "max_num_batched_tokens": CHUNK, **sections.pop("prefill_engine", {})},
            "instances": [
                {"name": f"p{i}", "http_port": base + 100 + 10 * i, "nodes": nodes["p"]} for i in range(counts["p"])
            ],
        },
        "decode": {
            "parallel": sections.pop("decode", {}),
            "engine": {**engine, **sections.pop("decode_engine", {})},
            "instances": [
                {"name": f"d{i}", "http_port": base + 200 + 10 * i, "nodes": nodes["d"]} for i in range(counts["d"])
            ],
        },
        **sections,
    }
    path = folder / f"cluster-{base}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


@contextlib.asynccontextmanager
async def pools(config: ClusterConfig, *, entries: Mapping[str, str] | None = None) -> AsyncIterator[Topology]:
    """All instances of a cluster and its balancer, ready. ``entries``: other entries of the rank processes, by role."""
    start_server()
    async with contextlib.AsyncExitStack() as stack:
        parts = {}
        starting = []
        for role, pool in (("prefill", config.prefill), ("decode", config.decode)):
            assert pool is not None
            for place in pool.instances:
                entry, build = ROLES[role]
                entry = (entries or {}).get(role, entry)
                mine = make_parts(resolve.instance_spec(config, place.name), entry, MonotonicClock())
                service, control = build(mine)
                instance = PeeredInstance(mine.engine, control, mine.clock)
                gate = Gate(4096)
                front = worker_front(config.load_balancer, config.cluster_key_file)
                app = await stack.enter_async_context(faced(service, mine, gate=gate, front=front))
                await stack.enter_async_context(_serving(app, place.host, place.http_port, gate))
                stack.push_async_callback(instance.close)
                starting.append(instance.start())
                parts[place.name] = mine
        await asyncio.gather(*starting)
        face = assemble.build(config)
        watching = asyncio.ensure_future(face.means.pool.watch())
        stack.push_async_callback(_cancelled, watching)
        stack.push_async_callback(face.means.workers.close)
        if face.means.tracer is not None:
            stack.push_async_callback(face.means.tracer.close)
        address = config.load_balancer
        await stack.enter_async_context(_serving(balancer_app.create_app(face), address.host, address.port, face.gate))
        await _all_linked(face.means.pool)
        yield Topology(*await _client(stack, address.host, address.port), parts)


@contextlib.asynccontextmanager
async def another_balancer(config: ClusterConfig, urls: Mapping[str, str], **settings: Any) -> AsyncIterator[Topology]:
    """One more balancer over instances that run. ``urls``: where it finds some of them, in place of their own address."""
    own = replace(config.load_balancer, port=free_base(10), **settings)
    face = assemble.build(replace(config, load_balancer=own))
    for name, url in urls.items():
        instance = face.means.pool.instances[name]
        instance.target = replace(instance.target, url=url)
    async with contextlib.AsyncExitStack() as stack:
        watching = asyncio.ensure_future(face.means.pool.watch())
        stack.push_async_callback(_cancelled, watching)
        stack.push_async_callback(face.means.workers.close)
        await stack.enter_async_context(_serving(balancer_app.create_app(face), own.host, own.port, face.gate))
        await _all_linked(face.means.pool)
        yield Topology(*await _client(stack, own.host, own.port), {})


@contextlib.asynccontextmanager
async def standalone(model: Path, *overrides: str, front: LoadBalancerConfig | None = None) -> AsyncIterator[Topology]:
    """One engine with one rank process behind its own face. ``front``: its limits and keys."""
    start_server()
    port = free_base(20)
    sizes = [
        f"engine.block_size={BLOCK}",
        f"engine.max_num_batched_tokens={CHUNK}",
        "engine.num_blocks=257",
        "engine.max_model_len=512",
    ]
    spec = resolve.standalone(str(model), [*sizes, *overrides], host="127.0.0.1", port=port)
    parts = make_parts(spec, "longcat_pd.engine.rank:main", MonotonicClock())
    service = StandaloneService(spec, parts.engine, hello=parts.hello, clock=parts.clock)
    gate = Gate(4096)
    async with contextlib.AsyncExitStack() as stack:
        app = await stack.enter_async_context(faced(service, parts, gate=gate, front=front or LoadBalancerConfig()))
        await stack.enter_async_context(_serving(app, "127.0.0.1", port, gate))
        stack.push_async_callback(service.close)
        await service.start()
        yield Topology(*await _client(stack, "127.0.0.1", port), {"standalone": parts})


async def _all_linked(pool: Pool) -> None:
    """Wait until the balancer has heard of every instance that it is ready, and that it has its links."""
    async with asyncio.timeout(UP_S):
        await pool.has_been_ready.wait()
        while not all(one.is_in and set(one.said["peers"].values()) == {"up"} for one in pool.instances.values()):
            await pool.news()


async def _client(stack: contextlib.AsyncExitStack, host: str, port: int) -> tuple[str, httpx.AsyncClient]:
    url = f"http://{host}:{port}"
    return url, await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False))


async def _cancelled(task: asyncio.Future[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.asynccontextmanager
async def _serving(app: Any, host: str, port: int, gate: Gate) -> AsyncIterator[None]:
    config = uvicorn.Config(app, http=BoundedHeads, ws="none", log_config=None, lifespan="off", timeout_graceful_shutdown=2)
    server = _Server(config)
    with listen(host, port) as listener:
        task = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield
        finally:
            gate.drain()
            gate.cut(WorkerUnavailable("the test ends", code="draining"))
            server.should_exit = True
            await task
