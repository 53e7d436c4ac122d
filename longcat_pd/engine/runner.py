"""ModelRunner: executes plans on one rank. Knows slots and the pipeline's neighbours; no requests, queues or peers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.handover import Handover
from longcat_pd.engine.inputs import InputsBuilder
from longcat_pd.engine.plan import Admit, RankAccounts, RankReady, SlotOutput, StepOutput, StepPlan
from longcat_pd.engine.rank_model import RankModel, load_rank_model
from longcat_pd.engine.slots import SlotState, Span
from longcat_pd.engine.speculative import DraftSource, ModelDrafts, settled, unpacked
from longcat_pd.kv_transfer.sides import ArrivalSide, PushSide
from longcat_pd.parallel.collectives import PendingSend
from longcat_pd.parallel.mesh import Mesh


class ModelRunner:
    """One rank's execution of plans: in order, each once, from one thread.

    Args:
        spec: what this rank is told.
        mesh: its place among the ranks of the instance.
        loaded: model and cache; read from ``spec``'s checkpoint when not given.
        push, arrival: the lanes of a hand-over (see ``Handover``).
        drafts: where drafts come from, if not from the checkpoint's draft layer.
    """

    def __init__(
        self,
        spec: RankSpec,
        mesh: Mesh,
        *,
        loaded: RankModel | None = None,
        push: PushSide | None = None,
        arrival: ArrivalSide | None = None,
        drafts: DraftSource | None = None,
    ) -> None:
        self._spec = spec
        self._mesh = mesh
        self._loaded = loaded or load_rank_model(spec, mesh)
        self.cache = self._loaded.cache
        self._handover = Handover(push, arrival)
        self._inputs = InputsBuilder(
            mesh.cache_shard,
            self.cache.block_size,
            self._loaded.ngram_order,
            self._loaded.device,
            has_draft=self._loaded.has_draft,
        )
        self._drafts = drafts or ModelDrafts(self._loaded.model, self._inputs)
        self._slots: dict[int, SlotState] = {}
        self._blocks_live = 0
        self._last_step = 0
        self._sending: PendingSend | None = None

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
        )

    def accounts(self) -> RankAccounts:
        """What this rank holds, from the plans that it executed and from its lanes. May be called from any thread."""
        lanes = self._handover.counts()
        return RankAccounts(
            rank=self._spec.rank,
            blocks_total=self.cache.num_blocks - 1,
            blocks_reserved=lanes.reserved_blocks,
            blocks_live=self._blocks_live,
            blocks_quarantined=lanes.quarantined_blocks,
            slots_total=self._spec.instance.engine.max_num_seqs // self._mesh.axis("dp").size,
            slots_used=len(self._slots),
            lanes_posted=lanes.posted,
            lanes_unsent=lanes.unsent,
        )

    def execute(self, plan: StepPlan) -> StepOutput:
        """Retire, drop and cancel, announce, admit, compute. What is wrong with a plan or a step is an exception."""
        assert plan.step_id == self._last_step + 1, f"plan {plan.step_id} after plan {self._last_step}"
        self._last_step = plan.step_id
        for slot in plan.retire:
            self._retire(self._slots.pop(slot))
        self._handover.apply(plan)
        for admit in plan.admit:
            self._admit(admit)
        with torch.inference_mode():
            outputs = self._compute([Span.of(s, self._slots[s.slot]) for s in plan.segments]) if plan.segments else ()
        return StepOutput(
            step_id=plan.step_id,
            rank=self._spec.rank,
            slots=outputs if self._mesh.layout.is_reporting(self._mesh.rank) else (),
            accounts=self.accounts(),
        )

    def close(self) -> None:
        """Lets the last message to the next stage leave, and ends the lanes."""
        if self._sending is not None:
            self._sending.wait()
        self._handover.close()

    def _admit(self, admit: Admit) -> None:
        assert admit.slot not in self._slots, f"slot {admit.slot} is taken"
        assert admit.group == self._mesh.coordinate("dp"), f"slot {admit.slot} is of group {admit.group}"
        state = SlotState(admit, self._mesh.cache_shard.num_ranks, self.cache.block_size)
        if admit.draft_state is not None:
            like = torch.empty(0, dtype=self._loaded.dtype, device=self._loaded.device)
            state.undrafted = unpacked(admit.draft_state, like)
        self._slots[admit.slot] = state
        self._blocks_live += self._num_held(state)
        self._handover.admit(admit)

    def _retire(self, state: SlotState) -> None:
        self._blocks_live -= self._num_held(state)
        if state.push is not None:
            self._handover.retire(state.push)

    def _num_held(self, state: SlotState) -> int:
        return len(state.held_by(self._mesh.cache_shard.rank))

    def _compute(self, spans: Sequence[Span]) -> tuple[SlotOutput, ...]:
        """One forward step of this stage; the last stage samples. Windows get their drafts first."""
        for num_drafts in sorted({span.num_drafts for span in spans} - {0}):
            self._drafts.propose([span.state for span in spans if span.num_drafts == num_drafts], num_drafts)
        inputs = self._inputs.build(spans)
        pp = self._mesh.axis("pp")
        hidden = self._received(len(inputs.token_ids)) if pp.rank else None
        hidden = self._loaded.model.forward(inputs, hidden, self._handover.layer_hook(spans))
        for span in spans:
            span.state.num_computed = span.end
        if pp.rank < pp.size - 1:
            self._pass_on(hidden)
            return ()
        wanting = [span for span in spans if span.wants_token]
        if not wanting:
            return ()
        final = self._loaded.model.final(hidden, inputs.output_rows)
        logits = self._loaded.model.logits(final)
        return settled(final, logits, wanting, ops=self._loaded.ops, has_draft=self._loaded.has_draft)

    def _received(self, num_rows: int) -> torch.Tensor:
        pp = self._mesh.axis("pp")
        return pp.recv((num_rows, self._loaded.hidden_size), self._loaded.dtype, pp.rank - 1)

    def _pass_on(self, hidden: torch.Tensor) -> None:
        """Sends to the next stage while this one goes on with the next plan; one message at most is on its way."""
        pp = self._mesh.axis("pp")
        if self._sending is not None:
            self._sending.wait()
        self._sending = pp.start_send(hidden, pp.rank + 1)
