"""What a wild client sends, and what is demanded of every answer it gets. One seed, one order of requests."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from longcat_pd.errors import LongcatError
from longcat_pd.server.openai import CHAT_ROUTE, COMPLETIONS_ROUTE, decode_body, read_body
from longcat_pd.server.text_bodies import TEXT_READERS
from tests.contract import Contract, fields
from tests.mutations import Mutator

ROUTES = (CHAT_ROUTE, COMPLETIONS_ROUTE, "/tokenize", "/detokenize")
JSON = "application/json"
ODD_HEADERS: tuple[dict[str, str], ...] = (
    {"content-type": "text/plain"},
    {"content-type": "application/x-www-form-urlencoded"},
    {"content-type": "multipart/form-data; boundary=x"},
    {"content-type": "application/json; charset=latin-1"},
    {"content-type": "application/json;charset=\"UTF-8\"; x"},
    {"content-type": "application/json;;="},
    {"content-type": "APPLICATION/JSON"},
    {"content-type": ""},
    {"content-encoding": "gzip"},
    {"content-encoding": "identity"},
    {"accept": "application/xml", "accept-encoding": "br"},
    {"x-request-timeout": "soon"},
    {"x-request-timeout": "-1"},
    {"x-request-timeout": "0.0"},
    {"x-request-timeout": "1e9"},
    {"x-request-timeout": "600"},
    {"x-request-timeout": "9" * 30},
    {"x-request-id": "a" * 200},
    {"x-request-id": "../../é"},
    {"x-request-id": "kept-1"},
    {"authorization": "Bearer é"},
    {"x-longcat-transfer-id": "0" * 32, "x-longcat-peer": "d9", "x-longcat-deadline-ms": "1", "x-longcat-attempt": "7"},
    {"traceparent": "00-" + "a" * 200, "tracestate": "x=é"},
    {"expect": "nothing"},
)  # fmt: skip


@dataclass(frozen=True)
class Shot:
    """One request. ``error``: what our reader says of its body; None where only the tokenizer could object."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    error: LongcatError | None = None
    values: Any = None

    @property
    def is_odd(self) -> bool:
        """Whether its headers decide as well."""
        return bool(self.headers)


def read(path: str, values: dict[str, Any], name: str) -> object:
    """What the balancer does with a body before it calls a worker."""
    return TEXT_READERS[path](values, name) if path in TEXT_READERS else read_body(path, values, name)


def shots(contract: Contract, count: int, *, seed: int, name: str, calm: bool = False) -> Iterator[Shot]:
    """Requests to all routes in turn.

    Args:
        name: of the served model.
        calm: bodies that are accepted ask for two tokens at most, so that real servers are not kept busy.
    """
    pick = random.Random(seed)
    mutators = {}
    for path in ROUTES:
        every = fields(contract, contract.body_schema(path))
        mutators[path] = Mutator(path, sorted({one for one in every if not set(one) & set(".[")}), seed)
    for number in range(count):
        path = ROUTES[number % 4] if pick.random() < 0.5 else ROUTES[number % 2]
        mutator = mutators[path]
        raw = mutator.damaged() if pick.random() < 0.15 else json.dumps(mutator.body()).encode()
        headers = pick.choice(ODD_HEADERS) if pick.random() < 0.1 else {}
        yield judged(path, raw, headers, name=name, calm=calm)


def judged(path: str, raw: bytes, headers: Mapping[str, str], *, name: str, calm: bool) -> Shot:
    """The request with our reader's verdict."""
    try:
        values = decode_body(raw)
        read(path, values, name)
    except LongcatError as error:
        return Shot(path, raw, headers, error)
    if calm and path not in TEXT_READERS and not values.get("min_tokens"):
        changed = {**values, "max_completion_tokens": 2}
        return Shot(path, json.dumps(changed).encode(), headers, None, changed)
    return Shot(path, raw, headers, None, values)


def check_refusal(shot: Shot, status: int, headers: Mapping[str, str], body: bytes) -> None:
    """An answer to a request that our reader refuses, or whose headers are odd: what a client can act on, never ours."""
    assert 400 <= status < 500 and status != 422, (shot, status, body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}, shot
    assert error["message"] and isinstance(error["code"], str) and isinstance(error["type"], str), shot
    assert headers["x-request-id"]
    if shot.error is not None and not shot.is_odd:
        found = (status, error["code"], error["param"], error["type"])
        assert found == (shot.error.status, shot.error.code, shot.error.param, shot.error.kind), shot
        assert error["param"] or error["code"] == "invalid_json", shot
