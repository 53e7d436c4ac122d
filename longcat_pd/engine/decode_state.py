"""What a rank keeps of its decoding sequences between steps: device buffers of fixed shape, a row for each own slot.

The last row belongs to padding: rows of a batch that are nobody's read and write there, and their cache entries go to block
0. Written by ``seat`` when a sequence takes its slot, and by the decode step itself; the host copies nothing in between.
Knows no plans, and of the model only what shape it wants.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longcat_pd.config.schema import EngineConfig
from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.engine.inputs import NOWHERE
from longcat_pd.engine.sampling_state import SamplingState
from longcat_pd.engine.slots import SlotState
from longcat_pd.models.batch import ForwardInputs, Rows
from longcat_pd.parallel.layout import CacheShard

_NO_TOKEN = -1  # before the start of a sequence
_PADDING_TOKENS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """Sizes of the state.

    ``num_slots`` without the padding's; ``num_columns`` of the block tables; ``num_drafts`` of a window; ``ngram_order``:
    N of the over-embedding, or 0; ``hidden_size`` of the states that the draft layer starts from; ``vocab_size`` of what is
    drawn; ``group_size``: ranks that have the same rows.
    """

    num_slots: int
    num_columns: int
    block_size: int
    num_drafts: int
    ngram_order: int
    hidden_size: int
    vocab_size: int
    group_size: int = 1

    @classmethod
    def of(
        cls,
        engine: EngineConfig,
        shard: CacheShard,
        *,
        num_groups: int,
        group_size: int = 1,
        ngram_order: int,
        hidden_size: int,
        vocab_size: int,
    ) -> DecodeShape:
        """The slots of one group, with tables that cover the longest reservation."""
        num_blocks = -(-(engine.max_model_len + engine.num_draft_tokens) // engine.block_size)
        return cls(
            num_slots=engine.max_num_seqs // num_groups,
            num_columns=-(-num_blocks // shard.num_ranks),
            block_size=engine.block_size,
            num_drafts=engine.num_draft_tokens,
            ngram_order=ngram_order,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            group_size=group_size,
        )

    @property
    def window(self) -> int:
        """Rows of a sequence in one step: the newest token and the drafts behind it."""
        return 1 + self.num_drafts

    @property
    def history(self) -> int:
        """Newest tokens that are kept: what n-grams look back to, and what the draft layer has not seen."""
        return max(self.ngram_order, self.window)


class DecodeState(nn.Module):
    """The rows of all slots. Letters: S slots with padding, B sequences of a step, W rows of each, R kept tokens."""

    def __init__(
        self,
        shape: DecodeShape,
        shard: CacheShard,
        *,
        dtype: torch.dtype,
        device: torch.device,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        super().__init__()
        self.shape = shape
        self._shard = shard
        rows = shape.num_slots + 1

        def buffer(*sizes: int, fill: float = 0, dtype: torch.dtype = torch.int64) -> nn.Buffer:
            return nn.Buffer(torch.full((rows, *sizes), fill, dtype=dtype, device=device), persistent=False)

        self.recent = buffer(shape.history)  # the newest tokens, the newest last
        self.num_tokens = buffer(fill=_PADDING_TOKENS)  # known tokens; the cache of the newest is not written
        self.blocks = buffer(shape.num_columns)
        self.starts = buffer(shape.num_columns, fill=NOWHERE)
        self.final = buffer(shape.window, shape.hidden_size, dtype=dtype)  # hidden states that were not drafted from
        self.num_final = buffer(fill=1)
        self.sampling = SamplingState(rows, shape.vocab_size, device, vocabulary=vocabulary)
        self._asking: set[int] = set()  # slots whose logits something is done to
        self._back = nn.Buffer(self._look_back(device), persistent=False)

    @property
    def padding(self) -> int:
        """The slot of rows that are nobody's."""
        return self.shape.num_slots

    @property
    def padding_length(self) -> int:
        """Tokens that such a row sees at most, as ``lengths`` of ``inputs`` has it: two that never change, and drafts."""
        return _PADDING_TOKENS + self.shape.num_drafts

    @property
    def capacity(self) -> int:
        """Positions that the tables have room for."""
        return self.shape.num_columns * self.shape.block_size * self._stride

    def seat(self, slot: int, state: SlotState, final: Tensor | None) -> None:
        """A sequence decodes from now on; ``slot`` counts those of this group.

        ``final`` [1, hidden]: hidden state of the position before its newest token.
        """
        numbers = state.held_by(self._shard.rank)[: self.shape.num_columns]
        held = len(numbers)
        self.blocks[slot].zero_()
        self.starts[slot].fill_(NOWHERE)
        self.blocks[slot, :held] = torch.from_numpy(state.blocks[numbers]).to(self.blocks.device)
        self.starts[slot, :held] = torch.from_numpy(numbers * self.shape.block_size).to(self.starts.device)
        known = state.token_ids[max(state.num_tokens - self.shape.history, 0) : state.num_tokens]
        self.recent[slot].fill_(_NO_TOKEN)
        self.recent[slot, -len(known) :] = torch.from_numpy(known).to(self.recent.device)
        self.num_tokens[slot] = state.num_tokens
        if final is not None:
            self.final[slot, :1] = final
        self.num_final[slot] = 1
        self.sampling.seat(slot, state)
        self._asking.discard(slot)
        if state.sampling.has_edits:
            self._asking.add(slot)

    def leave(self, slot: int) -> None:
        """Its sequence is gone. Its rows hold what they hold; what the host keeps of it goes."""
        self._asking.discard(slot)
        self.sampling.grammars.leave(slot)

    def asks(self, slots: Iterable[int]) -> bool:
        """Whether anything is to be done to the logits of any of these slots."""
        return not self._asking.isdisjoint(slots)

    def windows(self, line: Tensor) -> Tensor:
        """N-gram windows [B * W, N] of the last W tokens of ``line`` [B, R + W - 1]."""
        return line[:, self._back].flatten(0, 1)

    def inputs(
        self,
        slots: Tensor,
        positions: Tensor,
        *,
        lengths: tuple[int, ...],
        token_ids: Tensor,
        is_real: Tensor | None = None,
        ngram_windows: Tensor | None = None,
    ) -> ForwardInputs:
        """A batch of rows that stand at ``positions`` [B, W]; what a row that is not ``is_real`` [B, W] writes is lost.

        Args:
            lengths: the most tokens of each sequence that a row can see; () where a graph has room for the longest.
        """
        batch, width = positions.shape
        tables, starts = self.blocks[slots], self.starts[slots]
        return ForwardInputs(
            token_ids=token_ids.flatten(),
            positions=positions.clamp(max=self.capacity - 1).flatten(),  # a late window may lie beyond the reservation
            row_seqs=torch.arange(batch, device=slots.device).unsqueeze(1).expand(-1, width).flatten(),
            slot_mapping=self._places(tables, starts, positions, is_real).flatten(),
            ngram_windows=ngram_windows,
            cu_seqlens_q=tuple(range(0, (batch + 1) * width, width)),
            kv_lens=lengths or (self.capacity,) * batch,
            block_tables=tables,
            block_starts=starts,
            table_stride=self._stride,
            gather_blocks=None,
            output_rows=None,
            rows=Rows.even(batch * width, self.shape.group_size),
            outputs=Rows.even(batch * width, self.shape.group_size),
            is_whole=not lengths,
        )

    @property
    def _stride(self) -> int:
        return self._shard.num_ranks

    def _places(self, tables: Tensor, starts: Tensor, positions: Tensor, is_real: Tensor | None) -> Tensor:
        """Where cache entries are written; inside block 0 where the block is not kept here, or is nobody's."""
        size = self.shape.block_size
        numbers = positions // size
        columns = (numbers // self._stride).clamp(max=self.shape.num_columns - 1)
        is_kept = starts.gather(1, columns) == numbers * size
        if is_real is not None:
            is_kept = is_kept & is_real
        return torch.where(is_kept, tables.gather(1, columns), 0) * size + positions % size

    def _look_back(self, device: torch.device) -> Tensor:
        """[W, N]: places in a line of R + W - 1 tokens; row i's own token is W - i from its end."""
        shape = self.shape
        own = torch.arange(shape.window, device=device).unsqueeze(1) + shape.history - 1
        return own - torch.arange(shape.ngram_order, device=device)


def put(rows: Tensor, slots: Tensor, values: Tensor) -> None:
    """``rows[slots] = values``, in a form that every graph compiler takes."""
    index = slots.view(-1, *[1] * (values.dim() - 1)).expand_as(values)
    rows.copy_(rows.scatter(0, index, values))
