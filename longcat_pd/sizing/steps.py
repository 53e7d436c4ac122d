"""How many rows the largest step of an instance has on one rank, and what drawing from their logits takes.

What both memory estimates, of ranks on a processor and on a card, start from.
"""

from __future__ import annotations

from dataclasses import dataclass

from longcat_pd.config.checks import chunk_rows
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, ParallelConfig

DRAW_ELEMENTS = 1 << 22  # logits that are drawn from at once (kernels/reference/sampling.py), at least one row
DRAW_BYTES = 88  # for each of them, in fp64, edited, sorted and summed up
SLOT_BYTES = (
    5  # for each slot and id of the vocabulary: how often it was generated, and what it is (engine/sampling_state.py)
)
BIAS_BYTES = 12 * 1024  # for each slot: ids that a request favours or disfavours


@dataclass(frozen=True, slots=True)
class LargestStep:
    """``rows`` of a group (in context parallel: of a rank), the ``share`` a rank hands in, rows whose token is drawn."""

    rows: int
    share: int
    sampled: int

    @classmethod
    def of(cls, spec: InstanceSpec) -> LargestStep:
        """A full window of every slot, or a full chunk, or the larger of both where one engine has them."""
        window = cls.of_decode(spec)
        if spec.role == "decode":
            return window
        chunk = chunk_rows(spec.engine, spec.parallel)
        rows = max(chunk, window.rows) if spec.role == "standalone" else chunk
        sampled = spec.engine.max_num_seqs if spec.role == "prefill" else window.sampled
        return cls(rows, -(-rows // spec.parallel.attn_tp_size), sampled)

    @classmethod
    def of_decode(cls, spec: InstanceSpec) -> LargestStep:
        """A full window of every slot, which is all that is ever compiled."""
        rows = spec.engine.max_num_seqs // spec.parallel.dp_size * (1 + spec.engine.num_draft_tokens)
        return cls(rows, -(-rows // spec.parallel.attn_tp_size), rows)


def said_bytes(spec: InstanceSpec, model: ModelConfig) -> int:
    """What each slot has said so far, to draw by."""
    slots = spec.engine.max_num_seqs // spec.parallel.dp_size + 1
    return slots * (SLOT_BYTES * model.vocab_size + BIAS_BYTES)


def logits_bytes(sampled: int, parallel: ParallelConfig, *, model: ModelConfig) -> int:
    """Of own vocabulary for the rows of all ranks of the head, whole ones for own rows, and what draws make of these."""
    handed_in = max(sampled, -(-sampled // parallel.attn_tp_size) * parallel.lmhead_tp_size)
    local = handed_in * (model.vocab_size // parallel.lmhead_tp_size)
    whole = sampled * model.vocab_size
    return (local + whole) * 4 + min(whole, DRAW_ELEMENTS) * DRAW_BYTES
