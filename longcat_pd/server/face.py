"""Generation without HTTP: a body in, an answer or the chunks of a stream out.

Owns the way of one body through checking, prompt and answer; closing a generator or cancelling a call of it closes what
it has open in the service. Knows no headers. Offline use needs nothing else: ``read``, then ``answer``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from longcat_pd.metrics import RequestMetrics
from longcat_pd.server.answers import AnswerForm, Step
from longcat_pd.server.constraint import Constraints
from longcat_pd.server.gate import Gate
from longcat_pd.server.openai import Body, read_body
from longcat_pd.server.requests import Adopted, Call, Encoded, PromptSource
from longcat_pd.server.running import Running
from longcat_pd.server.sampling_defaults import SamplingDefaults
from longcat_pd.server.service import NOTHING, Kept, Service
from longcat_pd.server.text import TextProcessor

OFFLINE_LIMIT_S = 86400.0


class Face:
    """The generation face of one instance.

    Args:
        service: the instance; a decode worker's prompts come from hand-overs.
        text: of the same checkpoint.
        gate: lets requests in and can cut them; None: one of its own.
        metrics: where requests are counted; None offline.
        kept: what is kept of each request.
        check_grammar: why the ranks would not keep the text of a grammar; empty if they do. Called by one thread at a time.
    """

    def __init__(
        self,
        service: Service,
        text: TextProcessor,
        *,
        gate: Gate | None = None,
        metrics: RequestMetrics | None = None,
        kept: Kept = NOTHING,
        check_grammar: Callable[[str], str] = lambda grammar: "",
    ) -> None:
        self._service = service
        self._text = text
        self.defaults = SamplingDefaults.load(service.model.path)
        constraints = Constraints(service.model, text, check_grammar)
        self.encoded = Encoded(
            text,
            grammar_of=constraints.grammar,
            model=service.model,
            engine=service.engine_config,
            defaults=self.defaults,
        )
        self._adopted = Adopted(service, text, defaults=self.defaults)
        self._running = Running(service, constraints.parsers.choice, gate=gate or Gate(), metrics=metrics, kept=kept)

    def call(self, request_id: str, time_left_s: float, *, traceparent: str = "") -> Call:
        """What surrounds a body that belongs to no hand-over."""
        return Call(request_id=request_id, deadline=self._service.now() + time_left_s, traceparent=traceparent)

    def time_left_s(self, call: Call) -> float:
        """Until its end."""
        return call.deadline - self._service.now()

    def admit(self) -> None:
        """Raise what a new body is refused with now: draining, too many, starting."""
        self._running.admit()

    def last_token(self) -> float | None:
        """When any request got a token, on the service's clock."""
        return self._running.last_token

    def recent(self) -> list[dict[str, Any]]:
        """The bodies that came last, as they went so far; oldest first."""
        return self._running.recent

    def read(self, route: str, values: dict[str, Any]) -> Body:
        """Check a body. Raises InvalidRequest or NotFound."""
        return read_body(route, values, self._service.model.served_name)

    async def answer(self, body: Body, call: Call) -> dict[str, Any]:
        """The whole answer. Raises LongcatError."""
        form = self._form(body, call)
        async with aclosing(self._running.pieces(body, call, self._prompts(), begin=form.begin)) as pieces:
            return form.whole([piece async for piece in pieces])

    async def chunks(self, body: Body, call: Call) -> AsyncGenerator[Step, None]:
        """The chunks of a stream, the first not before the first token; the last step may have none.

        Raises LongcatError.
        """
        form = self._form(body, call)
        chunks: list[dict[str, Any]] = []
        token_ids: list[int] = []
        async with aclosing(self._running.pieces(body, call, self._prompts(), begin=form.begin)) as pieces:
            async for piece in pieces:
                chunks.append(form.chunk(piece))
                token_ids += piece.token_ids
                if piece.ends_step:
                    yield Step(form.origin, tuple(chunks), tuple(token_ids))
                    chunks, token_ids = [], []
        yield Step(form.origin, (form.usage_chunk(),) if body.include_usage else (), usage=form.usage.record())

    async def answer_in_steps(self, body: Body, call: Call) -> AsyncGenerator[Step, None]:
        """The whole answer at last, and before it the ids that it is made of, but for those of its last step: nothing goes
        on behind them. Raises LongcatError."""
        form = self._form(body, call)
        kept = []
        token_ids: list[int] = []
        async with aclosing(self._running.pieces(body, call, self._prompts(), begin=form.begin)) as pieces:
            async for piece in pieces:
                kept.append(piece)
                token_ids += piece.token_ids
                if piece.ends_step and piece.finish_reason is None:
                    yield Step(form.origin, token_ids=tuple(token_ids))
                    token_ids = []
        answer = form.whole(kept)
        yield Step(form.origin, (answer,), usage=answer["usage"])

    async def prefilled(self, body: Body, call: Call) -> dict[str, Any]:
        """A prefill leg's answer, after the hand-overs of all choices are acknowledged. Raises LongcatError."""
        assert call.transfer is not None, "the route demands the headers of a hand-over"
        record = await self._running.hand_over(body, call, self._prompts())
        return {
            "object": "prefill",
            "transfer_id": call.transfer.id,
            "prompt_tokens": record.prompts.num_tokens,
            "timings_ms": record.timings_ms,
        }

    def _prompts(self) -> PromptSource:
        return self._adopted if self._service.role == "decode" else self.encoded

    def _form(self, body: Body, call: Call) -> AnswerForm:
        peer = None if call.transfer is None else call.transfer.peer
        computed_by = self._service.computed_by(peer)
        show = self._text.token_text
        return AnswerForm(body, call.request_id, computed_by=computed_by, show=show, resume=call.resume)
