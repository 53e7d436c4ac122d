"""Prompts that begin alike, through the face: the same tokens with and without the cache of prefixes, true counts of what
was not computed, fewer bytes on the lanes, and nothing left behind however a request ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config import resolve
from longcat_pd.quantize import quantize
from tests.parity.conftest import MakeCheckpoint
from tests.topology import BLOCK, CHUNK, Topology, cluster_file, pools, standalone

Answers = list[dict[str, Any]]
NUM_NEW = 20


def rounds() -> list[list[list[int]]]:
    """Prompts, asked round by round: each round shares prefixes with those before, of lengths around block borders."""
    draw = random.Random(3)
    stem = [draw.randrange(20, 1000) for _ in range(150)]
    lengths = (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 1, CHUNK - 1, CHUNK, CHUNK + 1, 100, 150)
    first = [stem[:n] for n in (2 * BLOCK, CHUNK + 1)]
    same = [stem[:n] for n in lengths]
    forks = [[*stem[:n], 7, *stem[n + 1 : n + 20]] for n in lengths]
    return [first, same, forks, [*same, *forks]]


async def ask(topology: Topology, prompts: list[list[int]], **fields: Any) -> Answers:
    async def one(number: int, prompt: list[int]) -> dict[str, Any]:
        await asyncio.sleep(0.01 * number)
        return await topology.complete(prompt, max_tokens=NUM_NEW, logprobs=1, **fields)

    return list(await asyncio.gather(*(one(n, p) for n, p in enumerate(prompts))))


async def converse(topology: Topology) -> list[Answers]:
    """Greedy, seeded, and a second turn behind each answer."""
    said = []
    for prompts in rounds():
        answers = await ask(topology, prompts)
        said += [answers, await ask(topology, prompts[-4:], temperature=0.8, seed=5)]
        said.append(await ask(topology, [[*p, *a["token_ids"], 9, 8] for p, a in zip(prompts, answers, strict=True)]))
    return said


def assert_same(found: list[Answers], expected: list[Answers]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one["token_ids"] == other["token_ids"]
            assert one["logprobs"]["token_logprobs"] == pytest.approx(other["logprobs"]["token_logprobs"], abs=1e-4)


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def total(topology: Topology, name: str, metric: str) -> float:
    lines = topology.parts[name].metrics.render().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"longcat_pd_{metric}{{"))


@contextlib.asynccontextmanager
async def pair(model: Path, folder: Path, num_drafts: int = 0, **sections: Any) -> AsyncIterator[Topology]:
    engine = {"num_draft_tokens": num_drafts, **sections.pop("engine", {})}
    path = cluster_file(
        folder,
        model,
        prefill={"pp_size": 2, "cp_size": 2},
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_engine={**engine, **sections.pop("prefill_engine", {})},
        decode_engine={**engine, **sections.pop("decode_engine", {})},
        transfer={"digest": "all"},
        **sections,
    )
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        yield topology


@pytest.mark.parametrize(
    ("num_drafts", "is_int8"),
    [(3, False), pytest.param(0, False, marks=pytest.mark.slow), pytest.param(3, True, marks=pytest.mark.slow)],
)
async def test_nobody_can_tell_that_prefixes_are_shared(
    tiny: MakeCheckpoint, tmp_path: Path, num_drafts: int, is_int8: bool
) -> None:
    model = tiny("2.0+predictable")
    if is_int8:
        quantize(model, tmp_path / "int8")
        model = tmp_path / "int8"
    settings = ("model.dtype=float32", f"engine.num_draft_tokens={num_drafts}")
    async with standalone(model, *settings, "engine.prefix_cache=false") as topology:
        expected = await converse(topology)
        assert all(cached(answer) == 0 for answers in expected for answer in answers)
        assert total(topology, "standalone", "cached_tokens_total") == 0
        await topology.idle_within()
    async with standalone(model, *settings) as topology:
        assert_same(await converse(topology), expected)
        assert total(topology, "standalone", "cached_tokens_total") > 1000
        await topology.idle_within()
    async with pair(model, tmp_path, num_drafts) as topology:
        assert_same(await converse(topology), expected)
        account = await topology.idle_within()
        assert total(topology, "p0", "cached_tokens_total") > 1000
        assert all(rank["blocks"]["cached"] for worker in account["instances"].values() for rank in worker["ranks"])
        await topology.client.post("/flush_cache")
        account = await topology.idle_within()
        assert not any(rank["blocks"]["cached"] for worker in account["instances"].values() for rank in worker["ranks"])


async def test_acceptance_is_the_same_with_what_others_computed(tiny: MakeCheckpoint) -> None:
    """The draft layer's entries of a shared block are those that the sequence would have computed itself."""
    draw, means = random.Random(8), {}
    stem = [draw.randrange(32, 1000) for _ in range(5 * BLOCK)]
    prompts = [[*stem[: n * BLOCK], 40 + n, 50 + n] for n in (1, 2, 3, 4, 5)] + [stem[:n] for n in (BLOCK, 3 * BLOCK)]
    for setting in ("false", "true"):
        settings = ("model.dtype=float32", "engine.num_draft_tokens=3", f"engine.prefix_cache={setting}")
        async with standalone(tiny("2.0+predictable"), *settings) as topology:
            hits = 0
            for prompt in [stem, *prompts]:
                answer = await topology.complete(prompt, max_tokens=NUM_NEW)
                hits += cached(answer)
                again = await topology.complete([*prompt, *answer["token_ids"], 9], max_tokens=NUM_NEW)
                hits += cached(again)
            means[setting] = (topology.parts["standalone"].engine.acceptance.mean(), hits > 0)
    assert means["false"][0] == means["true"][0]
    assert (means["false"][1], means["true"][1]) == (False, True)


async def test_what_was_not_computed_is_told_and_what_is_held_is_not_sent(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    draw = random.Random(4)
    stem = [draw.randrange(20, 1000) for _ in range(10 * BLOCK)]
    async with pair(tiny("2.0"), tmp_path) as topology:

        async def sent(prompt: list[int], **fields: Any) -> tuple[int, float]:
            await topology.idle_within()  # P counts when its leg ends, which may be behind the answer
            before = [total(topology, name, "transfer_bytes_total") for name in ("p0", "d0")]
            answer = await topology.complete(prompt, **fields)
            await topology.idle_within()
            ours, theirs = (total(topology, name, "transfer_bytes_total") for name in ("p0", "d0"))
            assert ours - before[0] >= theirs - before[1] > 0  # ends are counted by neither
            return cached(answer), ours - before[0]

        hit, whole = await sent(stem)
        assert hit == 0
        hit, last = await sent(stem)
        assert hit == 9 * BLOCK and last < 0.15 * whole, "of ten blocks the last one travels"
        hit, some = await sent([*stem[: 5 * BLOCK], *[7] * (5 * BLOCK)])
        assert hit == 5 * BLOCK and some == pytest.approx(whole / 2, rel=0.1)

        # a streamed one tells the same; another face of P + D: what D decoded itself it holds, P has to compute it
        async with topology.client.stream(
            "POST",
            "/v1/completions",
            json={
                "prompt": stem, "max_tokens": 2, "stream": True, "stream_options": {"include_usage": True},
                "return_token_ids": True, "temperature": 0,
            },
        ) as answer:  # fmt: skip
            text = (await answer.aread()).decode()
        assert f'"cached_tokens":{9 * BLOCK}' in text.replace(" ", "")
        prompt = [5, *stem[: 2 * BLOCK]]
        first = await topology.complete(prompt, max_tokens=3 * BLOCK)
        hit, follow_up = await sent([*prompt, *first["token_ids"], 11, 12])
        assert hit == 2 * BLOCK
        assert follow_up < 0.25 * whole, "one block of the answer that is not settled, and the new tokens"

        # D has forgotten: P sends what it did not have to compute
        topology.parts["d0"].engine.prefixes.flush()
        hit, again = await sent(stem)
        assert hit == 9 * BLOCK and again == pytest.approx(whole, rel=0.02)
        # P has forgotten: it computes what it does not send
        topology.parts["p0"].engine.prefixes.flush()
        hit, again = await sent(stem)
        assert hit == 0 and again == pytest.approx(last, rel=0.02)
        await topology.idle_within()
        answers = await topology.client.post(
            "/v1/completions",
            json={"prompt": stem[::-1], "n": 3, "max_tokens": 2, "return_token_ids": True, "temperature": 0},
        )
        assert answers.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}, "one of the three computed it"
        await topology.idle_within()


@pytest.mark.parametrize("off", ["prefill", "decode"])
async def test_each_side_shares_on_its_own(tiny: MakeCheckpoint, tmp_path: Path, off: str) -> None:
    stem, setting = list(range(100, 100 + 4 * BLOCK)), {f"{off}_engine": {"prefix_cache": False}}
    async with pair(tiny("2.0"), tmp_path, **setting) as topology:
        answers, sent = [], []
        for _ in range(2):
            answers.append(await topology.complete(stem))
            sent.append(total(topology, "d0", "transfer_bytes_total"))
        assert [cached(answer) for answer in answers] == [0, 0 if off == "prefill" else 3 * BLOCK]
        assert (sent[1] - sent[0]) / sent[0] == pytest.approx(0.25 if off == "prefill" else 1, rel=0.1)
        assert answers[0]["token_ids"] == answers[1]["token_ids"]
        account = await topology.idle_within()
        assert not any(rank["blocks"]["cached"] for rank in account["instances"][off[0] + "0"]["ranks"])


async def test_however_requests_end_prefixes_stay_right(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    model, prompts = tiny("2.0"), rounds()[3]
    async with standalone(model, "model.dtype=float32", "engine.prefix_cache=false") as topology:
        expected = await ask(topology, prompts)
    draw = random.Random(6)
    async with pair(model, tmp_path, engine={"num_blocks": 40}) as topology:

        async def leave(prompt: list[int]) -> None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(topology.complete(prompt, max_tokens=NUM_NEW), draw.choice((0.01, 0.03, 0.08, 0.2)))

        for _ in range(3):
            await asyncio.gather(*(leave(prompt) for prompt in draw.sample(prompts, 8)))
            some = draw.sample(range(len(prompts)), 6)
            asking = asyncio.ensure_future(ask(topology, [prompts[i] for i in some]))
            while not asking.done():
                account = await topology.account()
                assert all(worker["mismatch"] == [] for worker in account["instances"].values()), account
            answers = await asking
            assert_same([answers], [[expected[i] for i in some]])
            account = await topology.idle_within()
            assert all(worker["mismatch"] == [] for worker in account["instances"].values())
        assert total(topology, "p0", "cached_tokens_total") > 0
