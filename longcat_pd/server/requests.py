"""From a checked body to the requests of an engine, one for each choice.

Owns the two ways in which an instance comes to its prompt: it encodes the body's text itself, or it adopts the ids of a
hand-over. Owns what is checked with the tokenizer, the vocabulary and the length of the context, and the defaults that
depend on them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, TypeVar

from longcat_pd.config.schema import EngineConfig, ModelSection
from longcat_pd.engine.request import Request, SamplingParams, TransferRef
from longcat_pd.errors import InvalidRequest
from longcat_pd.server.fields import out_of_range
from longcat_pd.server.openai import Body, ChatBody
from longcat_pd.server.prompts import Prompt
from longcat_pd.server.resume import Resume
from longcat_pd.server.sampling_defaults import SamplingDefaults
from longcat_pd.server.service import Service
from longcat_pd.server.text import TextProcessor

T = TypeVar("T")

_LONG_TEXT = 4096  # characters; what is longer is encoded in a thread, for it would hold up everybody's tokens
_A_VALUE = 4  # characters that one costs in a template, at least


@dataclass(frozen=True, kw_only=True)
class Call:
    """What surrounds one body: its name, its end on the service's clock, and the hand-over that it belongs to.

    ``resume``: the answer began elsewhere; its only choice goes on here. ``traceparent``: that header, as it came.
    ``cut``: set when its time is over or the gate has cut it, whether or not somebody reads its answer.
    """

    request_id: str
    deadline: float
    transfer: TransferRef | None = None
    attempt: int = 1
    resume: Resume | None = None
    traceparent: str = ""
    cut: asyncio.Event = field(default_factory=asyncio.Event, repr=False, compare=False)

    @property
    def said_token_ids(self) -> tuple[int, ...]:
        """The ids of the answer that it goes on behind."""
        return () if self.resume is None else self.resume.token_ids

    def transfer_of(self, choice: int, num_choices: int) -> TransferRef | None:
        """The hand-over of one choice: several have one each."""
        if self.transfer is None or num_choices == 1:
            return self.transfer
        return TransferRef(id=f"{self.transfer.id}.{choice}", peer=self.transfer.peer)


GrammarOf = Callable[[Body, Sequence[int]], str]  # by the prompt's ids; may be called in any thread
RequestOf = Callable[[int], Awaitable[Request]]


class PromptSource(Protocol):
    """Where the prompt comes from."""

    async def open(self, body: Body, call: Call) -> RequestOf:
        """Check the body; the request of a choice by its index. Raises InvalidRequest."""
        ...


class Encoded:
    """Prompts that this instance encodes itself."""

    def __init__(
        self,
        text: TextProcessor,
        *,
        grammar_of: GrammarOf,
        model: ModelSection,
        engine: EngineConfig,
        defaults: SamplingDefaults,
    ) -> None:
        self._text = text
        self._grammar_of = grammar_of
        self._model = model
        self._max_model_len = engine.max_model_len
        self._defaults = defaults
        self._grammar_turn = asyncio.Lock()

    async def open(self, body: Body, call: Call) -> RequestOf:
        """As PromptSource. All choices get the same seed, drawn here if the body has none."""
        check_text(body, self._text)
        prompts = await self._prompts(body)
        limits = [self._max_tokens(body, len(ids), path) for ids, path in prompts]
        if call.resume is not None:
            self._check_resumed(call.resume, prompts[0][0], limits[0])
        said = call.said_token_ids
        grammar = await self._grammar(body, prompts[0][0])
        seed = _seed_of(body, call)

        async def request_of(index: int) -> Request:
            prompt, choice = divmod(index, body.n)
            return Request(
                request_id=call.request_id,
                prompt_token_ids=prompts[prompt][0] + said,
                sampling=replace(
                    sampling_of(
                        body,
                        self._defaults,
                        choice=choice,
                        max_tokens=limits[prompt] - len(said),
                        seed=seed,
                        num_said=len(said),
                    ),
                    grammar=grammar,
                ),
                deadline=call.deadline,
                transfer=call.transfer_of(index, body.num_choices),
                priority=body.priority,
            )

        return request_of

    async def encode_text(self, text: str, *, adds_special: bool = True) -> list[int]:
        """The ids of a prompt. Raises InvalidRequest."""
        return await _off_loop(len(text), partial(self._text.encode, text, adds_special=adds_special))

    async def encode_chat(self, body: ChatBody) -> list[int]:
        """The ids of a conversation. Raises InvalidRequest."""
        shown = (body.messages, body.tools, body.template_kwargs)
        return await _off_loop(
            _length(shown), partial(self._text.encode_chat, body.messages, body.tools, body.template_kwargs)
        )

    async def _prompts(self, body: Body) -> list[tuple[tuple[int, ...], str]]:
        """The ids of each prompt, and its path in the body."""
        if isinstance(body, ChatBody):
            prompts = [(tuple(await self.encode_chat(body)), "messages")]
        else:
            length = sum(len(prompt.content) for prompt in body.prompts if isinstance(prompt.content, str))
            prompts = await _off_loop(length, partial(self._encode_all, body.prompts))
        for ids, path in prompts:
            self._text.check_ids(ids, path)
            if not ids:
                raise InvalidRequest("the prompt encodes to no token", param=path)
        return prompts

    def _encode_all(self, prompts: Sequence[Prompt]) -> list[tuple[tuple[int, ...], str]]:
        return [
            (tuple(self._text.encode(given.content)) if isinstance(given.content, str) else given.content, given.path)
            for given in prompts
        ]

    async def _grammar(self, body: Body, ids: tuple[int, ...]) -> str:
        """What the answer has to be a text of; made in a thread, for a schema may be large, and one at a time, for the
        threads are those that encode prompts too.

        Prompts of a list have the same: only what is said of a chat's one prompt tells grammars apart.
        """
        if body.answer_schema is None and not (isinstance(body, ChatBody) and body.tool_use.is_forced):
            return ""
        await self._grammar_turn.acquire()
        making = asyncio.get_running_loop().run_in_executor(None, self._grammar_of, body, ids)
        making.add_done_callback(self._end_grammar_turn)
        return await asyncio.shield(making)  # whoever leaves does not end the thread, so neither its turn

    def _end_grammar_turn(self, making: asyncio.Future[str]) -> None:
        self._grammar_turn.release()
        if not making.cancelled():
            making.exception()  # whom it is for may have left

    def _check_resumed(self, resume: Resume, prompt: tuple[int, ...], max_tokens: int) -> None:
        """Raise what forbids to go on: WorkerUnavailable for another prompt, InvalidRequest for ids that cannot be."""
        resume.check_prompt(prompt)
        self._text.check_ids(resume.token_ids, "resume.token_ids")
        if len(resume.token_ids) >= max_tokens:
            message = f"resume.token_ids has {len(resume.token_ids)} ids: of {max_tokens} tokens none is to come"
            raise InvalidRequest(message, param="resume.token_ids")

    def _max_tokens(self, body: Body, num_prompt: int, path: str) -> int:
        room = self._max_model_len - num_prompt
        wanted = body.max_tokens
        if wanted is None:
            wanted = max(min(self._model.default_max_tokens, room), 1)
        if wanted > room:
            raise InvalidRequest(
                "context_length_exceeded: "  # this and the next words are what client libraries look for
                f"this model's maximum context length is {self._max_model_len} tokens; "
                f"the prompt has {num_prompt} and max_tokens is {wanted}",
                code="context_length_exceeded",
                param=path,
            )
        return wanted


class Adopted:
    """Prompts that come with a hand-over; the body says how to sample, the offer fixes max_tokens and seed."""

    def __init__(self, service: Service, text: TextProcessor, *, defaults: SamplingDefaults) -> None:
        self._service = service
        self._text = text
        self._defaults = defaults

    async def open(self, body: Body, call: Call) -> RequestOf:
        """As PromptSource."""
        check_text(body, self._text)
        self._text.check_ids(call.said_token_ids, "resume.token_ids")
        num_said = len(call.said_token_ids)

        async def request_of(index: int) -> Request:
            transfer = call.transfer_of(index, body.num_choices)
            assert transfer is not None, "the route demands the headers of a hand-over"
            at_least = max(body.max_tokens or 1, body.min_tokens)
            sampling = sampling_of(
                body, self._defaults, choice=index % body.n, max_tokens=at_least, seed=0, num_said=num_said
            )
            request = await self._service.adopt(transfer, call.deadline, sampling, is_patient=index > 0)
            return replace(request, priority=body.priority)

        return request_of


def sampling_of(
    body: Body, defaults: SamplingDefaults, *, choice: int, max_tokens: int, seed: int, num_said: int = 0
) -> SamplingParams:
    """How one choice is sampled behind ``num_said`` ids of it, with ``max_tokens`` to come."""
    return SamplingParams(
        temperature=defaults.temperature if body.temperature is None else body.temperature,
        top_p=defaults.top_p if body.top_p is None else body.top_p,
        top_k=defaults.top_k if body.top_k is None else body.top_k,
        max_tokens=max_tokens,
        seed=seed,
        choice=choice,
        stop_token_ids=body.stop_token_ids,
        num_logprobs=body.num_logprobs,
        ignore_eos=body.ignore_eos,
        min_p=body.min_p,
        min_tokens=max(body.min_tokens - num_said, 0),
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        num_said=num_said,
    )


def _seed_of(body: Body, call: Call) -> int:
    if call.resume is not None:
        return call.resume.seed
    return secrets.randbits(63) if body.seed is None else body.seed


def check_text(body: Body, text: TextProcessor) -> None:
    """Raise InvalidRequest for what the tokenizer or the vocabulary does not allow."""
    text.check_ids(body.stop_token_ids, "stop_token_ids")
    for token_id, _ in body.logit_bias:
        if token_id >= text.vocab_size:
            raise out_of_range(f"logit_bias.{token_id}", token_id, f"0 ... {text.vocab_size - 1}")
    if text.has_tokenizer:
        return
    for path in _paths_of_texts(body):
        text.need_tokenizer(path)
    if body.stop:
        text.need_tokenizer("stop")
    if body.answer_schema is not None:
        text.need_tokenizer("response_format")
    if not body.return_token_ids:
        raise InvalidRequest(
            "the checkpoint has no tokenizer: return_token_ids must be true",
            code="tokenizer_missing",
            param="return_token_ids",
        )


def _paths_of_texts(body: Body) -> list[str]:
    """Of what has to be encoded."""
    if isinstance(body, ChatBody):
        return ["messages"]
    return [prompt.path for prompt in body.prompts if isinstance(prompt.content, str)]


def _length(shown: Any) -> int:
    """About how many characters a template writes of these values; of long ones no more are looked at than show that."""
    length, waiting = 0, [shown]
    while waiting and length < _LONG_TEXT:
        value = waiting.pop()
        length += _A_VALUE
        if isinstance(value, str):
            length += len(value)
        elif isinstance(value, Mapping):
            waiting.extend(value.keys())
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple)):
            waiting.extend(value)
    return length


async def _off_loop(length: int, encode: Callable[[], T]) -> T:
    return encode() if length < _LONG_TEXT else await asyncio.to_thread(encode)
