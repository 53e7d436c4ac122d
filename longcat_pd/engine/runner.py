"""ModelRunner: executes plans on one rank. Knows slots and the pipeline's neighbours; no requests, queues or peers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.decoding import Decoder, slot_output
from longcat_pd.engine.handover import Handover, packed, unpacked
from longcat_pd.engine.inputs import InputsBuilder
from longcat_pd.engine.plan import Admit, RankAccounts, RankReady, Segment, SlotOutput, StepOutput, StepPlan
from longcat_pd.engine.rank_model import RankModel, load_rank_model
from longcat_pd.engine.sampler import SamplingRows, sample
from longcat_pd.engine.slots import SlotState, Span
from longcat_pd.engine.speculative import MakeDrafts, ModelDrafts
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
        self.cache = self._loaded.cache
        self._handover = Handover(push, arrival)
        self._inputs = InputsBuilder(
            mesh.cache_shard,
            self.cache.block_size,
            self._loaded.ngram_order,
            self._loaded.device,
            has_draft=self._loaded.has_draft,
        )
        # a rank that has some of the layers, or sees other ranks' rows, computes prompts only
        can_decode = mesh.axis("pp").size == 1 and mesh.cache_shard.access != "gathered"
        self._decoder = Decoder(spec, mesh, self._loaded, make_drafts) if can_decode else None
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
            outputs = self._compute(plan.segments)
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
        if admit.num_computed >= admit.prompt_len:
            self._seat(state, unpacked(admit.draft_state, self._like()) if admit.draft_state else None)
        self._slots[admit.slot] = state
        self._blocks_live += self._num_held(state)
        self._handover.admit(admit)

    def _retire(self, state: SlotState) -> None:
        self._blocks_live -= self._num_held(state)
        if state.push is not None:
            self._handover.retire(state.push)

    def _num_held(self, state: SlotState) -> int:
        return len(state.held_by(self._mesh.cache_shard.rank))

    def _seat(self, state: SlotState, final: torch.Tensor | None) -> None:
        """A sequence's prompt is computed here, or its cache has arrived."""
        if self._decoder is not None and state.push is None:
            self._decoder.seat(state, final)

    def _compute(self, segments: Sequence[Segment]) -> tuple[SlotOutput, ...]:
        """One step of this stage; the last stage samples. Of a decode segment the device knows where it starts."""
        spans = [Span.of(s, self._slots[s.slot]) for s in segments if s.start >= 0]
        windows = [self._slots[s.slot] for s in segments if s.start < 0]
        outputs = self._prompts(spans) if spans else ()
        if windows:
            assert self._decoder is not None, "a decode segment at a rank that computes prompts only"
            outputs += self._decoder.step(windows)
        return outputs

    def _prompts(self, spans: Sequence[Span]) -> tuple[SlotOutput, ...]:
        inputs = self._inputs.build(spans)
        pp = self._mesh.axis("pp")
        hidden = self._received(len(inputs.token_ids)) if pp.rank else None
        hidden = self._loaded.model.forward(inputs, hidden, self._handover.layer_hook(spans))
        for span in spans:
            span.state.num_computed = span.end
        if pp.rank < pp.size - 1:
            self._pass_on(hidden)
            return ()
        wanting = [span.state for span in spans if span.wants_token]
        return self._first_tokens(self._loaded.model.final(hidden, inputs.output_rows), wanting) if wanting else ()

    def _first_tokens(self, final: torch.Tensor, states: Sequence[SlotState]) -> tuple[SlotOutput, ...]:
        """Draws the token behind each prompt, from the final hidden states [R, hidden] of their last positions."""
        logits = self._loaded.model.logits(final)
        rules = SamplingRows.of([state.sampling for state in states], logits.device)
        places = torch.tensor([state.num_tokens for state in states], device=logits.device)
        outputs = []
        for row, (state, token) in enumerate(zip(states, sample(logits, rules, places, self._loaded.ops).tolist(), strict=True)):
            state.append(token)
            self._seat(state, final[row : row + 1])
            output = slot_output(state, [token], logits[row : row + 1])
            has_heir = self._loaded.has_draft and state.push is not None
            outputs.append(replace(output, draft_state=packed(final[row : row + 1])) if has_heir else output)
        return tuple(outputs)

    def _like(self) -> torch.Tensor:
        return torch.empty(0, dtype=self._loaded.dtype, device=self._loaded.device)

    def _received(self, num_rows: int) -> torch.Tensor:
        pp = self._mesh.axis("pp")
        return pp.recv((num_rows, self._loaded.hidden_size), self._loaded.dtype, pp.rank - 1)

    def _pass_on(self, hidden: torch.Tensor) -> None:
        """Sends to the next stage while this one goes on with the next plan; one message at most is on its way."""
        pp = self._mesh.axis("pp")
        if self._sending is not None:
            self._sending.wait()
        self._sending = pp.start_send(hidden, pp.rank + 1)
