"""The plan as text: instances with equal ranks in one line, what fits, what travels, machines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from longcat_pd.parallel.communicators import Communicator, communicators
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.plan.survey import InstancePlan, Survey
from longcat_pd.plan.units import gib, size
from longcat_pd.sizing.cards import card_of
from longcat_pd.sizing.links import LinkBytes
from longcat_pd.sizing.memory import GIB, MIB
from longcat_pd.sizing.placement import Machine


def lines(plan: Survey, *, is_long: bool = False) -> Iterator[str]:
    """All of it. ``is_long``: a line for every rank, too."""
    if plan.config is None:
        return
    if plan.instances:
        yield from _head(plan)
    for instance in plan.instances:
        yield ""
        yield from _instance(instance, plan, is_long=is_long)
    yield ""
    yield "machines"
    for machine in plan.machines:
        yield from _machine(machine, plan)
    yield from _told(plan.machines)
    for line in plan.advice:
        yield f"advice: {line}"


def _head(plan: Survey) -> Iterator[str]:
    config, card = plan.config, card_of(plan.config) if plan.config is not None else None
    assert config is not None
    num_ranks = sum(len(instance.ranks) for instance in plan.instances)
    kind = config.device if card is None else f"{card.name}, {gib(plan.usable_bytes or 0)} GiB of each for ranks"
    yield f"{config.model.served_name}: {num_ranks} ranks on {len(plan.machines)} machines, {kind}"
    total = sum(plan.parts.values())
    shown = ", ".join(f"{name} {count / 1e12:.3f}" for name, count in plan.parts.items() if count >= 5e8)
    yield f"  all ranks together: {total / 1e12:.3f} TB: {shown or 'all parts below 0.001'}"
    yield f"  one copy of the weights that are read: {plan.copy_bytes / 1e12:.3f} TB"
    if any(instance.spec.role == "prefill" for instance in plan.instances):
        yield f"  hand-over: {plan.token_bytes / 1024:.1f} KiB a token, {_handed(plan)} a full chunk"


def _handed(plan: Survey) -> str:
    chunk = max(i.spec.engine.max_num_batched_tokens for i in plan.instances if i.spec.role == "prefill")
    return size(chunk * plan.token_bytes)


def _instance(instance: InstancePlan, plan: Survey, *, is_long: bool) -> Iterator[str]:
    spec, able = instance.spec, instance.capacity
    parallel = spec.parallel
    sizes = {name.removesuffix("_size"): value for name, value in vars(parallel).items() if name.endswith("_size")}
    shown = " ".join(f"{name} {value}" for name, value in sizes.items() if value > 1)
    yield f"{spec.role} {spec.name}: {len(instance.ranks)} ranks on {len(spec.nodes)} machines: {shown or 'one rank'}"
    yield f"  layers {list(parallel.layers_per_stage)}; experts by {parallel.moe_dispatch}; {spec.engine.exe_mode}"
    yield f"  communicators: {', '.join(_communicators(instance))}"
    yield from _memory(instance, plan)
    most = "" if able.most_blocks is None else f", {able.most_blocks} would fit"
    yield f"  num_blocks {able.num_blocks}{most}: {able.tokens} tokens in all groups; {able.slots} sequences at most"
    yield "  at once: " + ", ".join(f"{count} of {length}" for length, count in able.sequences.items())
    yield from _links(instance)
    if is_long:
        yield from _every_rank(instance)


def _memory(instance: InstancePlan, plan: Survey) -> Iterator[str]:
    """Runs of ranks that hold the same, as a table."""
    unit, name = (GIB, "GiB") if max(rank.total_bytes for rank in instance.ranks) >= 10 * GIB else (MIB, "MiB")
    parts = [part for part in instance.ranks[0].parts if any(rank.parts[part] for rank in instance.ranks)]
    whole = "" if plan.usable_bytes is None else f" of {plan.usable_bytes / unit:.1f}"
    header = [f"{name} of a rank", *parts, f"total{whole}", "machine"]
    rows = []
    pairs = zip(instance.ranks, instance.places, strict=True)
    for _, run in groupby(pairs, key=lambda pair: (pair[1].stage, pair[0].parts, pair[0].host_parts)):
        (memory, place), *others = run
        last = others[-1][0].rank if others else memory.rank
        which = f"{memory.rank}" if last == memory.rank else f"{memory.rank}-{last}"
        layers = f"layers {place.layers.start}-{place.layers.stop - 1}"
        stage = f" stage {place.stage}, {layers}" if instance.spec.parallel.pp_size > 1 else ""
        cells = [f"{memory.parts[part] / unit:.1f}" for part in parts]
        rows.append([f"{which}{stage}", *cells, f"{memory.total_bytes / unit:.1f}", f"{memory.machine_bytes / unit:.1f}"])
    yield from _aligned([header, *rows])


def _links(instance: InstancePlan) -> Iterator[str]:
    spec = instance.spec
    what = "decode step, all slots" if spec.role != "prefill" else f"last chunk of {spec.engine.max_model_len} tokens"
    yield f"  a rank sends in a full step ({what}), most of all ranks:"
    yield f"    {_of_links(instance.travel.links)}"
    if spec.role == "prefill":
        yield "  and in the first chunk of a prompt:"
        yield f"    {_of_links(instance.travel.first_links)}"


def _of_links(links: Sequence[LinkBytes]) -> str:
    most = max(links, key=lambda link: link.inside + link.between)
    host = max(link.from_host + link.to_host for link in links)
    parts = ", ".join(f"{part} {size(count)}" for part, count in sorted(most.by_part.items(), key=lambda item: -item[1]))
    looked = f", with its host {size(host)}" if host else ""
    return f"in its node {size(most.inside)}, to other nodes {size(most.between)}{looked}: {parts or 'nothing'}"


def _communicators(instance: InstancePlan) -> Iterator[str]:
    """Of rank 0: axes that share one, and of how many ranks."""
    spec = instance.spec
    shared: dict[Communicator, list[str]] = {}
    for axis, made in communicators(ParallelLayout.of(spec.parallel), 0, spec.npu).items():
        shared.setdefault(made, []).append(axis)
    if not shared:
        yield "none"
    for made, axes in shared.items():
        yield f"{' = '.join(axes)} ({len(made.ranks)})"


def _every_rank(instance: InstancePlan) -> Iterator[str]:
    for memory, place, links in zip(instance.ranks, instance.places, instance.travel.links, strict=True):
        at = " ".join(f"{name} {value}" for name, value in place.coordinates.items())
        sends = f"sends {size(links.inside)} inside, {size(links.between)} out"
        where = f"{place.instance} {place.rank}: {place.node} card {place.device}"
        yield f"  {where}: {size(memory.total_bytes)}; {sends}; {at or 'alone'}"


def _machine(machine: Machine, plan: Survey) -> Iterator[str]:
    held = plan.host_bytes.get(machine.node, 0)
    names = ", ".join(service.name for service in machine.services)
    memory = f"; {gib(held)} GiB of its memory" if held else ""
    yield f"  {machine.node}: {names}{memory}"
    devices = [use for use in machine.ports if " device " in use.purpose]
    told = [f"{use.port} {use.purpose}" for use in machine.ports if use not in devices]
    told += [f"{devices[0].port}-{devices[-1].port} devices"] if devices else []
    yield f"    ports {', '.join(told) or 'none'}"


def _told(machines: Sequence[Machine]) -> Iterator[str]:
    """What the collective library of each service is told; services that are told the same together."""
    found: dict[str, list[str]] = {}
    for service, variables in (item for machine in machines for item in machine.hccl.items()):
        text = " ".join(f"{name}={value}" for name, value in sorted(variables.items()))
        found.setdefault(text, []).append(service)
    for text, names in found.items():
        if text:
            yield f"  HCCL of {', '.join(names)}: {text}"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        yield "  " + "  ".join(cells).rstrip()
