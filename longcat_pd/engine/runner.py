"""ModelRunner: executes plans on one rank. Knows slots and the pipeline's neighbours; no requests, queues or peers.

Every rank is given the plans of the whole instance: it has the sequences of its own group, and computes in every step, in
the shape that the steps of all groups have together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.decoding import Decoder, slot_output
from longcat_pd.engine.handover import Handover, packed, unpacked
from longcat_pd.engine.plan import (
    Admit,
    AxisCollectives,
    RankAccounts,
    RankReady,
    Segment,
    SlotOutput,
    SlotSampling,
    StepOutput,
    StepPlan,
)
from longcat_pd.engine.prompts import FirstToken, PromptStage
from longcat_pd.engine.rank_model import RankModel, load_rank_model
from longcat_pd.engine.slots import GroupSlots, SlotState, Span, candidates_wanted
from longcat_pd.engine.speculative import MakeDrafts, ModelDrafts
from longcat_pd.kv_transfer.sides import ArrivalSide, PushSide
from longcat_pd.parallel.mesh import Mesh


class ModelRunner:
    """One rank's execution of plans: in order, each once, from one thread.

    Args:
        spec: what this rank is told.
        mesh: its place among the ranks of the instance.
        loaded: model and cache; read from ``spec``'s checkpoint when not given.
        push, arrival: the lanes of a hand-over (see ``Handover``).
        make_drafts: where drafts come from: the checkpoint's draft layer unless told.
    """

    def __init__(
        self,
        spec: RankSpec,
        mesh: Mesh,
        *,
        loaded: RankModel | None = None,
        push: PushSide | None = None,
        arrival: ArrivalSide | None = None,
        make_drafts: MakeDrafts = ModelDrafts,
    ) -> None:
        self._spec = spec
        self._mesh = mesh
        self._loaded = loaded or load_rank_model(spec, mesh)
        self._loaded_at = time.monotonic()
        self.cache = self._loaded.cache
        self._handover = Handover(push, arrival)
        num_groups = mesh.layout.axis("dp").size
        num_slots = spec.instance.engine.max_num_seqs // num_groups
        self._group = GroupSlots(num_slots, num_groups, mesh.coordinate("dp"))
        self._prompts = PromptStage(self._loaded, mesh)
        # a rank that has some of the layers, or sees other ranks' rows, computes prompts only
        can_decode = mesh.axis("pp").size == 1 and mesh.cache_shard.access != "gathered"
        self._decoder = (
            Decoder(spec, mesh, loaded=self._loaded, group=self._group, make_drafts=make_drafts) if can_decode else None
        )
        self._slots: dict[int, SlotState] = {}
        self._rules: dict[int, SlotSampling] = {}  # of the slots of all groups
        self._live: Counter[int] = Counter()  # blocks of slots, by how many slots have them
        self._last_step = 0

    def ready(self) -> RankReady:
        """What the driver is told before the first plan."""
        return RankReady(
            rank=self._spec.rank,
            load_s=self._loaded.load_s,
            weight_bytes=self._loaded.weight_bytes,
            num_blocks=self.cache.num_blocks,
            cache_entries=tuple(
                (entry.name, entry.width, str(entry.dtype).removeprefix("torch.")) for entry in self.cache.spec.entries
            ),
            model_digest=self._loaded.model_digest,
            accounts=self.accounts(),
            memory=self._loaded.memory,
            torch=str(torch.__version__),
            warm_s=time.monotonic() - self._loaded_at,
        )

    def accounts(self) -> RankAccounts:
        """What this rank holds, from the plans that it executed and from its lanes. May be called from any thread."""
        lanes = self._handover.counts()
        return RankAccounts(
            rank=self._spec.rank,
            blocks_total=self.cache.num_blocks - 1,
            blocks_reserved=lanes.reserved_blocks,
            blocks_live=len(self._live),
            blocks_quarantined=sum(block not in self._live for block in lanes.quarantined),
            slots_total=self._group.num_slots,
            slots_used=len(self._slots),
            lanes_posted=lanes.posted,
            lanes_unsent=lanes.unsent,
            compilations=self._decoder.forms.num_compilations if self._decoder is not None else 0,
            collectives=tuple(
                AxisCollectives(axis=axis, entered=traffic.num_collectives, digest=traffic.digest)
                for axis, traffic in list(self._mesh.traffic.axes.items())
                if traffic.num_collectives  # and not messages alone
            ),
            stands_in=self._mesh.traffic.stands_in,
        )

    def execute(self, plan: StepPlan) -> StepOutput:
        """Retire, drop and cancel, announce, admit, compute. What is wrong with a plan or a step is an exception."""
        assert plan.step_id == self._last_step + 1, f"plan {plan.step_id} after plan {self._last_step}"
        self._last_step = plan.step_id
        for slot in filter(self._group.is_own, plan.retire):
            self._retire(self._slots.pop(slot))
        self._handover.apply(plan)
        for arrival in plan.arrivals:
            if arrival.group == self._group.own:
                self._loaded.expect(arrival.grammar)
        for admit in plan.admit:
            self._rules[admit.slot] = admit.sampling
            if self._group.is_own(admit.slot):
                self._admit(admit)
        with torch.inference_mode():
            outputs = self._compute(plan.segments)
        return StepOutput(
            step_id=plan.step_id,
            rank=self._spec.rank,
            slots=outputs if self._mesh.layout.is_reporting(self._mesh.rank) else (),
            accounts=self.accounts(),
        )

    def close(self) -> None:
        """Lets the last message to the next stage leave, and ends the lanes."""
        self._prompts.close()
        self._handover.close()

    def _admit(self, admit: Admit) -> None:
        assert admit.slot not in self._slots, f"slot {admit.slot} is taken"
        assert admit.group == self._group.own, f"slot {admit.slot} is not one of group {admit.group}"
        self._loaded.expect(admit.sampling.grammar)
        state = SlotState(admit, self._mesh.cache_shard.num_ranks, self.cache.block_size)
        if admit.num_computed >= admit.prompt_len:
            like = torch.empty(0, dtype=self._loaded.dtype, device=self._loaded.device)
            self._seat(state, unpacked(admit.draft_state, like) if admit.draft_state else None)
        self._slots[admit.slot] = state
        self._live.update(self._held(state))
        self._handover.admit(admit)

    def _retire(self, state: SlotState) -> None:
        self._live.subtract(self._held(state))
        for block in self._held(state):
            if not self._live[block]:
                del self._live[block]
        if state.push is not None:
            self._handover.retire(state.push)
        if self._decoder is not None:
            self._decoder.leave(state)

    def _held(self, state: SlotState) -> list[int]:
        held: list[int] = state.blocks[state.held_by(self._mesh.cache_shard.rank)].tolist()
        return held

    def _compute(self, segments: Sequence[Segment]) -> tuple[SlotOutput, ...]:
        """One step. A prompt's segment says where it is; where a decoding sequence is, the device knows."""
        prompts = [segment for segment in segments if segment.start >= 0]
        windows = [segment for segment in segments if segment.start < 0]
        outputs = self._prefill(prompts) if prompts else ()
        return outputs + self._decode(windows) if windows else outputs

    def _prefill(self, segments: Sequence[Segment]) -> tuple[SlotOutput, ...]:
        spans = [Span.of(s, self._slots[s.slot]) for s in segments if self._group.is_own(s.slot)]
        firsts = self._prompts.compute(
            spans,
            self._group.load(segments),
            self._handover.layer_hook(spans),
            num_candidates=self._candidates(s.slot for s in segments if s.is_last),
        )
        return tuple(self._started(first) for first in firsts)

    def _decode(self, segments: Sequence[Segment]) -> tuple[SlotOutput, ...]:
        assert self._decoder is not None, "a decode segment at a rank that computes prompts only"
        states = [self._slots[s.slot] for s in segments if self._group.is_own(s.slot)]
        num_candidates = self._candidates(segment.slot for segment in segments)
        return self._decoder.step(states, self._group.most_seqs(segments), num_candidates=num_candidates)

    def _candidates(self, slots: Iterable[int]) -> int:
        """The same on all ranks, whose logits meet. Of a whole head all logits are here anyhow."""
        is_split = self._loaded.model.has_split_head
        return candidates_wanted(self._rules[slot] for slot in slots) if is_split else 0

    def _started(self, first: FirstToken) -> SlotOutput:
        """A prompt is computed: its sequence decodes here, or where its cache goes."""
        output = slot_output(first.state, [first.token_id], first.logits, fault=first.fault)
        if first.state.push is None:
            self._seat(first.state, first.final)
        elif self._loaded.has_draft:
            return replace(output, draft_state=packed(first.final))
        return output

    def _seat(self, state: SlotState, final: torch.Tensor | None) -> None:
        if self._decoder is not None:
            self._decoder.seat(state, final)
