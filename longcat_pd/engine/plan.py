"""Everything that crosses between a driver and its ranks: numbered plans one way, outputs and events the other.

Plain records without tensors. Every rank executes every plan exactly once, in the order of ``step_id`` (1, 2, ...); a gap
is a fault. A plan without segments computes nothing: it only admits, retires, or announces arrivals. Token ids and block
lists travel as little-endian int32 ``bytes`` (``wire.pack`` / ``unpack``).

Order inside one plan: retire, drop and cancel_push, arrivals, admit, segments. Blocks of a dropped arrival are given to
nobody before a later plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from longcat_pd.faults import FaultOrder
from longcat_pd.kv_transfer.messages import Arrival, DraftState, Push, TransferClosed
from longcat_pd.progress.steps import Step
from longcat_pd.wire import Codec

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSampling:
    """What a rank's sampler needs of SamplingParams.

    ``ends``: the ids that are not drawn before ``min_tokens`` are generated. ``num_said``: so many ids at the end of the
    prompt belong to the answer.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    choice: int
    num_logprobs: int | None
    min_p: float = 0.0
    min_tokens: int = 0
    ends: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: str = ""
    num_said: int = 0

    @property
    def has_edits(self) -> bool:
        """Whether tokens are drawn from other logits than the model's."""
        has_penalty = self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0
        return has_penalty or self.min_tokens > 0 or bool(self.logit_bias) or bool(self.grammar)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admit:
    """A sequence takes a slot of one group.

    ``token_ids``: all ids known so far (the prompt; at the decode side prompt + first generated token).
    ``num_computed``: leading tokens whose cache is already there (a shared prefix; the prompt's length after a hand-over).
    ``blocks[b]``: local id of block number b in the shard that BlockSplit(n, block_size, split_start) names; covers the
    whole reservation. ``arrival``: the announced transfer whose blocks become this sequence's (decode side), and
    ``draft_state`` what its commit brought for the first drafts.
    """

    slot: int
    group: int
    token_ids: bytes
    prompt_len: int
    num_computed: int
    blocks: bytes
    split_start: int
    sampling: SlotSampling
    push: Push | None = None
    arrival: str | None = None
    draft_state: DraftState | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Consecutive query tokens of one sequence.

    Prefill: ``start`` and ``num_tokens`` in positions of the sequence; a segment that is not ``is_last`` ends at a block
    border; the last one yields a sampled token. Decode: a window of one new token, which the rank knows, and drafts, which
    it makes; ``start`` is -1.
    """

    slot: int
    start: int
    num_tokens: int
    is_last: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """What all ranks of an instance do next. ``retire`` frees slots, ``drop`` ends arrivals that never took a slot."""

    step_id: int
    phase: Phase
    admit: tuple[Admit, ...] = ()
    segments: tuple[Segment, ...] = ()
    retire: tuple[int, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    drop: tuple[str, ...] = ()  # transfer ids whose reserved blocks go back
    cancel_push: tuple[str, ...] = ()  # transfer ids whose remaining sends are given up


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """The last message to a rank: end after the plans before it. Sent on the plans' socket."""


PlanMessage = StepPlan | Stop | FaultOrder  # the last only where ``faults`` is set


def plan_codec() -> Codec[PlanMessage]:
    """Of what a driver tells its ranks."""
    return Codec(StepPlan, Stop, FaultOrder)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotOutput:
    """Sampled tokens of one slot, in order, with log-probs where asked for (``top``: id, log-prob; best first).

    All but the last were drafts, of which the window had ``num_drafts``. ``draft_state``: with the first token of a
    sequence that is pushed, for the drafts of the decode side. ``fault``: why this answer cannot go on; its tokens count
    for nothing.
    """

    slot: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    num_drafts: int = 0
    draft_state: DraftState | None = None
    fault: str = ""


class AxisCollectives(NamedTuple):
    """How many collectives a rank has entered along an axis, and a digest of their kinds in order.

    A tuple, because those of all ranks are compared behind every step.
    """

    axis: str
    entered: int
    digest: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RankAccounts:
    """A rank's own count of what it holds, from the plans that it executed (/debug/accounting)."""

    rank: int
    blocks_total: int = 0  # block 0 not counted
    blocks_reserved: int = 0
    blocks_live: int = 0
    blocks_quarantined: int = 0
    slots_total: int = 0
    slots_used: int = 0
    lanes_posted: int = 0
    lanes_unsent: int = 0
    compilations: int = 0  # since the rank began; a step that serves adds none
    collectives: tuple[AxisCollectives, ...] = ()  # equal on all ranks of a process group after the same plan
    stands_in: str = ""  # the axis along which the rank waits for others at this moment

    @property
    def blocks_free(self) -> int:
        """What is in none of the other states."""
        return self.blocks_total - self.blocks_reserved - self.blocks_live - self.blocks_quarantined


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Answer of one rank to one plan. ``slots`` only from the reporting rank (see ``Executor``); others acknowledge.

    ``compute_ms``: how long a decode step took. ``waited_ms``: how long the rank stood still before it though it was due
    (``rank.StepWatch``). Both 0 for other plans, and where nobody measures.
    """

    step_id: int
    rank: int
    slots: tuple[SlotOutput, ...] = ()
    fault: str | None = None
    accounts: RankAccounts | None = None
    waited_ms: float = 0.0
    compute_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Heartbeat:
    """Sent by every rank each second, also while a step computes; the driver's measure of silence."""

    rank: int
    step_id: int  # step in work, 0 when idle
    accounts: RankAccounts


@dataclass(frozen=True, kw_only=True, slots=True)
class RankReady:
    """A rank has loaded its weights and joined its groups. ``memory``: bytes that it allocated, by part (``footprint``).

    ``torch``: its version.
    ``load_s``: seconds until its weights were there, ``warm_s``: from then on, compiling above all.
    """

    rank: int
    load_s: float
    weight_bytes: int
    num_blocks: int
    cache_entries: tuple[tuple[str, int, str], ...]  # name, width, data type: must be equal in both pools (by name)
    model_digest: str
    accounts: RankAccounts
    memory: tuple[tuple[str, int], ...] = ()
    torch: str = ""
    warm_s: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProgress:
    """How far a rank is before it is ready (``progress.steps.Tell``)."""

    rank: int
    step: Step
    done: int
    total: int


RankMessage = RankReady | RankProgress | Heartbeat | StepOutput | TransferClosed
RANK_MESSAGES: tuple[type[RankMessage], ...] = get_args(RankMessage)
