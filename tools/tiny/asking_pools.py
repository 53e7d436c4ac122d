"""Cases asked of P(2,2) -> D(2) with drafts: the shipped local-cpu.yaml as ``run_pd.sh`` starts it, on ports that are free.

Balancer, drivers and ranks are processes of this machine; clients are HTTP requests. Knows no skill and no floor.
"""

from __future__ import annotations

import asyncio
import random
import socket
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx

from longcat_pd.bench.servers import BenchFailed, cluster
from tools.tiny.asking import AT_ONCE, Body, Progress, Told, drafted, reply_of

CONFIG = Path(__file__).parents[2] / "deploy/config/cluster/local-cpu.yaml"
LAYOUT = ("prefill.parallel={pp_size: 2, cp_size: 2}", "decode.parallel={kvp_size: 2, attn_tp_size: 2}")
ANSWER_LIMIT_S = 300.0
_SPAN = 10  # ports of one instance
_BASES = range(20000, 32000, _SPAN)  # below the range that outgoing connections take theirs from


async def ask_pools(
    model: Path, bodies: Sequence[Body], *, num_drafts: int, progress: Progress, settings: Sequence[str] = ()
) -> Told:
    """All replies. ``model``: an absolute path. Raises BenchFailed when the cluster does not start."""
    balancer, prefill, decode = _free_bases(3)
    all_settings = [
        *LAYOUT,
        f"model.path={model}",
        f"load_balancer.port={balancer}",
        f"prefill.instances=[{{name: p0, http_port: {prefill}}}]",
        f"decode.instances=[{{name: d0, http_port: {decode}}}]",
        *(f"{pool}.engine.num_draft_tokens={num_drafts}" for pool in ("prefill", "decode")),
        "prefill.engine.prefix_cache=false",
        *settings,
    ]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="longcat-card-")))
        served = stack.enter_context(cluster(CONFIG, root=root, settings=all_settings))
        async with httpx.AsyncClient(timeout=ANSWER_LIMIT_S, trust_env=False) as client:
            answers = await _answers(client, f"{served.url}/v1/chat/completions", bodies, progress=progress)
            counted = (await client.get(f"http://127.0.0.1:{decode}/metrics")).text
    return Told(replies=tuple(map(reply_of, answers)), drafted=drafted(counted, num_drafts))


async def _answers(
    client: httpx.AsyncClient, url: str, bodies: Sequence[Body], *, progress: Progress
) -> list[dict[str, Any]]:
    free, count = asyncio.Semaphore(AT_ONCE), 0

    async def one(body: Body) -> dict[str, Any]:
        nonlocal count
        async with free:
            answer: dict[str, Any] = (await client.post(url, json=dict(body))).json()
        count += 1
        progress(count)
        return answer

    return await asyncio.gather(*(one(body) for body in bodies))


def _free_bases(count: int) -> list[int]:
    """So many spans of ports that nobody listens on now."""
    found = list[int]()
    for base in random.sample(_BASES, 200):
        if all(_is_free(port) for port in range(base, base + _SPAN)):
            found.append(base)
        if len(found) == count:
            return found
    raise BenchFailed(f"no {count} free spans of {_SPAN} ports in {_BASES.start} ... {_BASES.stop}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
