"""A standalone server in this process, for tests that ask many small things: the real face over a real engine, no sockets.

Its event loop runs on a thread of its own, so tests ask with plain calls, property tests too. Its model says a phrase.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import httpx
import torch
from safetensors.torch import load_file, save_file

from longcat_pd import log
from longcat_pd.clock import MonotonicClock
from longcat_pd.config import resolve
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.executor import rank_specs
from longcat_pd.engine.inline import InlineExecutor
from longcat_pd.metrics import Metrics
from longcat_pd.server.app import create_app
from longcat_pd.server.gate import Gate
from longcat_pd.server.identity import own_hello
from longcat_pd.server.text import TextProcessor
from longcat_pd.standalone.service import StandaloneService
from longcat_pd.tiny.make import write_tiny

T = TypeVar("T")

SIZES = ("engine.block_size=16", "engine.num_blocks=257", "engine.max_model_len=512", "engine.max_num_seqs=16")
PHRASE_GAIN = 1.5  # of the head over what is said anyway: now and then something else is drawn


def write_phrase(folder: Path, phrase: Sequence[int]) -> None:
    """A checkpoint that mostly says the next id of ``phrase`` behind each of its ids, and counts up behind others.

    No id may occur twice, for the last one decides alone what comes; the last id of the phrase may be an earlier one.
    """
    write_tiny(folder, "2.0+predictable", dtype="float32")
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    embedding = load_file(folder / index["model.embed_tokens.weight"])["model.embed_tokens.weight"]
    path = folder / index["lm_head.weight"]
    tensors = load_file(path)
    head = tensors["lm_head.weight"]
    scale = head[100:].norm(dim=1).mean() / embedding.norm(dim=1).mean()
    extra = torch.zeros_like(head)
    for before, behind in pairwise(phrase):
        extra[behind] += PHRASE_GAIN * scale * embedding[before]
    tensors["lm_head.weight"] = head + extra
    save_file(tensors, path, metadata={"format": "pt"})


@dataclass(frozen=True)
class Asked:
    """A body for a generation route."""

    route: str
    fields: Mapping[str, Any]

    def __hash__(self) -> int:
        return hash(json.dumps([self.route, self.fields], sort_keys=True))

    def having(self, **fields: Any) -> Asked:
        """With other fields; None takes one out."""
        changed = {**self.fields, **fields}
        return Asked(self.route, {name: value for name, value in changed.items() if value is not None})


class InlineServer:
    """Asked from any thread. Every answer has the request id ``r``."""

    def __init__(self, loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient, service: StandaloneService) -> None:
        self._loop = loop
        self._client = client
        self._service = service

    def ask(self, *asked: Asked) -> list[dict[str, Any]]:
        """The whole answers, asked for at once; what is never alike is taken out of them."""
        return [steady(answer.json()) for answer in self.post(*asked)]

    def stream(self, *asked: Asked) -> list[list[dict[str, Any]]]:
        """The chunks of streams that end well."""
        found = []
        for answer in self.post(*(one.having(stream=True) for one in asked)):
            *events, done, rest = answer.text.split("\n\n")
            assert (done, rest) == ("data: [DONE]", "")
            found.append([steady(json.loads(event.removeprefix("data: "))) for event in events])
        return found

    def post(self, *asked: Asked, headers: Mapping[str, str] | None = None) -> list[httpx.Response]:
        """Good answers, whatever they are."""
        answers = self.responses(*asked, headers=headers)
        for one, answer in zip(asked, answers, strict=True):
            assert answer.status_code == 200, f"{one}: {answer.text}"
        return answers

    def responses(self, *asked: Asked, headers: Mapping[str, str] | None = None) -> list[httpx.Response]:
        """Answers of any kind, asked for at once."""

        async def all_of_them() -> list[httpx.Response]:
            named = {"X-Request-Id": "r", **(headers or {})}
            answers = (self._client.post(one.route, json=one.fields, headers=named) for one in asked)
            return await asyncio.gather(*answers)

        return self._run(all_of_them())

    def account(self) -> dict[str, Any]:
        return self._run(self._service.accounting())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(120)


def steady(record: dict[str, Any]) -> dict[str, Any]:
    """Without the time, and without the ids of tool calls."""
    for choice in record["choices"]:
        for call in choice.get("message", choice.get("delta", {})).get("tool_calls") or []:
            call.pop("id", None)
    return {name: value for name, value in record.items() if name != "created"}


@contextlib.contextmanager
def inline_server(model: Path, *overrides: str, app_of: Callable[..., Any] = create_app) -> Iterator[InlineServer]:
    """Ready, until the block is left; then everything has to be back. ``app_of``: as ``create_app``."""
    log.set_up(stream=io.StringIO())  # a line for each request would hide what failed
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="server")
    thread.start()
    spec = resolve.standalone(str(model), [*SIZES, *overrides], host="127.0.0.1", port=30000)
    clock, config = MonotonicClock(), ModelConfig.load(model)
    hello, metrics = own_hello(spec, config), Metrics(role=spec.role, instance=spec.name)
    engine = Engine(
        spec.engine,
        spec.parallel,
        executor=InlineExecutor(rank_specs(spec, hello.incarnation)[0]),
        eos_token_ids=frozenset(config.eos_token_id),
        clock=clock,
        metrics=metrics,
    )
    service = StandaloneService(spec, engine, hello=hello, clock=clock)
    app = app_of(service, TextProcessor.load(model), metrics, gate=Gate(), front=LoadBalancerConfig())
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://inline")

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(60)

    try:
        run(service.start())
        yield InlineServer(loop, client, service)
        account = run(service.accounting())
        assert account["idle"], account
    finally:
        run(service.close())
        run(client.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
