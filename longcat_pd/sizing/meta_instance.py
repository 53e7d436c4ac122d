"""All ranks of one instance built on the meta device (``meta_rank.py``), and held against layout and plan.

Every tensor of the checkpoint is read as often as the layout says (``readers.py``), each time whole by the ranks that share
it (``tilings.py``); every rank allocates what the plan says (``memory.py``). Reads no file.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.models.stage import Stage
from longcat_pd.models.tensor_names import SCALE, Shape, is_ignorable, other_spelling, weight_of
from longcat_pd.sizing.memory import RankMemory, instance_memory, show_parts
from longcat_pd.sizing.meta_rank import BuiltRank, build_rank
from longcat_pd.sizing.readers import int8_of, tensors_of, uses_of
from longcat_pd.sizing.tilings import Complaints, StageReads, named

Build = Callable[..., BuiltRank]


@dataclass(frozen=True, kw_only=True)
class InstanceReport:
    """What was seen of one instance.

    Attributes:
        num_instances: how many there are that are built alike.
        num_tensors, num_scales: of the checkpoint, read by some rank.
        times: how often a tensor is read -> how many tensors are.
        num_reads: by all ranks, parts and whole tensors.
        bytes_of: what all ranks allocate, by part of the plan.
        unread: tensors of the checkpoint that no rank reads.
    """

    name: str
    num_instances: int
    num_ranks: int
    num_tensors: int
    num_scales: int
    num_reads: int
    times: Mapping[int, int]
    bytes_of: Mapping[str, int]
    unread: tuple[str, ...]
    findings: tuple[str, ...]
    seconds: float

    def lines(self) -> Iterator[str]:
        """For people."""
        alike = f" ({self.num_instances} instances are built alike)" if self.num_instances > 1 else ""
        built = f"{self.num_ranks} ranks built at full size without memory in {self.seconds:.0f} s"
        yield f"{self.name}{alike}: {built}"
        scales = f" and {self.num_scales} scales" if self.num_scales else ""
        often = ", ".join(f"{number} of them {times} times" for times, number in sorted(self.times.items()))
        yield f"  {self.num_tensors} tensors{scales} of the checkpoint in {self.num_reads} reads: {often}"
        yield f"  all ranks together, in GiB: {show_parts(self.bytes_of)}"
        if self.unread:
            yield f"  read by no rank: {len(self.unread)}, {named(list(self.unread), ', ')}"
        if not self.findings:
            yield "  each tensor is read as often as the layout says, every rank allocates what the plan says"


def check_instance(
    spec: InstanceSpec,
    config: ModelConfig,
    *,
    stored: Collection[str] = (),
    num_instances: int = 1,
    build: Build = build_rank,
) -> InstanceReport:
    """Build every rank of one instance.

    Args:
        spec: resolved.
        stored: names of the checkpoint's tensors, where they are known.
        num_instances: that are alike.
        build: makes a rank.
    """
    began = time.monotonic()
    int8 = int8_of(config) if spec.model.weights == "checkpoint" else frozenset()
    tensors, planned = tensors_of(config, int8), instance_memory(spec, config)
    complaints, seen = Complaints(), _Seen()
    for number in range(spec.parallel.pp_size):
        reads = StageReads(spec.parallel, number)
        for rank in reads.ranks:
            built = build(rank, spec, config, int8=int8)
            reads.add(rank, ((read.name, read.part) for read in built.reads))
            seen.add(built)
            _compare(built, planned[rank], tensors, complaints)
        stage = Stage.of(spec, config, number)
        for name, times in reads.against(uses_of(stage, tensors, config, ep_size=spec.parallel.ep_size), complaints):
            seen.times[name] += times
    there = stored or (name for name in tensors if config.draft is not None or not is_ignorable(name))
    needed = (name for name in tensors if not is_ignorable(name))
    unread = [name for name in dict.fromkeys((*needed, *there)) if not _is_known(name, seen.times)]
    complaints.add("tensors are read by no rank", (name for name in unread if not is_ignorable(name)))
    names = [name for name in seen.times if name in tensors]
    num_scales = sum(name.endswith(SCALE) for name in names)
    return InstanceReport(
        name=f"{spec.role} {spec.name}",
        num_instances=num_instances,
        num_ranks=len(planned),
        num_tensors=len(names) - num_scales,
        num_scales=num_scales,
        num_reads=seen.num_reads,
        times=Counter(seen.times.values()),
        bytes_of=seen.bytes_of,
        unread=tuple(unread),
        findings=tuple(complaints.lines(f"{spec.role} {spec.name}")),
        seconds=time.monotonic() - began,
    )


@dataclass(kw_only=True)
class _Seen:
    """What was counted on the way."""

    num_reads: int = 0
    times: Counter[str] = field(default_factory=Counter)
    bytes_of: Counter[str] = field(default_factory=Counter)

    def add(self, built: BuiltRank) -> None:
        self.num_reads += len(built.reads)
        self.bytes_of.update(built.memory)


def _compare(built: BuiltRank, planned: RankMemory, tensors: Mapping[str, Shape], complaints: Complaints) -> None:
    """One rank with its plan, and what it asks for with what a checkpoint has."""
    parts = {**planned.parts, **{f"{part} on host": num_bytes for part, num_bytes in planned.host_parts.items()}}
    for part, num_bytes in built.memory.items():
        if num_bytes != parts.get(part, 0):
            text = f"rank {built.rank}: {part} {num_bytes}, planned {parts.get(part, 0)}"
            complaints.add("parts of ranks have other bytes than planned", [text])
    if built.num_stored != built.num_parameters:
        text = f"rank {built.rank}: {built.num_stored} of {built.num_parameters}"
        complaints.add("ranks are given other than as many numbers as they have parameters", [text])
    for read in built.reads:
        if tensors.get(read.name) != read.shape:
            there = list(tensors[read.name]) if read.name in tensors else "in no checkpoint"
            complaints.add("tensors are of another shape", [f"{read.name} {list(read.shape)}, it is {there}"])


def _is_known(name: str, read: Mapping[str, int]) -> bool:
    """Whether a tensor is read, or lies beside one that is."""
    return name in read or other_spelling(name) in read or (weight_of(name) or "") in read
