"""A cluster whose faults are set over HTTP, with a client that sees what they do."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longcat_pd.config import resolve
from tests.parity.conftest import MakeCheckpoint
from tests.topology import CHUNK, Topology, cluster_file, pools

PROMPT = list(range(100, 100 + CHUNK + 20))


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Callable[[], Awaitable[bool]], seconds: float, what: str) -> None:
    """Wait until it says yes."""
    end = now() + seconds
    while not await condition():
        assert now() < end, what
        await asyncio.sleep(0.05)


@dataclass(frozen=True)
class Switched(Topology):
    """``retries``: of the balancer."""

    retries: int = 0

    async def set_fault(self, instance: str, name: str, **parameters: Any) -> None:
        fault = {"name": name, **parameters}
        answer = await self.client.post("/admin/fault", json={"instance": instance, **fault})
        assert answer.status_code == 200, answer.text
        assert fault in answer.json()["faults"]

    async def clear(self, instance: str, name: str = "all") -> None:
        answer = await self.client.post("/admin/fault", json={"instance": instance, "clear": name})
        assert answer.status_code == 200, answer.text

    async def outcome(self, limit_s: float | None = None, **fields: Any) -> tuple[int, str]:
        """Status, and the ids or the code of the error."""
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6, "ignore_eos": True, "return_token_ids": True, **fields}
        headers = {"X-Request-Timeout": str(limit_s)} if limit_s is not None else {}
        answer = await self.client.post("/v1/completions", json=body, headers=headers)
        if answer.status_code == 200:
            return 200, str(answer.json()["choices"][0]["token_ids"])
        return answer.status_code, str(answer.json()["error"]["code"])

    async def metric(self, beginning: str) -> float:
        """The sum of the balancer's series whose names begin so, after ``longcat_pd_``; 0 without one."""
        lines = (await self.client.get("/metrics")).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"longcat_pd_{beginning}"))

    async def incarnations(self) -> list[str]:
        return [worker["incarnation"] for worker in (await self.account())["instances"].values()]

    async def answer_of(self, instance: str, route: str) -> dict[str, Any]:
        """What one instance says of itself, past the balancer."""
        spec = self.parts[instance].spec
        return dict((await self.client.get(f"http://{spec.host}:{spec.http_port}{route}")).json())


@contextlib.asynccontextmanager
async def switched(tiny: MakeCheckpoint, folder: Path, **sections: Any) -> AsyncIterator[Switched]:
    """Without prefixes, so that every request sends its cache; without retries unless told."""
    settings = {"retry": 0, **sections.pop("load_balancer_settings", {})}
    for role in ("prefill", "decode"):
        sections[f"{role}_engine"] = {"prefix_cache": False, **sections.get(f"{role}_engine", {})}
    path = cluster_file(folder, tiny("2.0"), faults=True, load_balancer_settings=settings, **sections)
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        yield Switched(topology.url, topology.client, topology.parts, settings["retry"])
