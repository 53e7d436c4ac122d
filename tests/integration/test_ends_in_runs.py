"""An answer ends where it ends, also in the middle of what a step accepted: EOS, stop tokens, stop strings, max_tokens.

The checkpoint is predictable and drafts with its own layer. Every seventh id is EOS, and ids mostly count up by one, so the
last id of a prompt says how far the first EOS is. Asked of the engine, where it can be seen in which place of a run an
answer ended, and of a server, where nothing may differ from the answers without drafts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.clock import MonotonicClock
from longcat_pd.config import resolve
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.executor import rank_specs
from longcat_pd.engine.inline import InlineExecutor
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.request import Delta, FinishReason, Request, SamplingParams
from longcat_pd.metrics import Metrics
from longcat_pd.server.identity import own_hello
from longcat_pd.standalone.service import StandaloneService
from longcat_pd.tiny.make import write_tiny
from tests.topology import standalone

EOS = tuple(range(105, 1000, 7))
LONG = 14
PROMPTS = [(40 + n, 60 + 3 * n, 300 + n) for n in range(10)]
DRAFTS = [3, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ends") / "m"
    write_tiny(path, "2.0+predictable", dtype="float32", overrides=(f"eos_token_id={[*EOS]}",))
    return path


# -- the engine


class Noting(InlineExecutor):
    """Notes the tokens of every decode window."""

    def __init__(self, spec: InstanceSpec, incarnation: str) -> None:
        super().__init__(rank_specs(spec, incarnation)[0])
        self.runs: list[tuple[int, ...]] = []

    def _execute(self, plan: StepPlan) -> tuple[StepOutput, ...]:
        outputs = super()._execute(plan)
        if plan.phase == "decode":
            self.runs += [slot.token_ids for output in outputs for slot in output.slots]
        return outputs


class Desk:
    """One engine in this process, which answers one after the other."""

    def __init__(self, path: Path, num_drafts: int) -> None:
        sizes = ["engine.block_size=16", "engine.num_blocks=65", "engine.max_model_len=256", "engine.max_num_seqs=4"]
        settings = [*sizes, "engine.max_num_batched_tokens=64", f"engine.num_draft_tokens={num_drafts}"]
        spec = resolve.standalone(str(path), settings, host="127.0.0.1", port=30000)
        clock, config = MonotonicClock(), ModelConfig.load(path)
        hello = own_hello(spec, config)
        self.executor = Noting(spec, hello.incarnation)
        engine = Engine(
            spec.engine,
            spec.parallel,
            executor=self.executor,
            eos_token_ids=frozenset(config.eos_token_id),
            clock=clock,
            metrics=Metrics(role=spec.role, instance=spec.name),
        )
        self.service = StandaloneService(spec, engine, hello=hello, clock=clock)

    async def answers(self, asked: list[tuple[tuple[int, ...], SamplingParams]]) -> list[tuple[list[Delta], list[int]]]:
        """Deltas, and how many tokens each window brought."""
        await self.service.start()
        found = []
        for number, (prompt, sampling) in enumerate(asked):
            self.executor.runs.clear()
            deadline = self.service.now() + 60.0
            request = Request(request_id=str(number), prompt_token_ids=prompt, sampling=sampling, deadline=deadline)
            deltas = [delta async for delta in self.service.generate(request)]
            account = await self.service.accounting()  # behind whatever is in flight
            assert account["idle"], account
            found.append((deltas, [len(run) for run in self.executor.runs]))
        await self.service.close()
        return found


def ids_of(deltas: list[Delta]) -> list[int]:
    return [token.token_id for delta in deltas for token in delta.tokens]


def logprobs_of(deltas: list[Delta]) -> list[float | None]:
    return [token.logprob for delta in deltas for token in delta.tokens]


def end_of(deltas: list[Delta]) -> tuple[FinishReason | None, int | None]:
    assert all(delta.finish is None for delta in deltas[:-1])
    return deltas[-1].finish, deltas[-1].matched_stop_token


def places(deltas: list[Delta], runs: list[int]) -> Iterator[tuple[int, int]]:
    """(which token of its run the answer ended with, how long the run was)."""
    left = len(ids_of(deltas)) - 1
    for run in runs:
        if 0 < left <= run:
            yield left, run
        left -= run


def with_ends(prompt: tuple[int, ...], plain: list[int]) -> list[tuple[tuple[int, ...], SamplingParams]]:
    """Greedy and drawn requests that end at many places of the same text, in each way."""
    rule = SamplingParams(temperature=0.0, max_tokens=LONG, num_logprobs=0, ignore_eos=True)
    some = [replace(rule, max_tokens=1 + (place % LONG)) for place in range(sum(prompt) % 3, LONG, 3)]
    some += [replace(rule, stop_token_ids=(plain[place],)) for place in range(sum(prompt) % 2, LONG, 2)]
    drawn = replace(rule, temperature=0.5, seed=prompt[0])
    some += [replace(rule, ignore_eos=False), replace(drawn, ignore_eos=False), replace(drawn, stop_token_ids=EOS)]
    return [(prompt, sampling) for sampling in some]


@pytest.mark.parametrize("num_drafts", DRAFTS)
async def test_the_engine_ends_inside_a_run(model: Path, num_drafts: int) -> None:
    rule = SamplingParams(temperature=0.0, max_tokens=LONG, ignore_eos=True)
    prompts = PROMPTS[: 10 if num_drafts < 3 else 5]  # as few as end in every place of a run
    plain = await Desk(model, 0).answers([(prompt, rule) for prompt in prompts])
    asked = [one for prompt, (deltas, _) in zip(prompts, plain, strict=True) for one in with_ends(prompt, ids_of(deltas))]
    expected = await Desk(model, 0).answers(asked)
    found = await Desk(model, num_drafts).answers(asked)
    seen: dict[str, set[tuple[int, int]]] = {"length": set(), "stop": set(), "eos": set()}
    for (_, sampling), (mine, runs), (theirs, _) in zip(asked, found, expected, strict=True):
        assert ids_of(mine) == ids_of(theirs) and end_of(mine) == end_of(theirs)
        assert logprobs_of(mine) == pytest.approx(logprobs_of(theirs), abs=1e-5)
        reason, stop = end_of(mine)
        kind = "length" if reason is FinishReason.LENGTH else "eos" if stop is None else "stop"
        assert kind == "eos" or sampling.ignore_eos or len(ids_of(mine)) == LONG
        seen[kind].update(places(mine, runs))
    inside = {*range(1, num_drafts + 1)}
    for kind, ends in seen.items():
        assert {place for place, run in ends if run > place} == inside, f"{kind} ended with more accepted behind it"


# -- a server


def bodies() -> list[dict[str, Any]]:
    """Ways to end, with the plain text still to be known."""
    found: list[dict[str, Any]] = []
    for number, prompt in enumerate(PROMPTS):
        plain = {"prompt": [*prompt], "max_tokens": LONG}
        found.append({**plain, "ignore_eos": False, "logprobs": 2})
        found.append({**plain, "ignore_eos": False, "temperature": 0.5, "seed": number})
        found.append({**plain, "max_tokens": 1 + number, "logprobs": 0})
        found.append({**plain, "max_tokens": 2 + number, "temperature": 0.5, "seed": number, "logprobs": 1})
    return found


def stopped(number: int, prompt: tuple[int, ...], plain: dict[str, Any]) -> list[dict[str, Any]]:
    """By tokens and strings of what would be said."""
    ids, text = plain["token_ids"], plain["text"]
    asked = {"prompt": [*prompt], "max_tokens": LONG, "logprobs": 1}
    found = [{**asked, "stop_token_ids": [ids[place]]} for place in range(number % 2, LONG, 2)]
    found += [{**asked, "stop": [text[place : place + 2]]} for place in range(1 + number % 3, len(text) - 2, 4)]
    found.append({**asked, "stop": [text[5:8]], "stop_token_ids": [ids[number % LONG]], "max_tokens": 3 + number})
    return found


async def all_of(model: Path, num_drafts: int, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Eight at a time; afterwards everything is back."""
    free = asyncio.Semaphore(8)
    async with standalone(model, f"engine.num_draft_tokens={num_drafts}") as topology:

        async def one(body: dict[str, Any]) -> dict[str, Any]:
            async with free:
                return await topology.complete(**body)

        found = list(await asyncio.gather(*map(one, asked)))
        await topology.idle_within()
    return found


def without_logprobs(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name != "logprobs"}


_plain: dict[Path, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {}


async def without_drafts(model: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The bodies, and what is answered to them."""
    if model not in _plain:
        whole = [{"prompt": [*prompt], "max_tokens": LONG} for prompt in PROMPTS]
        plain = await all_of(model, 0, whole)
        asked = bodies()
        for number, (prompt, answer) in enumerate(zip(PROMPTS, plain, strict=True)):
            asked += stopped(number, prompt, answer)
        _plain[model] = asked, await all_of(model, 0, asked)
    return _plain[model]


@pytest.mark.parametrize("num_drafts", DRAFTS)
async def test_a_server_ends_alike_with_drafts_and_without(model: Path, num_drafts: int) -> None:
    asked, expected = await without_drafts(model)
    reasons = [answer["finish_reason"] for answer in expected]
    assert reasons.count("stop") > 60 and reasons.count("length") > 10
    found = await all_of(model, num_drafts, asked)
    for body, one, other in zip(asked, found, expected, strict=True):
        assert without_logprobs(one) == without_logprobs(other), body
        if other["logprobs"] is None:
            assert one["logprobs"] is None
            continue
        for name in ("tokens", "text_offset"):
            assert one["logprobs"].get(name) == other["logprobs"].get(name), body
        wanted = pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-5)
        assert one["logprobs"]["token_logprobs"] == wanted, body
