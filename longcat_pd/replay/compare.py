"""Two answers to one request, id by id: what was recorded, and what comes now. Prints nothing."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field, replace

from longcat_pd.clock import Clock
from longcat_pd.engine.request import Life, Request
from longcat_pd.replay.engines import Asked
from longcat_pd.server.bundle import Bundle
from longcat_pd.server.face import OFFLINE_LIMIT_S

_NUM_BEST = 20  # log-probs that are looked at where the answers part


@dataclass(frozen=True, kw_only=True)
class Replayed:
    """What came. ``finish``: None where nobody waited for the end."""

    token_ids: tuple[int, ...]
    finish: str | None


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where two answers part: their first ids that are not the same; None: there the answer had ended.

    ``logprobs``: of an id behind what both have said; those of the best ids are known, and of the one that is drawn.
    """

    position: int
    recorded: int | None
    replayed: int | None
    logprobs: dict[int, float] = field(default_factory=dict)


class Comparison:
    """Asks for the answer of a bundle again."""

    def __init__(self, bundle: Bundle, asked: Asked, clock: Clock) -> None:
        self._bundle = bundle
        self._asked = asked
        self._clock = clock

    async def replay(self) -> Replayed:
        """Ask; not longer than until it is clear whether the answers are the same. A request that failed is asked to its
        end, to see whether it fails again. Raises LongcatError."""
        recorded, tokens, finish = self._bundle.answer_token_ids, list[int](), None
        waits_for_end = self._bundle.ending.engine_finish is not None or self._bundle.ending.outcome == "failed"
        async with aclosing(self._asked.generate(self._request())) as deltas:
            async for delta in deltas:
                tokens += (token.token_id for token in delta.tokens)
                finish = None if delta.finish is None else delta.finish.value
                has_parted = tuple(tokens[: len(recorded)]) != recorded[: len(tokens)]
                is_past = len(tokens) > len(recorded) and self._bundle.ending.engine_finish is not None
                if has_parted or is_past or (len(tokens) >= len(recorded) and not waits_for_end):
                    break
        return Replayed(token_ids=tuple(tokens), finish=finish)

    def difference(self, replayed: Replayed) -> Difference | None:
        """Where the answers part, if they do."""
        recorded, found = self._bundle.answer_token_ids, replayed.token_ids
        for position, (ours, theirs) in enumerate(zip(recorded, found, strict=False)):
            if ours != theirs:
                return Difference(position=position, recorded=ours, replayed=theirs)
        if len(found) < len(recorded):
            return Difference(position=len(found), recorded=recorded[len(found)], replayed=None)
        if self._bundle.ending.engine_finish is not None and len(found) > len(recorded):
            return Difference(position=len(recorded), recorded=None, replayed=found[len(recorded)])
        return None

    async def judged(self, difference: Difference) -> Difference:
        """With the log-probs of both ids, from what both answers have said. Raises LongcatError."""
        sampling, position = self._bundle.sampling, difference.position
        said = self._bundle.answer_token_ids[:position]
        request = self._request()
        asked = replace(
            request,
            prompt_token_ids=request.prompt_token_ids + said,
            sampling=replace(
                request.sampling,
                max_tokens=1,
                min_tokens=min(max(sampling.min_tokens - position, 0), 1),
                num_said=sampling.num_said + position,
                num_logprobs=_NUM_BEST,
            ),
        )
        known: dict[int, float] = {}
        async with aclosing(self._asked.generate(asked)) as deltas:
            async for delta in deltas:
                for token in delta.tokens:
                    known.update(token.top)
                    known.update({} if token.logprob is None else {token.token_id: token.logprob})
        return replace(difference, logprobs=known)

    def _request(self) -> Request:
        """As it was recorded: the same ids, seed and parameters."""
        grammar = "" if self._bundle.texts is None else self._bundle.texts.grammar
        return Request(
            request_id=self._bundle.request_id,
            prompt_token_ids=self._bundle.prompt_token_ids,
            sampling=replace(self._bundle.sampling, grammar=grammar),
            deadline=self._clock.now() + OFFLINE_LIMIT_S,
            life=Life(),
        )
