"""What runs next, and what outputs mean for sequences. Pure: no event loop, no clock of its own, no rank.

One rule makes plans: prompts first, as chunks within the token budget of each group, one plan in flight for each pipeline
stage; else one step for all that decode; and one more of each, so that ranks find the next one when they end a step. What
a step brings for a sequence that an earlier one has ended is discarded; plans are executed in order, so its slot and blocks
come back with a plan behind that step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from longcat_pd.config.checks import num_shards
from longcat_pd.config.schema import EngineConfig, ParallelConfig
from longcat_pd.engine.budget import Budget
from longcat_pd.engine.plan import Admit, Phase, Segment, SlotOutput, SlotSampling, StepOutput, StepPlan
from longcat_pd.engine.request import Event, SamplingParams, TokenOutput
from longcat_pd.engine.room import Room
from longcat_pd.engine.sequence import Sequence, Stage
from longcat_pd.errors import EngineFault, InvalidRequest
from longcat_pd.kv_transfer.messages import Arrival, DraftState, Push
from longcat_pd.wire import pack

DECODE_PLANS = 2  # in flight: one that ranks compute, and the next


@dataclass
class _Todo:
    """What the next plan tells the ranks besides its segments, and what comes free when it is queued."""

    retire: list[Sequence] = field(default_factory=list)
    drop: list[Sequence] = field(default_factory=list)
    arrivals: list[Sequence] = field(default_factory=list)
    cancel_push: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.retire or self.drop or self.arrivals or self.cancel_push)


@dataclass(frozen=True)
class _Flight:
    plan: StepPlan
    sequences: dict[int, Sequence]  # by slot: the slot may have another tenant when the output comes


class Scheduler:
    """Makes numbered plans from what sequences want, and moves sequences by what ranks answer.

    ``room`` has the blocks, the slots and the line for them; others only enqueue there, admit and look.
    ``eos_token_ids`` end an answer. ``decode_plans``: steps for those that decode in flight at once.
    """

    def __init__(
        self,
        config: EngineConfig,
        parallel: ParallelConfig,
        *,
        eos_token_ids: frozenset[int],
        decode_plans: int = DECODE_PLANS,
    ) -> None:
        assert config.max_num_batched_tokens >= config.block_size, "a chunk holds at least one block"
        self.room = Room(
            config,
            num_shards=num_shards(parallel),
            num_ranks=parallel.world_size,
            num_groups=parallel.dp_size,
        )
        self._parallel = parallel
        self._config = config
        self._prefill_plans = parallel.pp_size + 1  # one for each stage, and the next
        self._decode_plans = decode_plans
        self._eos_token_ids = eos_token_ids
        self._prefilling: dict[int, Sequence] = {}  # with prompt left to schedule; by slot, in order of arrival
        self._decoding: dict[int, Sequence] = {}
        self._todo = _Todo()
        self._flights: deque[_Flight] = deque()
        self._last_step = 0

    def start_prefill(self, seq: Sequence, push: Push | None) -> None:
        """Compute the prompt from now on; ``push`` says where its cache goes."""
        assert seq.stage is Stage.HELD and seq.arrival is None
        seq.push = push
        seq.stage = Stage.PREFILLING
        self._prefilling[seq.slot] = seq

    def announce(self, seq: Sequence, arrival: Arrival) -> None:
        """A transfer will fill the blocks of this sequence."""
        assert seq.stage is Stage.HELD and seq.arrival is None
        seq.arrival = arrival
        self._todo.arrivals.append(seq)

    def start_decode(self, seq: Sequence, first: TokenOutput, draft_state: DraftState | None = None) -> None:
        """Generate behind ``first``. If that ends the answer already, the sequence is over now.

        ``draft_state``: what came with the cache of an arrival.
        """
        assert seq.stage is Stage.PREFILLED or (seq.stage is Stage.HELD and seq.is_announced), seq.stage
        num_drafts = self._config.num_draft_tokens
        assert seq.num_tokens >= seq.num_prompt_tokens + seq.request.sampling.max_tokens - 1 + num_drafts
        if seq.arrival:
            seq.draft_state = draft_state
        seq.num_scheduled = seq.num_computed = seq.num_prompt_tokens
        self.room.prefixes.computed(seq)
        seq.take(first, self._eos_token_ids)
        if seq.finish:
            self.release(seq)
            return
        seq.stage = Stage.DECODING
        self._decoding[seq.slot] = seq

    def release(self, seq: Sequence) -> None:
        """Take everything back: at once, or, if ranks know of it, with their next plan. Only the first call counts."""
        stage, seq.stage = seq.stage, Stage.ENDED
        if stage is Stage.ENDED:
            return
        if stage is Stage.WAITING:
            self.room.leave(seq)
            return
        self._prefilling.pop(seq.slot, None)
        self._decoding.pop(seq.slot, None)
        self.room.prefixes.ended(seq, stage)
        if seq.is_admitted:
            self._todo.retire.append(seq)
            if seq.push and self.room.has_open_push(seq):
                self._todo.cancel_push.append(seq.push.transfer_id)
        elif seq.is_announced:
            self._todo.drop.append(seq)
        else:
            if seq.arrival:
                self._todo.arrivals.remove(seq)
            self.room.free(seq)

    def next_plan(self, now: float) -> StepPlan | None:
        """The next plan, if there is something to tell or to compute and room for it in the pipeline."""
        phase, segments = self._choose()
        return self._make_plan(phase, segments, now) if segments or self._todo else None

    def checkpoint(self, now: float) -> StepPlan:
        """A plan that computes nothing: ranks that have answered it hold what ``Room.by_rank`` says after this call."""
        return self._make_plan("prefill", [], now)

    def apply(self, outputs: Many[StepOutput], now: float) -> list[tuple[Sequence, tuple[TokenOutput, ...]]]:
        """The ranks' answers to the oldest plan in flight; the tokens that they bring to sequences that go on till here.

        Raises EngineFault.
        """
        flight = self._flights.popleft()
        wrong = [o for o in outputs if o.step_id != flight.plan.step_id]
        if wrong:
            raise EngineFault(f"rank {wrong[0].rank} answered step {wrong[0].step_id}, not {flight.plan.step_id}")
        slots = {s.slot: s for o in outputs for s in o.slots}
        news = []
        for segment in flight.plan.segments:
            seq = flight.sequences[segment.slot]
            if seq.stage is Stage.ENDED:
                continue
            tokens: tuple[TokenOutput, ...] = ()
            if segment.is_last:
                if segment.slot not in slots:
                    raise EngineFault(f"step {flight.plan.step_id}: no token for slot {segment.slot}")
                if slots[segment.slot].fault:
                    seq.failure = _beyond_grammar(slots[segment.slot].fault)
                    self.release(seq)
                    news.append((seq, tokens))
                    continue
                tokens = _tokens(slots[segment.slot])
                seq.draft_state = slots[segment.slot].draft_state
            if flight.plan.phase == "prefill":
                self._prefilled(seq, segment, now)
            else:
                tokens = self._decoded(seq, tokens)
            news.append((seq, tokens))
        return news

    def _choose(self) -> tuple[Phase, list[Segment]]:
        computing = Counter(f.plan.phase for f in self._flights if f.plan.segments)
        if computing.total() >= max(self._prefill_plans, self._decode_plans):
            return "prefill", []
        if self._prefilling and computing["prefill"] >= self._prefill_plans:
            return "prefill", []
        if chunks := self._chunks():
            return "prefill", chunks
        if computing["decode"] >= self._decode_plans:
            return "prefill", []
        window = 1 + self._config.num_draft_tokens
        return "decode", [Segment(slot=s, start=-1, num_tokens=window, is_last=True) for s in self._going_on()]

    def _going_on(self) -> list[int]:
        """Slots that decode and do so for longer than the plans in flight: each of those brings one token at least."""
        coming = Counter(seq for f in self._flights if f.plan.phase == "decode" for seq in f.sequences.values())
        return [
            slot for slot, seq in self._decoding.items() if len(seq.outputs) + coming[seq] < seq.request.sampling.max_tokens
        ]

    def _chunks(self) -> list[Segment]:
        budgets = [Budget(self._config, self._parallel) for _ in range(self._parallel.dp_size)]
        segments = []
        for seq in self._in_order():
            budget = budgets[seq.group]  # who has to wait is not overtaken in its group
            if not budget or (not seq.is_admitted and not self.room.prefixes.begin(seq)):
                continue
            start = seq.num_scheduled
            end = budget.take(start, seq.num_prompt_tokens, seq.split)
            if end > start:
                is_last = end == seq.num_prompt_tokens
                segments.append(Segment(slot=seq.slot, start=start, num_tokens=end - start, is_last=is_last))
            if not any(budgets):
                break
        return segments

    def _in_order(self) -> list[Sequence]:
        """Those with prompt left to schedule: who has begun goes on, then the lowest priority, of equals who came first."""
        return sorted(self._prefilling.values(), key=lambda seq: (not seq.is_admitted, seq.request.priority))

    def _make_plan(self, phase: Phase, segments: list[Segment], now: float) -> StepPlan:
        todo, self._todo = self._todo, _Todo()
        sequences = {s.slot: self.room.tenant(s.slot) for s in segments}
        self._last_step += 1
        plan = StepPlan(
            step_id=self._last_step,
            phase=phase,
            admit=tuple(self._admit(s, now) for s in sequences.values() if not s.is_admitted),
            segments=tuple(segments),
            retire=tuple(s.slot for s in todo.retire),
            arrivals=tuple(s.arrival for s in todo.arrivals if s.arrival),
            drop=tuple(s.arrival.transfer_id for s in todo.drop if s.arrival),
            cancel_push=tuple(todo.cancel_push),
        )
        for seq in todo.arrivals:
            seq.is_announced = True
        for seq in todo.retire + todo.drop:
            self.room.free(seq)
        if phase == "prefill":
            self._scheduled(segments)
        self._flights.append(_Flight(plan, sequences))
        return plan

    def _scheduled(self, segments: list[Segment]) -> None:
        for segment in segments:
            self._prefilling[segment.slot].num_scheduled += segment.num_tokens
            if segment.is_last:
                del self._prefilling[segment.slot]

    def _admit(self, seq: Sequence, now: float) -> Admit:
        self.room.activate(seq)
        seq.is_admitted = True
        if not seq.arrival:
            seq.stamp(Event.PREFILL_STARTED, now)
        return Admit(
            slot=seq.slot,
            group=seq.group,
            token_ids=pack([*seq.request.prompt_token_ids, *(t.token_id for t in seq.outputs)]),
            prompt_len=seq.num_prompt_tokens,
            num_computed=seq.num_computed,
            blocks=pack(seq.blocks),
            split_start=seq.split.start,
            sampling=_for_slot(seq.request.sampling, self._eos_token_ids),
            push=seq.push,
            arrival=seq.arrival.transfer_id if seq.arrival else None,
            draft_state=seq.draft_state,
        )

    def _prefilled(self, seq: Sequence, segment: Segment, now: float) -> None:
        seq.num_computed = segment.start + segment.num_tokens
        self.room.prefixes.computed(seq)
        if segment.is_last:
            seq.stage = Stage.PREFILLED
            seq.stamp(Event.PREFILL_ENDED, now)

    def _decoded(self, seq: Sequence, tokens: tuple[TokenOutput, ...]) -> tuple[TokenOutput, ...]:
        for count, token in enumerate(tokens, start=1):
            seq.num_computed += 1
            seq.take(token, self._eos_token_ids)
            if seq.finish:
                self.release(seq)
                return tokens[:count]
        return tokens


def _for_slot(sampling: SamplingParams, eos_token_ids: frozenset[int]) -> SlotSampling:
    """What the ranks' sampler needs."""
    return SlotSampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        choice=sampling.choice,
        num_logprobs=sampling.num_logprobs,
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        ends=tuple(sorted(eos_token_ids.union(sampling.stop_token_ids))) if sampling.min_tokens else (),
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=sampling.logit_bias,
        grammar=sampling.grammar,
        num_said=sampling.num_said,
    )


def _beyond_grammar(fault: str) -> InvalidRequest:
    return InvalidRequest(f"the answer's grammar cannot be followed any further: {fault}", code="unsupported_parameter")


def _tokens(output: SlotOutput) -> tuple[TokenOutput, ...]:
    """Tokens with the log-probs that came with them."""
    return tuple(
        TokenOutput(
            token_id,
            output.logprobs[i] if output.logprobs else None,
            output.top[i] if output.top else (),
        )
        for i, token_id in enumerate(output.token_ids)
    )
