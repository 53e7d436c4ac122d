"""Bias, penalties, min_tokens, min_p, grammars through HTTP: a pair of pools says what one engine says, drafts or none.

Prompts share their beginnings, and the decode side never computes them: what they hold counts there all the same.
"""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

from longcat_pd.tiny.make import write_tiny
from tests.integration.test_drafts import NUM_DRAFTS, ask, assert_same, pair
from tests.parity.conftest import MakeCheckpoint
from tests.topology import BLOCK, Topology, standalone

NUM_NEW, EOS = 14, 2
NARROW = {str(token): 6 for token in range(100, 106)}  # who says little else repeats itself
PATH = "response_format.json_schema.schema"
ONLY_EOS = {str(EOS): 100}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
BOUND = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}
FIELDS: tuple[dict[str, Any], ...] = (
    {},
    {"logit_bias": NARROW},
    {"logit_bias": NARROW, "frequency_penalty": 0.8},
    {"logit_bias": NARROW, "presence_penalty": 1.5, "min_p": 0.2},
    {"logit_bias": NARROW, "repetition_penalty": 1.5, "logprobs": 1},
    {"logit_bias": ONLY_EOS, "min_tokens": 5, "ignore_eos": False},
    {"logit_bias": {**NARROW, "300": 9, "2": 7.0}, "min_tokens": 4, "stop_token_ids": [300], "repetition_penalty": 1.2},
    {
        "logit_bias": {**NARROW, "123": -100},
        "frequency_penalty": 0.7,
        "presence_penalty": -0.4,
        "repetition_penalty": 1.4,
        "min_tokens": 6,
        "ignore_eos": False,
        "min_p": 0.05,
    },
    {"response_format": BOUND},
    {"response_format": BOUND, "repetition_penalty": 1.3, "min_tokens": 9, "ignore_eos": False, "logprobs": 1},
    {"response_format": {"type": "json_object"}, "logit_bias": NARROW},
)


def cases() -> list[dict[str, Any]]:
    """Every field greedy and drawn; prompts of every second case begin like others and go on with favoured ids."""
    draw, found = random.Random(4), list[dict[str, Any]]()
    shared = [draw.randrange(32, 1000) for _ in range(2 * BLOCK + 3)]
    for number, fields in enumerate((*FIELDS, *FIELDS)):
        own = [draw.randrange(98, 106) for _ in range(1 + number)]
        drawn = {"temperature": 0.9, "seed": number} if number >= len(FIELDS) else {}
        found.append({"prompt": (shared + own) if number % 2 else own, "max_tokens": NUM_NEW, **drawn, **fields})
    return found


async def refusal(topology: Topology, **fields: Any) -> tuple[int, str, str]:
    answer = await topology.client.post("/v1/completions", json={"prompt": [5], "return_token_ids": True, **fields})
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


async def chat(topology: Topology, **fields: Any) -> tuple[int, str]:
    """How many tokens an answer has and why it ended; or the status, and the field that was refused."""
    messages = [{"role": "user", "content": "x"}]
    body = {"messages": messages, "temperature": 0, "logit_bias": ONLY_EOS, **fields}
    answer = await topology.client.post("/v1/chat/completions", json=body)
    found = answer.json()
    if answer.status_code != 200:
        return answer.status_code, found["error"]["param"]
    return found["usage"]["completion_tokens"], found["choices"][0]["finish_reason"]


async def test_a_pair_says_what_one_engine_says(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    model, some = tiny("2.0+predictable", with_tokenizer=True), cases()
    async with standalone(model, "model.dtype=float32") as topology:
        expected = await ask(topology, some)
        assert await refusal(topology, logit_bias={"5000": 1}) == (400, "invalid_value", "logit_bias.5000")
        assert await refusal(topology, max_tokens=3, min_tokens=4) == (400, "invalid_value", "min_tokens")
    texts = [answer["text"] for answer, case in zip(expected, some, strict=True) if case.get("response_format") == BOUND]
    assert len(set(texts)) > 1 and all(re.fullmatch(r'\{"n": ?-?[0-9]*\}?', text) for text in texts), texts
    ended = [answer for answer, case in zip(expected, some, strict=True) if case.get("logit_bias") == ONLY_EOS]
    lasts = [(len(answer["token_ids"]), answer["token_ids"][-1], answer["finish_reason"]) for answer in ended]
    assert lasts == 2 * [(6, EOS, "stop")]
    async with standalone(model, "model.dtype=float32", f"engine.num_draft_tokens={NUM_DRAFTS}") as topology:
        assert_same(await ask(topology, some, at_once=True), expected)
        await topology.idle_within()
    async with pair(model, tmp_path, pp=2, cp=2, kvp=2) as topology:
        assert_same(await ask(topology, some, at_once=True), expected)
        assert_same(await ask(topology, some), expected)
        assert await refusal(topology, logit_bias={"5000": 1}) == (400, "invalid_value", "logit_bias.5000")
        unkept = {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}
        assert await refusal(topology, response_format=unkept) == (400, "unsupported_parameter", f"{PATH}.not")
        await topology.idle_within()


async def test_stops_of_every_kind_wait_for_min_tokens(tmp_path: Path) -> None:
    model = tmp_path / "m"
    write_tiny(model, "2.0+predictable", dtype="float32")
    stops: tuple[dict[str, Any], ...] = ({"stop": "a"}, {"stop_token_ids": [ord("a")]}, {"ignore_eos": False})
    async with standalone(model, f"engine.num_draft_tokens={NUM_DRAFTS}") as topology:
        ids = (await topology.client.post("/tokenize", json={"prompt": "a", "add_special_tokens": False})).json()["tokens"]
        for length in (0, 1, 2, 5):
            for stop in stops:
                token = EOS if "ignore_eos" in stop else ids[0]
                wanted = {**stop, "stop_token_ids": ids} if "stop_token_ids" in stop else stop
                bias = {str(token): 100}
                found = await topology.complete([7, 8], max_tokens=9, min_tokens=length, logit_bias=bias, **wanted)
                assert (len(found["token_ids"]), found["finish_reason"]) == (length + 1, "stop"), stop
                assert found["text"].startswith("a" * length) or "stop" not in stop
    async with pair(model, tmp_path, pp=1, cp=1, kvp=1) as topology:
        assert await chat(topology, min_tokens=5) == (6, "stop")  # also where the prompt says how many there may be
        assert await chat(topology, min_tokens=10**6) == (400, "min_tokens")
