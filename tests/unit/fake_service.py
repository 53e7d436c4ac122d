"""A scripted instance for tests of the face: it "generates" the ids it is told to, as an engine would end them."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from longcat_pd import log
from longcat_pd.config.schema import EngineConfig, LoadBalancerConfig, ModelSection
from longcat_pd.engine.request import Delta, FinishReason, Request, SamplingParams, TokenOutput, TransferRef
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.metrics import Metrics
from longcat_pd.server.about_routes import Routes
from longcat_pd.server.app import create_app
from longcat_pd.server.gate import Gate
from longcat_pd.server.service import Kept, Readiness, Recorder
from longcat_pd.server.text import TextProcessor
from longcat_pd.tiny.configs import make_config
from longcat_pd.tiny.tokenizer import text_files
from tests.unit.control_rig import hello

EOS = 2
VOCAB = 1024
MAX_MODEL_LEN = 512
TRANSFER = "0123456789abcdef" * 2
LEG = {
    "X-Longcat-Transfer-Id": TRANSFER,
    "X-Longcat-Peer": "p0",
    "X-Longcat-Deadline-Ms": "60000",
    "X-Longcat-Attempt": "1",
}


@cache
def _files(variant: str) -> dict[str, str]:
    return text_files(variant, vocab_size=VOCAB, max_length=4096)


def write_folder(path: Path, variant: str = "2.0", *, has_tokenizer: bool = True, **generation: Any) -> str:
    """What the face reads of a checkpoint."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(make_config(variant, (), dtype="float32")))
    if generation:
        (path / "generation_config.json").write_text(json.dumps(generation))
    if has_tokenizer:
        for name, text in _files(variant).items():
            (path / name).write_text(text)
    return str(path)


@cache
def _text(folder: str) -> TextProcessor:
    return TextProcessor.load(folder)


Script = Callable[[Request], AsyncGenerator[Delta, None]]


def plays(ids: Sequence[int], *, group: int = 1) -> Script:
    """A script that generates these ids, ``group`` at a time; at their end, or at max_tokens, the answer is over."""

    async def script(request: Request) -> AsyncGenerator[Delta, None]:
        for delta in deltas_of(ids, request.sampling, group=group):
            await asyncio.sleep(0)
            yield delta

    return script


def deltas_of(ids: Sequence[int], sampling: SamplingParams, *, group: int = 1) -> list[Delta]:
    """What an engine that generates these ids would hand out; ids that end without a stop are cut by length."""
    taken: list[TokenOutput] = []
    finish, matched = FinishReason.LENGTH, None
    for token_id in ids[: sampling.max_tokens]:
        taken.append(_output(token_id, sampling.num_logprobs))
        if token_id in sampling.stop_token_ids:
            finish, matched = FinishReason.STOP, token_id
            break
        if token_id == EOS and not sampling.ignore_eos:
            finish = FinishReason.STOP
            break
    parts = [tuple(taken[i : i + group]) for i in range(0, len(taken), group)]
    last = Delta(parts[-1], finish, matched)
    return [*(Delta(part) for part in parts[:-1]), last]


def _output(token_id: int, num_logprobs: int | None) -> TokenOutput:
    if num_logprobs is None:
        return TokenOutput(token_id)
    best = tuple(((token_id + i) % VOCAB, -0.5 - i) for i in range(num_logprobs))
    return TokenOutput(token_id, -0.5, best)


class FakeService:
    """As ``Service``. What it was asked is in ``requests``; ``num_running`` counts generators that are open."""

    def __init__(self, folder: str, script: Script, *, role: str = "standalone", **model: Any) -> None:
        self.num_flushes = 0
        self.name = {"standalone": "s0", "prefill": "p0", "decode": "d0"}[role]
        self.role: Any = role
        self.model = ModelSection(path=folder, served_name="tiny", **model)
        self.engine_config = EngineConfig(max_model_len=MAX_MODEL_LEN)
        self.script = script
        self.requests: list[Request] = []
        self.adopted: list[TransferRef] = []
        self.num_running = 0
        self.state = Readiness(busy=False, incarnation="9f2c", config_digest="51d0", ranks_total=1, ranks_ok=1)
        self.offered_prompt: tuple[int, ...] = (5, 6, 7)
        self.offered_max_tokens = 16
        self.time: float | None = None

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.num_running += 1
        request.on_room()
        try:
            async for delta in self.script(request):
                yield delta
        finally:
            self.num_running -= 1

    async def adopt(
        self, transfer: TransferRef, deadline: float, sampling: SamplingParams, *, is_patient: bool = False
    ) -> Request:
        self.adopted.append(transfer)
        await asyncio.sleep(0)
        return Request(
            request_id="from-offer",
            prompt_token_ids=self.offered_prompt,
            sampling=replace(sampling, max_tokens=self.offered_max_tokens, seed=77),
            deadline=deadline,
            transfer=transfer,
        )

    def readiness(self) -> Readiness:
        return self.state

    async def accounting(self) -> dict[str, Any]:
        driver = {"requests_waiting": 0, "requests_running": 0, "transfers": 0, "request_sockets": 0}
        return {"role": self.role, "instance": self.name, "idle": True, "outstanding": 0, "mismatch": [], "driver": driver}

    def flush_cache(self) -> None:
        self.num_flushes += 1

    def info(self) -> dict[str, Any]:
        return {"parallel": {"pp_size": 1}, "internal_states": [{"avg_spec_accept_length": None}]}

    def glance(self) -> dict[str, Any]:
        return {"waiting": 0, "running": 0, "ranks": []}

    def computed_by(self, peer: str | None) -> tuple[Hello, ...]:
        return tuple(hello(name, self.role) for name in (peer, self.name) if name is not None)

    def now(self) -> float:
        return asyncio.get_running_loop().time() if self.time is None else self.time


def make_app(
    service: FakeService,
    *,
    gate: Gate | None = None,
    metrics: Metrics | None = None,
    faults: Routes | None = None,
    recorder: Recorder | None = None,
    **front: Any,
) -> FastAPI:
    """The face of a fake instance. The log is kept off the terminal, whose traces are slow to draw."""
    log.set_up(stream=io.StringIO())
    settings = LoadBalancerConfig(**front)
    return create_app(
        service,
        _text(service.model.path),
        metrics or Metrics(role=service.role, instance=service.name),
        gate=gate or Gate(settings.max_inflight),
        front=settings,
        faults=faults,
        kept=Kept(recorder=recorder),
    )


def events_of(body: bytes) -> list[Any]:
    """The events of a stream, strictly: each a data line and an empty line, ``[DONE]`` as a string."""
    *events, rest = body.split(b"\n\n")
    assert rest == b"", "the stream ends with an empty line"
    read = []
    for event in events:
        assert event.startswith(b"data: ") and b"\n" not in event, event
        data = event[len(b"data: ") :]
        read.append("[DONE]" if data == b"[DONE]" else json.loads(data))
    return read


def folded(events: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """The chunks of a chat or completions stream joined field by field, as a client would."""
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        for part in [] if event == "[DONE]" else event["choices"]:
            choice = choices.setdefault(part["index"], {"content": "", "reasoning_content": "", "tool_calls": []})
            delta = part.get("delta", {"content": part.get("text")})
            for name in ("content", "reasoning_content"):
                choice[name] += delta.get(name) or ""
            for call in delta.get("tool_calls", []):
                if "id" in call:
                    assert call["index"] == len(choice["tool_calls"])
                    choice["tool_calls"].append({"name": call["function"]["name"], "arguments": ""})
                choice["tool_calls"][call["index"]]["arguments"] += call["function"]["arguments"]
            if part["finish_reason"] is not None:
                assert "finish_reason" not in choice, "a choice ends once"
                choice |= {"finish_reason": part["finish_reason"], "matched_stop": part["matched_stop"]}
    return choices
