"""Layouts of both pools, the best first: candidates that fit in the memory of a card, ordered by what is asked for.

Deterministic: everything is enumerated in a fixed order, and what is equally good stays in it. Times are those of
``roofline.py``, with all that these leave out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Literal

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.node_checks import environment
from longcat_pd.config.schema import ClusterConfig, InstanceSpec, PoolConfig, Role
from longcat_pd.sizing.candidates import Asked, candidates, completed, pool_of
from longcat_pd.sizing.memory import RankMemory, stage_memory
from longcat_pd.sizing.pricing import Estimate
from longcat_pd.sizing.rates import Rates
from longcat_pd.sizing.roofline import MOST_LOOKS, decode_step, prefill

Target = Literal["prefill-ms", "decode-ms", "tokens-per-s", "context"]
COARSE_LOOKS, CLOSE_LOOKS = 3, 3  # at chunks, to order the layouts of a grid; and at how many of these in full
MOST_SPLITS = 12


@dataclass(frozen=True, kw_only=True)
class Question:
    """``answer``: tokens of an answer, of ``asked.context``; the rest is the prompt. ``usable_bytes``: of a card;
    ``host_bytes``: of a node."""

    target: Target
    asked: Asked
    answer: int
    usable_bytes: int
    host_bytes: int


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A pool of one role: what it takes, and what a rank of each of its stages needs.

    Attributes:
        estimate: of one prompt, or of one decode step with all sequences.
        lanes: ranks of the other pool.
        requests_s: that it finishes in a second, always busy.
        context: that it has room for; 0 where that was not asked for.
        score: the less the better.
    """

    role: Role
    pool: PoolConfig
    estimate: Estimate
    requests_s: float
    memory: tuple[RankMemory, ...]
    lanes: int
    context: int
    score: float

    @property
    def heaviest(self) -> RankMemory:
        """The rank that needs most of a card."""
        return max(self.memory, key=lambda rank: rank.total_bytes)

    @property
    def tiling(self) -> tuple[int, ...]:
        """The grid of its ranks."""
        parallel = self.pool.parallel
        return (parallel.pp_size, parallel.cp_size, parallel.dp_size, parallel.kvp_size)


class Search:
    """Answers for one cluster, whose configuration ``base`` is resolved, on cards of one kind."""

    def __init__(self, base: ClusterConfig, model: ModelConfig, *, rates: Rates, question: Question) -> None:
        self._base = base
        self._model = model
        self._rates = rates
        self._question = question

    def answers(self, role: Role, cards: int, *, lanes: int) -> tuple[Answer, ...]:
        """The best of every grid, the best grid first; none where nothing fits. ``lanes``: cards of the other pool."""
        found = candidates(role, self._base, cards=cards, asked=self._question.asked, model=self._model)
        by_tiling: dict[tuple[int, ...], list[Answer]] = {}
        for pool in found:
            answer = self._weighed(role, pool, lanes=lanes, most_looks=COARSE_LOOKS)
            by_tiling.setdefault(answer.tiling, []).append(answer)
        best = (self._best(tried) for tried in by_tiling.values())
        return tuple(sorted((answer for answer in best if answer is not None), key=lambda answer: answer.score))

    def own(self, role: Role) -> Answer:
        """What the configuration itself has, with room for what is asked, whether or not that fits."""
        other = pool_of(self._base, "decode" if role == "prefill" else "prefill")
        pool = completed(role, pool_of(self._base, role).parallel, self._base, asked=self._question.asked)
        return self._with_memory(self._weighed(role, pool, lanes=other.parallel.world_size * len(other.instances)))

    def fits(self, answer: Answer) -> bool:
        """Whether its ranks fit in their cards and nodes."""
        return self._have_room(answer.pool, answer.memory)

    def _have_room(self, pool: PoolConfig, memory: tuple[RankMemory, ...]) -> bool:
        """The tables of the first stage may lie in the memory of its nodes."""
        per_node = self._base.devices_per_node
        first = min(pool.parallel.stage_size, per_node)
        on_host = memory[0].machine_bytes * first + memory[-1].machine_bytes * (per_node - first)
        heaviest = max(rank.total_bytes for rank in memory)
        return heaviest <= self._question.usable_bytes and on_host <= self._question.host_bytes

    def _best(self, tried: Iterable[Answer]) -> Answer | None:
        """Of those that fit the best; the first few are looked at closely. All of them where the longest context counts."""
        if self._question.target == "context":
            known = [self._with_memory(answer) for answer in tried]
            longest = max((answer.context for answer in known), default=0)
            close = [self._again(answer) for answer in known if answer.context == longest]
        else:
            ordered = (self._with_memory(answer) for answer in sorted(tried, key=lambda answer: answer.score))
            close = [self._again(answer) for answer in islice(filter(self.fits, ordered), CLOSE_LOOKS)]
        fitting = (answer for answer in close if self.fits(answer))
        return min(fitting, key=lambda answer: (answer.score, answer.estimate.seconds), default=None)

    def _again(self, answer: Answer) -> Answer:
        exact = self._weighed(answer.role, answer.pool, lanes=answer.lanes)
        score = answer.score if self._question.target == "context" else exact.score
        return replace(exact, memory=answer.memory, context=answer.context, score=score)

    def _weighed(self, role: Role, pool: PoolConfig, *, lanes: int, most_looks: int = MOST_LOOKS) -> Answer:
        """With its times; its memory is not looked at yet. ``most_looks``: as of ``prefill``."""
        spec, asked = spec_of(self._base, role, pool), self._question.asked
        prompt = max(asked.context - self._question.answer, 1)
        if role == "prefill":
            together = max(pool.engine.max_num_batched_tokens // prompt, 1)
            times = [
                prefill(spec, self._model, rates=self._rates, prompts=count, length=prompt, most_looks=most_looks)
                for count in sorted({1, together})
            ]
            estimate, requests_s = times[0].estimate, together / times[-1].busiest_s
        else:
            estimate = decode_step(spec, self._model, rates=self._rates, sequences=asked.sequences, context=asked.context)
            each = self.tokens_a_step(pool) / estimate.seconds
            requests_s = asked.sequences * each / max(self._question.answer, 1)
        score = -requests_s if self._question.target == "tokens-per-s" else estimate.seconds
        return Answer(
            role=role,
            pool=pool,
            estimate=estimate,
            requests_s=requests_s,
            memory=(),
            lanes=lanes,
            context=0,
            score=score,
        )

    def tokens_a_step(self, pool: PoolConfig) -> float:
        """What a decode step gives each sequence."""
        return 1 + self._rates.attained.accepted * pool.engine.num_draft_tokens

    def _with_memory(self, answer: Answer) -> Answer:
        memory = self._memory(answer, answer.pool)
        if self._question.target != "context":
            return replace(answer, memory=memory)
        start, own = self._question.asked.context, pool_of(self._base, answer.role).engine.max_model_len
        most = max(start, own, self._model.max_position_embeddings)
        longest = largest(lambda context: self._has_room(answer, context), start=start, most=most)
        return replace(answer, memory=memory, context=longest, score=-float(longest))

    def _has_room(self, answer: Answer, context: int) -> bool:
        asked = replace(self._question.asked, context=context)
        pool = completed(answer.role, answer.pool.parallel, self._base, asked=asked)
        return self._have_room(pool, self._memory(answer, pool))

    def _memory(self, answer: Answer, pool: PoolConfig) -> tuple[RankMemory, ...]:
        return stage_memory(spec_of(self._base, answer.role, pool), self._model, num_lanes=answer.lanes)


def spec_of(base: ClusterConfig, role: Role, pool: PoolConfig) -> InstanceSpec:
    """An instance of a pool, as far as sizes and times follow from it."""
    nodes = -(-pool.parallel.world_size // base.devices_per_node)
    return InstanceSpec(
        name=role,
        role=role,
        host="",
        http_port=0,
        device=base.device,
        model=base.model,
        parallel=pool.parallel,
        engine=pool.engine,
        transfer=base.transfer,
        npu=base.npu,
        nodes=tuple(str(number) for number in range(nodes)),
        env=environment(base, pool, None),
    )


def splits(cards: int, per_node: int) -> Iterator[tuple[int, int]]:
    """Cards of the prefill pool and of the decode pool: whole nodes, in at most ``MOST_SPLITS`` even steps; or halves."""
    nodes = cards // per_node
    step = per_node * -(-nodes // (MOST_SPLITS + 1)) if nodes > 1 else max(cards // 2, 1)
    yield from ((first, cards - first) for first in range(step, cards, step))


def largest(holds: Callable[[int], bool], *, start: int, most: int) -> int:
    """The largest multiple of 1024 that holds, if all below it do, ``most`` at most; 0 if not even the first."""
    low, high = 0, most // 1024
    guess = max(min(start // 1024, high), 1)
    while low < high:
        if holds(guess * 1024):
            low = guess
        else:
            high = guess - 1
        guess = (low + high + 1) // 2
    return low * 1024
