"""The ranks of one group as threads of one process: a model on each, exchanging through shared lists.

For tests of the model alone: no processes, no torch.distributed, no engine but its batch builder.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from longcat_pd import kernels, wire
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine.inputs import InputsBuilder
from longcat_pd.engine.plan import Admit, SlotSampling
from longcat_pd.engine.slots import SlotState, Span
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_cache.spec import CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.context import ModelContext
from longcat_pd.models.weights import load_weights
from longcat_pd.parallel.layout import CacheShard, ParallelLayout
from longcat_pd.parallel.mesh import Mesh

R = TypeVar("R")
ACCESS_OF = {"cp": "gathered", "kvp": "partitioned"}
PLAIN = SlotSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0, num_logprobs=None)


class ThreadGroup:
    """What the members of a group have put down for the exchange in work."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=120)
        self.items: list[Any] = [None] * size

    def exchange(self, rank: int, item: Any) -> list[Any]:
        self.items[rank] = item
        self.barrier.wait()
        items = list(self.items)
        self.barrier.wait()
        return items


class ThreadAxis:
    """The interface of AxisGroup over a ThreadGroup. Refuses shapes that differ between ranks."""

    def __init__(self, name: str, group: ThreadGroup, rank: int) -> None:
        self.name, self.size, self.rank = name, group.size, rank
        self._group = group

    def all_gather(self, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat(self._items(x), dim)

    def all_reduce(self, x: Tensor) -> Tensor:
        return torch.stack(self._items(x)).sum(0)

    def all_to_all(self, x: Tensor, dim: int = 0) -> Tensor:
        return torch.cat([item.chunk(self.size, dim)[self.rank] for item in self._items(x)], dim)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.stack([item.chunk(self.size)[self.rank] for item in self._items(x)]).sum(0)

    def all_to_all_rows(self, x: Tensor, out: Sequence[int], into: Sequence[int]) -> Tensor:
        assert sum(out) == len(x)
        sent = self._group.exchange(self.rank, (list(out), torch.split(x, list(out))))
        assert [counts[self.rank] for counts, _ in sent] == list(into)
        return torch.cat([parts[self.rank] for _, parts in sent])

    def _items(self, x: Tensor) -> list[Tensor]:
        items = self._group.exchange(self.rank, x)
        assert len({(item.shape, item.dtype) for item in items}) == 1, [item.shape for item in items]
        return items


class ThreadMesh:
    """One rank's place: axes that are named have a ThreadAxis, all others are of size 1."""

    def __init__(self, axes: dict[str, ThreadAxis]) -> None:
        self._axes = axes
        self._single = Mesh.single()

    def axis(self, name: Any) -> Any:
        return self._axes.get(name) or self._single.axis(name)


def thread_meshes(parallel: ParallelConfig) -> list[ThreadMesh]:
    """One mesh for each rank of a layout, whose ranks are threads."""
    layout = ParallelLayout.of(parallel)
    groups = {(axis.name, ranks): ThreadGroup(axis.size) for axis in layout.axes for ranks in layout.groups(axis.name)}

    def axes(rank: int) -> dict[str, ThreadAxis]:
        found = {}
        for axis in layout.axes:
            if axis.size > 1:
                group = groups[axis.name, layout.group_of(rank, axis.name)]
                found[axis.name] = ThreadAxis(axis.name, group, layout.coordinate(rank, axis.name))
        return found

    return [ThreadMesh(axes(rank)) for rank in range(layout.world_size)]


@dataclass(frozen=True)
class Piece:
    """Tokens ``start ... end - 1`` of sequence number ``seq`` in one step."""

    seq: int
    start: int
    end: int


class Ranks:
    """A checkpoint on the ranks of one group (``axis``: cp, kvp or none), and the sequences that they work on.

    Blocks of every rank are handed out in a scrambled order, so that nothing works by accident of equal numbers.
    """

    def __init__(
        self,
        path: Path,
        sequences: Sequence[Sequence[int]],
        *,
        axis: str | None = None,
        size: int = 1,
        block_size: int = 8,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.config = ModelConfig.load(path)
        self.size = size
        self._sequences = sequences
        self._block_size = block_size
        splits = [BlockSplit.for_prompt(size, block_size, tokens[:block_size]) for tokens in sequences]
        self.splits = splits
        num_blocks = 2 + sum(-(-len(tokens) // block_size) for tokens in sequences)
        group = ThreadGroup(size)
        self.members = [self._member(path, axis, rank, group, num_blocks, dtype) for rank in range(size)]
        self.blocks = self._hand_out(num_blocks)

    def step(self, *pieces: Piece) -> list[Tensor]:
        """One forward pass; the logits [rows, V] of each piece, in order."""
        by_rank = self.on_all(lambda member: member.step(self.spans(pieces)))
        out = []
        for number, piece in enumerate(pieces):
            rows = torch.full((piece.end - piece.start, self.config.vocab_size), torch.nan)
            for logits in by_rank:
                positions, values = logits[number]
                rows[positions - piece.start] = values
            out.append(rows)
        return out

    def on_all(self, task: Callable[[Member], R]) -> list[R]:
        """The task on every rank at once; results by rank."""
        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(task, self.members))

    def spans(self, pieces: Sequence[Piece]) -> list[Span]:
        """What the batch builder takes."""
        spans = []
        for piece in pieces:
            tokens = self._sequences[piece.seq]
            admit = Admit(
                slot=piece.seq,
                group=0,
                token_ids=wire.pack(tokens),
                prompt_len=len(tokens),
                num_computed=piece.start,
                blocks=wire.pack(self.blocks[piece.seq]),
                split_start=self.splits[piece.seq].start,
                sampling=PLAIN,
            )
            spans.append(Span(SlotState(admit, self.size, self._block_size), piece.start, piece.end, False))
        return spans

    def _hand_out(self, num_blocks: int) -> list[list[int]]:
        free = [list(range(1, num_blocks)) for _ in range(self.size)]
        draw = random.Random(5)
        for ids in free:
            draw.shuffle(ids)
        tables = []
        for tokens, split in zip(self._sequences, self.splits, strict=True):
            tables.append([free[split.rank_of(b)].pop() for b in range(split.num_blocks(len(tokens)))])
        return tables

    def _member(
        self, path: Path, axis: str | None, rank: int, group: ThreadGroup, num_blocks: int, dtype: torch.dtype
    ) -> Member:
        axes = {} if axis is None else {axis: ThreadAxis(axis, group, rank)}
        if axis == "kvp":
            axes["attn_tp"] = ThreadAxis("attn_tp", group, rank)
        layers = range(self.config.num_layers)
        spec = CacheSpec.of(self.config, layers, dtype)
        access: Any = "local" if axis is None else ACCESS_OF[axis]
        context = ModelContext(
            config=self.config,
            ops=kernels.load("cpu"),
            mesh=cast(Mesh, ThreadMesh(axes)),
            cache=KVCache(spec, num_blocks, self._block_size, torch.device("cpu")),
            layers=layers,
            is_first=True,
            is_last=True,
            kv_access=access,
            dtype=dtype,
            device=torch.device("cpu"),
        )
        model = CausalLM(context)
        load_weights(model.weight_specs(), path, config=self.config)
        tables = self.config.over_embedding
        order = tables.oe_neighbor_num if tables else 0
        inputs = InputsBuilder(CacheShard(access, self.size, rank), self._block_size, order, context.device)
        return Member(model, inputs, context)


class Member:
    """One rank."""

    def __init__(self, model: CausalLM, inputs: InputsBuilder, context: ModelContext) -> None:
        self.model = model
        self.inputs = inputs
        self.context = context

    @torch.inference_mode()
    def step(self, spans: Sequence[Span]) -> list[tuple[Tensor, Tensor]]:
        """Positions and logits of this rank's rows, for each span."""
        inputs = self.inputs.build(spans)
        hidden = self.model.forward(inputs, None, None)
        assert self.model.head is not None
        logits = self.model.head.head(self.model.head.norm(hidden)).float()
        bounds = zip(inputs.cu_seqlens_q, inputs.cu_seqlens_q[1:], strict=False)
        return [(inputs.positions[start:end], logits[start:end]) for start, end in bounds]
