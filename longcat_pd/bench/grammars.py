"""What it costs to bind answers to a grammar: the first mask of a schema, each mask after it, and a decode step.

Masks are measured by themselves over a vocabulary as large as LongCat's, which the small tokenizer is filled up to with
made up tokens; steps on the runners of ``steps.py``; first tokens at a server.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from longcat_pd.bench import client
from longcat_pd.bench.orders import Order, Runners, Setup, runners
from longcat_pd.bench.report import Row, compared
from longcat_pd.bench.servers import engine, make_checkpoint
from longcat_pd.bench.steps import ENGINE, LENGTH, NUM_TOKENS, ROUNDS, in_turn
from longcat_pd.engine.grammar import Vocabulary

VOCAB, EOS, BYTES_FROM = 163840, 2, 19  # the small tokenizer's ids of single bytes begin there
NUM_SCHEMAS, NUM_MASKS, NUM_FIRST = 20, 300, 20
BATCH, DRAFTS = 8, (0, 3)
# never ends, so that every step has masks to make
ENDLESS = "start: %json " + json.dumps({"type": "array", "items": {"type": "object", "minProperties": 3}, "minItems": 999})


def grammar_rows(folder: Path, *, port: int) -> Iterator[Row]:
    """All of it."""
    model = make_checkpoint(folder / "tiny-grammar", "2.0", dtype="float32", is_predictable=True)
    yield from mask_rows(large_tokenizer((model / "tokenizer.json").read_text(encoding="utf-8")))
    yield from bound_rows(model, folder)
    with engine(model, port, folder=folder) as served:
        yield first_row(served.url)


def mask_rows(tokenizer: str) -> Iterator[Row]:
    """Of schemas that nobody has sent before, each walked through at random."""
    vocabulary, draw = Vocabulary(tokenizer, VOCAB, [EOS]), random.Random(1)
    walk(vocabulary, grammar(0), draw, 10)  # the first of all finds nothing in any cache
    firsts, again, later = list[float](), list[float](), list[float]()
    for number in range(1, NUM_SCHEMAS):
        first, *rest = walk(vocabulary, grammar(number), draw, NUM_MASKS)
        firsts.append(first)
        later += rest
        again.append(walk(vocabulary, grammar(number), draw, 1)[0])
    name = f"vocabulary of {VOCAB:,}"
    yield compared(f"first mask of a new schema, {name}", firsts, again, unit="ms", them="one that was there before")
    median, high = (float(np.quantile(later, share)) * 1e6 for share in (0.5, 0.99))
    yield Row(what=f"each mask after it, {name}", ours=f"{median:.0f} µs, 99th of 100: {high:.0f}")


def walk(vocabulary: Vocabulary, text: str, draw: random.Random, num_masks: int) -> list[float]:
    """Seconds of each mask of one answer; those of the first one include beginning the grammar."""
    took, masks = list[float](), np.zeros((1, vocabulary.num_words), dtype=np.int32)
    began = time.perf_counter()
    matcher = vocabulary.begin(text)
    while len(took) < num_masks:
        matcher.fill(masks, [])
        took.append(time.perf_counter() - began)
        ids = np.unpackbits(masks[0].view(np.uint8), bitorder="little").nonzero()[0]
        chosen = int(draw.choice(ids))
        if chosen in vocabulary.eos_token_ids:
            break
        began = time.perf_counter()
        matcher.advance([chosen])
    return took


def grammar(number: int) -> str:
    """A schema of an order of something; each number another one."""
    return "start: %json " + json.dumps(_schema(number))


def large_tokenizer(small: str) -> str:
    """``tokenizer.json`` with made up tokens of printable characters behind its own, up to LongCat's number."""
    data, draw = json.loads(small), random.Random(0)
    vocab: dict[str, int] = data["model"]["vocab"]
    letters = [token for token, number in vocab.items() if number >= BYTES_FROM and len(token) == 1 and token.isprintable()]
    number = max(vocab.values()) + 1
    while number < VOCAB:
        token = "".join(draw.choices(letters, k=draw.randint(2, 9)))
        if token not in vocab:
            vocab[token] = number
            number += 1
    return json.dumps(data)


def bound_rows(model: Path, folder: Path) -> Iterator[Row]:
    """Decode steps of sequences that are bound against those that are not, on the same runner."""
    setups = [
        Setup(
            name=f"drafts {n}", model=str(model), settings=(*ENGINE, "model.dtype=float32", f"engine.num_draft_tokens={n}")
        )
        for n in DRAFTS
    ]
    with runners(setups, folder=folder) as found:
        found.wait_until_ready()
        for setup in setups:
            free = [took.step_s for took in in_turn(found, [setup.name], batch=BATCH)[setup.name]]
            bound = _bound(found, setup.name)
            yield compared(
                f"decode step, batch {BATCH}, {setup.name}, all bound to a grammar", bound, free, unit="ms", them="free"
            )


def _bound(found: Runners, name: str) -> list[float]:
    orders = [
        Order(name=name, batch=BATCH, length=LENGTH, num_tokens=NUM_TOKENS, grammar=ENDLESS, seed=seed)
        for seed in range(1 + ROUNDS)
    ]
    return [found.take(order).step_s for order in orders][1:]


def first_row(url: str) -> Row:
    """First tokens with a schema that is new each time, in turn with requests that have none."""
    bound, free = asyncio.run(_first_tokens_s(url))
    return compared("first token, prompt 32, a new schema each time, one engine", bound, free, unit="ms", them="no schema")


async def _first_tokens_s(url: str) -> tuple[list[float], list[float]]:
    watch = client.Watch(url)
    bound, free = list[float](), list[float]()
    for number in range(client.NUM_WARM_UP + NUM_FIRST):
        form = {"type": "json_schema", "json_schema": {"name": "order", "schema": _schema(number)}}
        bound.append((await watch.ask(client.prompt(32, seed=2 * number), response_format=form))[0])
        free.append((await watch.ask(client.prompt(32, seed=2 * number + 1)))[0])
    watch.close()
    return bound[client.NUM_WARM_UP :], free[client.NUM_WARM_UP :]


def _schema(number: int) -> dict[str, Any]:
    line = {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 40 + number},
            "price": {"type": "number", "minimum": 0, "maximum": 1000 + number},
            "code": {"type": "string", "pattern": f"^[A-Z]{{2}}-[0-9]{{{2 + number % 7}}}$"},
            "kind": {"enum": ["part", "whole", f"other{number}"]},
        },
        "required": ["name", "price", "code", "kind"],
        "additionalProperties": False,
    }
    return {
        "type": "object",
        "properties": {f"id{number}": {"type": "integer"}, "lines": {"type": "array", "items": line, "maxItems": 9}},
        "required": [f"id{number}", "lines"],
        "additionalProperties": False,
    }
