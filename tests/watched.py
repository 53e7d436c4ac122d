"""A call of a client to a generation route, with what has come of it so far, and its one end."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

CUT = "cut"  # the client's own connection broke, as it does when the balancer is killed

Outcome = tuple[int, ...] | str


@dataclass(eq=False)
class Watched:
    """``outcome``: token ids of a good answer, or the code of a typed error, or ``CUT``; None while it goes on.

    Anything else is an AssertionError of ``task``: a second end, none, an event behind it, a comment.
    """

    request_id: str
    is_streamed: bool
    began: float
    status: int = 0
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    logprobs: list[float] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    heads: set[tuple[str, int, str]] = field(default_factory=set)  # id, created, model: one for all chunks
    num_roles: int = 0
    outcome: Outcome | None = None
    ended: float = 0.0
    task: asyncio.Future[None] | None = None

    @classmethod
    def start(cls, client: httpx.AsyncClient, request_id: str, body: dict[str, Any]) -> Watched:
        """To the route that the body is for."""
        call = cls(request_id, bool(body.get("stream")), time.monotonic())
        call.task = asyncio.ensure_future(call._run(client, body))
        return call

    async def _run(self, client: httpx.AsyncClient, body: dict[str, Any]) -> None:
        headers = {"X-Request-Id": self.request_id}
        route = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        try:
            async with client.stream("POST", route, json=body, headers=headers, timeout=300.0) as answer:
                self.status = answer.status_code
                if self.is_streamed and answer.status_code == 200:
                    self.outcome = await self._read_events(answer)
                else:
                    self.outcome = self._read_whole(json.loads(await answer.aread()))
        except httpx.TransportError:
            self.outcome = CUT
        finally:
            self.ended = time.monotonic()

    def _read_whole(self, content: dict[str, Any]) -> Outcome:
        if "error" in content:
            assert self.status >= 400, "an error is not told with a good status"
            return str(content["error"]["code"])
        assert self.status == 200
        self._take(content)
        return tuple(self.token_ids)

    async def _read_events(self, answer: httpx.Response) -> Outcome:
        outcome: Outcome | None = None
        async for line in answer.aiter_lines():
            if not line:
                continue
            assert outcome is None, f"{line[:200]} behind the end"
            assert line.startswith("data: "), f"{line[:200]}: no comment is passed on"
            if line == "data: [DONE]":
                outcome = tuple(self.token_ids)
                continue
            content = json.loads(line.removeprefix("data: "))
            if "error" in content:
                outcome = str(content["error"]["code"])
            else:
                self._take(content)
        assert outcome is not None, f"a stream without an end after {len(self.token_ids)} tokens"
        return outcome

    def _take(self, content: dict[str, Any]) -> None:
        self.heads.add((content["id"], content["created"], content["model"]))
        self.usage = content.get("usage") or self.usage
        for choice in content["choices"]:
            assert self.finish is None, "nothing comes behind the finish reason"
            said = choice.get("delta") or choice.get("message") or choice
            self.token_ids += choice.get("token_ids") or []
            self.text += said.get("content") or said.get("text") or ""
            self.reasoning += said.get("reasoning_content") or ""
            self.num_roles += "role" in said
            self.finish = choice.get("finish_reason")
            found = choice.get("logprobs") or {}
            self.logprobs += found.get("token_logprobs") or [one["logprob"] for one in found.get("content") or []]
