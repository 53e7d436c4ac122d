"""What fits: blocks of the cache beside everything else on a card, and sequences in the blocks that there are.

Pure arithmetic on a plan of memory; what a card has is the caller's to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from longcat_pd.config.checks import blocks_needed, num_shards
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.sizing.memory import GIB, RankMemory, block_bytes, show_parts

_LENGTHS = (8192, 32768, 131072, 524288)


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """Of one instance.

    Attributes:
        num_blocks: of each shard, block 0 included, as configured.
        most_blocks: the largest number that would fit on the fullest card; None where ranks have no cards.
        tokens: of all groups together.
        sequences: by length, prompt and answer together: how many run at once, of at most ``slots``.
    """

    num_blocks: int
    most_blocks: int | None
    tokens: int
    slots: int
    sequences: Mapping[int, int]


def capacity(spec: InstanceSpec, model: ModelConfig, ranks: Sequence[RankMemory], *, usable_bytes: int | None) -> Capacity:
    """``ranks``: all of the instance. Blocks of a sequence are spread over the shards of its group by ``BlockSplit``."""
    engine, parallel = spec.engine, spec.parallel
    shards = num_shards(parallel)
    own = engine.num_blocks - 1
    most = None
    if usable_bytes is not None:
        most = max(min(_blocks_beside(rank, spec, model, usable_bytes=usable_bytes) for rank in ranks), 0)
    slots = engine.max_num_seqs // parallel.dp_size
    lengths = [length for length in _LENGTHS if length < engine.max_model_len] + [engine.max_model_len]
    return Capacity(
        num_blocks=engine.num_blocks,
        most_blocks=most,
        tokens=own * shards * engine.block_size * parallel.dp_size,
        slots=engine.max_num_seqs,
        sequences={
            length: min(own // blocks_needed(length, engine, num_shards=shards), slots) * parallel.dp_size
            for length in lengths
        },
    )


def card_findings(spec: InstanceSpec, ranks: Sequence[RankMemory], *, usable_bytes: int) -> Iterator[str]:
    """Refusal when the fullest rank needs more than a card has, with the parts."""
    worst = max(ranks, key=lambda rank: rank.total_bytes)
    if worst.total_bytes > usable_bytes:
        need = f"{worst.total_bytes / GIB:.1f} GiB a card, {usable_bytes / GIB:.1f} available"
        where = f"rank {worst.rank}, card {worst.rank % spec.ranks_per_node} of {_node_of(worst.rank, spec)}"
        yield f"{spec.role} {spec.name} needs {need}: {show_parts(worst.parts)} ({where})"


def _blocks_beside(rank: RankMemory, spec: InstanceSpec, model: ModelConfig, *, usable_bytes: int) -> int:
    """Blocks in what the other parts leave of a card."""
    each = block_bytes(rank.rank, spec, model)
    others = rank.total_bytes - each * spec.engine.num_blocks
    return (usable_bytes - others) // each


def _node_of(rank: int, spec: InstanceSpec) -> str:
    return (spec.nodes or (spec.host,))[rank // spec.ranks_per_node]
