"""The batch as one rank sees it. Filled by ``engine/inputs.py`` (prompts) and ``engine/decode_state.py`` (windows), read by
the models; plain tensors, no requests.

Letters: T rows (query tokens) of this rank, B sequences, M table columns, N n-gram order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows there are, of a step or of its outputs, and what a rank hands in where rows of several ranks meet.

    Attributes:
        num: rows of this rank's group, which all ranks of ``attn_tp`` have; in context parallel those of this rank alone.
        share: rows that every rank of the stage hands in, the same number on all of them: of ``num`` rows the rank at place
            r of ``attn_tp`` hands in ``r * share ... (r + 1) * share - 1``, with zeros for what is missing. 0 only if no
            rank of the stage has a row.
        is_split: between attentions a rank of ``attn_tp`` keeps its share only (sequence parallel), not all rows.
    """

    num: int
    share: int
    is_split: bool = False

    @classmethod
    def even(cls, num: int, group_size: int) -> Rows:
        """Rows of a step in which all groups have equally many."""
        return cls(num, -(-num // group_size))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardInputs:
    """One step's rows, packed sequence after sequence.

    ``block_tables[s, j]`` is a block of the *visible cache*: of this rank's cache tensors (LocalKV, PartitionedKV) or of
    the gathered buffer (GatheredKV: ``rank * num_gather + i`` is the i-th block that ``rank`` contributed). The block with
    number b of sequence s stands in column ``b // table_stride``; ``block_starts[s, j]`` is the position of the block's
    first token, or a number above every position for columns that hold nothing. ``table_stride`` is 1 except for
    PartitionedKV, where the table lists only the blocks that this rank holds and the stride is the number of ranks (one
    block of every round of BlockSplit lies on each rank).

    ``kv_lens`` is the same on all ranks that share the sequences, also on one without rows: it decides whether keys are
    selected, and with that which collectives run.

    Padding rows are sequences of their own that hold nothing: tables of nothing, slots in block 0, outputs ignored.
    """

    token_ids: torch.Tensor  # [T] int64
    positions: torch.Tensor  # [T] int64
    row_seqs: torch.Tensor  # [T] int64, index of the row's sequence in the batch
    slot_mapping: (
        torch.Tensor
    )  # [T] int64, block * block_size + offset in this rank's cache; inside block 0 if not kept here
    ngram_windows: torch.Tensor | None  # [T, N] int64: t_i, t_{i-1}, ...; -1 before the start of the sequence
    cu_seqlens_q: tuple[int, ...]  # B + 1 row offsets
    kv_lens: tuple[int, ...]  # B: tokens of the sequence known to the cache after this step
    block_tables: torch.Tensor  # [B, M] int64
    block_starts: torch.Tensor  # [B, M] int64
    table_stride: int
    gather_blocks: torch.Tensor | None  # [num_gather] int64 local block ids to contribute, padded with 0; GatheredKV only
    output_rows: torch.Tensor | None  # [R] int64: rows of this rank whose logits are wanted; None: all
    rows: Rows  # of the T rows
    outputs: Rows  # of the R output rows, which in context parallel all ranks of cp have
    next_token_ids: torch.Tensor | None = None  # [T] int64, t_{i+1} (0: not known); where the draft layer takes these rows
    is_whole: bool = False  # kv_lens is what tables have room for: operators find in the tables how much there is
