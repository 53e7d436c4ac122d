"""What is tested before anything is loaded: the plan of an instance, its ports and its memory, all findings at once.

Asks this machine (sockets, /proc); knows no HTTP and starts nothing. Behind ``--check`` and at the start of a driver.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from longcat_pd.config.checks import PortUse, ports_of
from longcat_pd.config.keys import read_cluster_keys
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import compile_cache
from longcat_pd.config.schema import InstanceSpec, ParallelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.parallel.cores import core_finding
from longcat_pd.sizing.capacity import card_findings
from longcat_pd.sizing.cards import usable_bytes
from longcat_pd.sizing.memory import GIB, RankMemory, instance_memory, show_parts, show_total, stage_of, sum_of_parts

LISTEN = "0A"  # state column of /proc/net/tcp


@dataclass(frozen=True, kw_only=True)
class Preflight:
    """The plan of one instance, and what stands against it. ``facts``: the figures of the plan, for the log."""

    plan: tuple[str, ...]
    findings: tuple[str, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def raise_if_refused(self) -> None:
        """Raise one ConfigError with a line for each finding."""
        if self.findings:
            raise ConfigError("\n".join(self.findings))


def inspect(spec: InstanceSpec, *, node_rank: int = 0, available_bytes: int | None = None) -> Preflight:
    """Plan and findings of one instance on this machine. Raises ConfigError if the checkpoint's config.json is unreadable.

    Args:
        spec: resolved.
        node_rank: which of its nodes this machine is; the first one has the driver.
        available_bytes: memory for all ranks of the node; None: what this machine has free.
    """
    model = ModelConfig.load(spec.model.path)
    first = node_rank * spec.ranks_per_node
    ranks = instance_memory(spec, model)[first : first + spec.ranks_per_node]
    available = free_memory_bytes() if available_bytes is None else available_bytes
    cores = core_finding(spec, node_rank, len(os.sched_getaffinity(0)))
    findings = [
        *(port_findings(ports_of(spec)) if node_rank == 0 else ()),
        *memory_findings(spec, ranks, available_bytes=available),
        *([cores] if cores is not None else []),
        *compiler_findings(spec),
        *key_findings(spec),
    ]
    needs = [sum(rank.parts.values()) for rank in ranks]
    facts = {
        "instance": spec.name,
        "node": node_rank,
        "ranks": len(ranks),
        "ports": [use.port for use in ports_of(spec)] if node_rank == 0 else [],
        "max_bytes": max(needs),
        "all_bytes": sum(needs),
    }
    return Preflight(plan=tuple(plan_lines(spec, ranks)), findings=tuple(findings), facts=facts)


def plan_lines(spec: InstanceSpec, ranks: Sequence[RankMemory]) -> Iterator[str]:
    """What will run: layout, ports if the driver is there, and bytes of each of these ranks part by part."""
    parallel, engine = spec.parallel, spec.engine
    yield f"{spec.role} {spec.name}: {_tiling(parallel)} on {spec.device}, {spec.model.dtype}"
    yield from _split_parts(parallel)
    blocks = f"block_size {engine.block_size}, {engine.num_blocks} blocks a shard"
    chunk = f", {engine.max_num_batched_tokens} tokens a chunk" if spec.role != "decode" else ""
    yield f"  layers per stage {list(parallel.layers_per_stage)}; {blocks}"
    yield f"  max_model_len {engine.max_model_len}, {engine.max_num_seqs} sequences{chunk}"
    if engine.exe_mode != "eager":
        yield f"  {engine.exe_mode}: graphs for {list(engine.buckets)} sequences, kept in {compile_cache(engine)}"
    if ranks[0].rank == 0:
        yield "  ports " + ", ".join(f"{use.port} {use.purpose.removeprefix(spec.name).strip()}" for use in ports_of(spec))
    if len(spec.nodes) > 1:
        node = ranks[0].rank // spec.ranks_per_node
        where = f"node {node} of {len(spec.nodes)}, {spec.nodes[node]}"
        yield f"  {where}: ranks {ranks[0].rank} ... {ranks[-1].rank}"
    for rank in ranks:
        stage = f" (stage {stage_of(rank.rank, parallel)})" if parallel.pp_size > 1 else ""
        yield f"  rank {rank.rank}{stage}: {show_total(rank.parts)}"
    if parallel.moe_dispatch == "two_level" and parallel.ep_size > 1 and parallel.node_size <= 1:
        yield "  advice: two_level on one node is all_to_all with one exchange too many; set node_size, or use all_to_all"
    yield from _key_advice(spec)
    if spec.role == "prefill" and engine.max_num_batched_tokens % (engine.block_size * parallel.cp_size):
        level = engine.block_size * parallel.cp_size
        yield f"  advice: a chunk is level over the ranks of cp when max_num_batched_tokens is a multiple of {level}"


def _tiling(parallel: ParallelConfig) -> str:
    """The axes whose product is the number of ranks."""
    group = "kvp" if parallel.kvp_size > 1 else "attn_tp"
    sizes = {name: vars(parallel)[f"{name}_size"] for name in ("pp", "dp", "cp", group)}
    axes = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    return f"{axes}, {parallel.world_size} ranks" if axes else "one rank"


def _split_parts(parallel: ParallelConfig) -> Iterator[str]:
    """Over how many neighbours each part of the model is split; nothing where all are whole."""
    names = ["attn_tp"] if parallel.kvp_size > 1 else []
    names += ["dense_tp", "moe_tp", "ep", "embed_tp", "lmhead_tp", "ngram_embed_tp"]
    shown = {name: f"{name} {vars(parallel)[f'{name}_size']}" for name in names if vars(parallel)[f"{name}_size"] > 1}
    if "ep" in shown:
        levels = f" over {parallel.node_size} nodes" if parallel.moe_dispatch == "two_level" else ""
        shown["ep"] += f" by {parallel.moe_dispatch}{levels}"
    if shown:
        yield f"  split: {', '.join(shown.values())}"


def memory_findings(spec: InstanceSpec, ranks: tuple[RankMemory, ...], *, available_bytes: int) -> Iterator[str]:
    """Refusal when these ranks of one instance together need more than there is, or one of them more than its card has."""
    usable = usable_bytes(spec)
    if usable is not None:
        yield from card_findings(spec, ranks, usable_bytes=usable)
        return
    parts = sum_of_parts(ranks)
    need = sum(parts.values())
    if need > available_bytes:
        where = f" on node {ranks[0].rank // spec.ranks_per_node}" if len(spec.nodes) > 1 else ""
        head = f"{spec.role} {spec.name} needs {need / GIB:.1f} GiB for its {len(ranks)} ranks{where}"
        yield f"{head}, {available_bytes / GIB:.1f} available: {show_parts(parts)}"


def total_memory_findings(
    specs: Sequence[InstanceSpec], *, available_bytes: int, nodes: Sequence[str] = ()
) -> Iterator[str]:
    """Refusal when instances that share a machine, each of which fits, do not fit together.

    ``nodes``: its addresses; only ranks on them count. None: all ranks do.
    """
    needs = {spec.name: 0 for spec in specs}
    for spec in specs:
        here = [not nodes or node in nodes for node in spec.nodes or ("",)]
        for rank in instance_memory(spec, ModelConfig.load(spec.model.path)):
            needs[spec.name] += rank.machine_bytes * here[rank.rank // spec.ranks_per_node]
    if sum(needs.values()) > available_bytes:
        shares = ", ".join(f"{name} {need / GIB:.1f}" for name, need in needs.items())
        yield f"all instances need {sum(needs.values()) / GIB:.1f} GiB, {available_bytes / GIB:.1f} available: {shares}"


def compiler_findings(spec: InstanceSpec) -> Iterator[str]:
    """What a compiled step lacks on this machine."""
    engine, section = spec.engine, f"{spec.role}.engine"
    if engine.exe_mode != "inductor":
        return
    if shutil.which("g++") is None:
        yield f"{section}.exe_mode=inductor: compiles with g++, which is not on PATH; install it or use eager"
    folder = compile_cache(engine)
    there = next(path for path in (folder, *folder.parents) if os.access(path, os.F_OK))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        yield f"{section}.compile_cache={folder}: {there} is no folder that this user can write to"


def key_findings(spec: InstanceSpec) -> Iterator[str]:
    """Refusal where this machine lacks the key file of the cluster."""
    if spec.cluster_key_file is not None:
        try:
            read_cluster_keys(spec.cluster_key_file)
        except ConfigError as error:
            yield f"cluster_key_file={spec.cluster_key_file}: {error.message}"


def _key_advice(spec: InstanceSpec) -> Iterator[str]:
    file = Path(spec.cluster_key_file or "")
    if spec.cluster_key_file is not None and file.is_file() and file.stat().st_mode & 0o077:
        yield f"  advice: others on this machine can use {file}, mode {file.stat().st_mode & 0o777:04o}; chmod 0400"


def free_memory_bytes() -> int:
    """What the operating system says new processes can have, within the limit of this control group."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    available = int(fields["MemAvailable"].split()[0]) << 10
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text(encoding="ascii").strip()) != "max":
        available = min(available, max(int(text) - int(used.read_text(encoding="ascii")), 0))
    return available


def port_findings(uses: Iterable[PortUse]) -> Iterator[str]:
    """One line for each port that cannot be listened on, with the process that holds it where that can be seen."""
    for use in uses:
        family = socket.AF_INET6 if ":" in use.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((use.host, use.port))
            except OSError as error:
                holder = port_holder(use.port)
                reason = f"is taken by {holder}; stop it or change this setting" if holder else error.strerror
                yield f"{use.key}={use.port}: port {use.port} on {use.host} ({use.purpose}) {reason}"


def port_holder(port: int) -> str | None:
    """``pid 4711 (command line)`` of who listens on a TCP port; None: nobody does, or it is not ours to see."""
    wanted = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and wanted & set(_open_files(process)):
            command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            return f"pid {process.name} ({command.strip()[:120]})"
    return None


def _open_files(process: Path) -> Iterator[str]:
    """Targets of a process's descriptors; nothing of one that has ended or belongs to another user."""
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed in the meantime
                yield str(link.readlink())


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        if not Path(table).is_file():
            continue
        for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
            columns = line.split()
            if columns[3] == LISTEN and int(columns[1].rsplit(":", 1)[1], 16) == port:
                yield columns[9]
