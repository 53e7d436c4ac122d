"""The product's model in this process, one rank, fed step by step: what a runner does, with all logits kept."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from longcat_pd import wire
from longcat_pd.config.schema import (
    EngineConfig,
    InstanceSpec,
    ModelSection,
    ParallelConfig,
    RankSpec,
    TransferConfig,
)
from longcat_pd.engine.inputs import InputsBuilder
from longcat_pd.engine.plan import Admit, SlotSampling
from longcat_pd.engine.rank_model import load_rank_model
from longcat_pd.engine.slots import SlotState, Span
from longcat_pd.parallel.mesh import Mesh

GREEDY = SlotSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0, num_logprobs=None)


def rank_spec(path: Path, *, dtype: str, block_size: int, num_blocks: int, num_drafts: int = 0) -> RankSpec:
    engine = EngineConfig(
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=4096,
        max_num_seqs=16,
        num_draft_tokens=num_drafts,
    )
    instance = InstanceSpec(
        name="s0",
        role="standalone",
        host="127.0.0.1",
        http_port=1,
        device="cpu",
        model=ModelSection(path=str(path), dtype=dtype),  # type: ignore[arg-type]
        parallel=ParallelConfig(layers_per_stage=()),
        engine=engine,
        transfer=TransferConfig(),
    )
    return RankSpec(
        instance=instance,
        rank=0,
        incarnation="",
        plan_endpoint="",
        output_endpoint="",
        rendezvous_host="",
        rendezvous_port=0,
    )


class SingleProcess:
    """CausalLM with its cache. Blocks are handed out in a shuffled order, so that a table is never the identity."""

    def __init__(
        self, path: Path, *, dtype: str = "float32", block_size: int = 8, num_blocks: int = 400, num_drafts: int = 0
    ) -> None:
        spec = rank_spec(path, dtype=dtype, block_size=block_size, num_blocks=num_blocks, num_drafts=num_drafts)
        loaded = load_rank_model(spec, Mesh.single())
        self.model = loaded.model
        self.block_size = block_size
        self.inputs = InputsBuilder(
            Mesh.single().cache_shard, block_size, loaded.ngram_order, loaded.device, has_draft=loaded.has_draft
        )
        self.final = torch.zeros(0)  # of the last step, behind the final norm
        self._free = list(range(1, num_blocks))
        random.Random(0).shuffle(self._free)

    def admit(self, prompt: Sequence[int], *, room: int = 0) -> SlotState:
        """A new sequence, nothing computed, with blocks for the prompt and ``room`` more tokens."""
        num_blocks = -(-(len(prompt) + room) // self.block_size)
        blocks = [self._free.pop() for _ in range(num_blocks)]
        admit = Admit(
            slot=0,
            group=0,
            token_ids=wire.pack(list(prompt)),
            prompt_len=len(prompt),
            num_computed=0,
            blocks=wire.pack(blocks),
            split_start=0,
            sampling=GREEDY,
        )
        state = SlotState(admit, 1, self.block_size)
        state.token_ids = np.append(state.token_ids, np.zeros(room, dtype=np.int64))
        return state

    def step(self, *work: tuple[SlotState, int]) -> list[Tensor]:
        """The next so many known tokens of each sequence in one packed step; their logits, [tokens, V] each."""
        spans = [Span(s, s.num_computed, s.num_computed + n, s.num_computed + n == s.num_tokens) for s, n in work]
        inputs = self.inputs.build(spans)
        with torch.inference_mode():
            hidden = self.model.forward(inputs, None, None)
            self.final = self.model.final(hidden, dataclasses.replace(inputs, output_rows=None))
            logits = self.model.logits(self.final, inputs.rows)
        for span in spans:
            span.state.num_computed = span.end
        return list(logits.split([n for _, n in work]))

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """arg-max tokens through the cache, not stopping at EOS."""
        state = self.admit(prompt, room=num_tokens)
        rows = self.step((state, len(prompt)))[0]
        for _ in range(num_tokens - 1):
            state.append(int(rows[-1].argmax()))
            rows = self.step((state, 1))[0]
        state.append(int(rows[-1].argmax()))
        return [int(token) for token in state.token_ids[len(prompt) : state.num_tokens]]
