"""Counted work at the rates that a card is taken to reach: seconds by part, and what they go to.

A part takes the longer of its operations and its bytes of memory, then its exchanges, then the gaps between its operators;
parts follow one another, but for experts on a stream of their own. Eager steps are no shorter than their launches on the
host. Knows neither what a step is nor where its numbers come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from longcat_pd.config.schema import InstanceSpec
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.sizing.exchanges import Exchange
from longcat_pd.sizing.links import NATIVE_DEVICES
from longcat_pd.sizing.pieces import Layer, Piece
from longcat_pd.sizing.rates import Rates

CUBE_CORES = 24  # that ``npu.*_cube_cores`` share


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Seconds of one part of a step. ``launch_s``: gaps between operators of a compiled step; ``host_s``: launches."""

    part: str
    compute_s: float = 0.0
    memory_s: float = 0.0
    tables_s: float = 0.0
    link_s: float = 0.0
    launch_s: float = 0.0
    host_s: float = 0.0
    bytes_s: float = 0.0

    @property
    def device_s(self) -> float:
        """What the device takes."""
        return self.compute_s + self.memory_s + self.tables_s + self.link_s + self.launch_s

    def __add__(self, other: Spent) -> Spent:
        theirs = vars(other)
        return Spent(part=self.part, **{name: value + theirs[name] for name, value in self._numbers()})

    def times(self, count: float) -> Spent:
        """So many alike."""
        return Spent(part=self.part, **{name: value * count for name, value in self._numbers()})

    def _numbers(self) -> Iterator[tuple[str, float]]:
        return ((name, value) for name, value in vars(self).items() if name != "part")

    @property
    def causes(self) -> Iterator[tuple[str, float]]:
        """What its seconds go to."""
        yield "compute of", self.compute_s
        yield "HBM of", self.memory_s
        yield "host memory of", self.tables_s
        yield "links of", self.link_s
        yield "operator gaps of", self.launch_s


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds of what follows one another: ``parts``, less what goes on beside others, and what nobody computes in.

    Attributes:
        beside_s: experts beside the dense part.
        waits_s: for the host's launches.
        sends_s: from one stage of the pipeline to the next.
        fixed_s: once a step.
    """

    parts: tuple[Spent, ...] = ()
    beside_s: float = 0.0
    waits_s: float = 0.0
    sends_s: float = 0.0
    fixed_s: float = 0.0

    def __add__(self, other: Estimate) -> Estimate:
        return Estimate(
            parts=merged([*self.parts, *other.parts]),
            beside_s=self.beside_s + other.beside_s,
            waits_s=self.waits_s + other.waits_s,
            sends_s=self.sends_s + other.sends_s,
            fixed_s=self.fixed_s + other.fixed_s,
        )

    def times(self, count: float) -> Estimate:
        """So many alike, one after the other."""
        return Estimate(
            parts=tuple(part.times(count) for part in self.parts),
            beside_s=self.beside_s * count,
            waits_s=self.waits_s * count,
            sends_s=self.sends_s * count,
            fixed_s=self.fixed_s * count,
        )

    @property
    def seconds(self) -> float:
        """All of it."""
        device = sum(part.device_s for part in self.parts)
        return device - self.beside_s + self.waits_s + self.sends_s + self.fixed_s

    @property
    def causes(self) -> tuple[tuple[str, float], ...]:
        """What bounds it, the longest first; what is saved is negative and last."""
        found = [(f"{cause} {part.part}", seconds) for part in self.parts for cause, seconds in part.causes if seconds]
        others = {
            "waiting for launches": self.waits_s,
            "sending between stages": self.sends_s,
            "start of the step": self.fixed_s,
            "experts beside the rest": -self.beside_s,
        }
        found += [(cause, seconds) for cause, seconds in others.items() if seconds]
        return tuple(sorted(found, key=lambda item: -item[1]))


class Clock:
    """Turns work into seconds on the cards of one instance. ``is_compiled``: the host launches a step as a whole."""

    def __init__(self, spec: InstanceSpec, *, rates: Rates, is_compiled: bool) -> None:
        self._layout = ParallelLayout.of(spec.parallel)
        self._is_native = spec.device in NATIVE_DEVICES
        self._npu = spec.npu
        self._rates = rates
        self._gap_s = rates.attained.graph_operator_s if is_compiled else 0.0
        self._launch_s = 0.0 if is_compiled else rates.attained.eager_operator_s

    def price(self, piece: Piece, *, cores: float = 1.0) -> Spent:
        """``cores``: the share of the chip's cores that compute it."""
        work, rates = piece.work, self._rates
        compute = work.bf16_flops / rates.bf16_flops + work.int8_ops / rates.int8_ops
        compute = (compute + work.fp32_flops / rates.fp32_flops) / cores
        memory = work.hbm_bytes / rates.hbm_bytes
        is_computing = compute >= memory
        return Spent(
            part=piece.part,
            compute_s=compute if is_computing else 0.0,
            memory_s=0.0 if is_computing else memory,
            tables_s=work.host_bytes / rates.host_bytes,
            launch_s=work.operators * self._gap_s,
            host_s=work.operators * self._launch_s,
            bytes_s=memory,
        )

    def exchanged(self, exchanges: Iterable[Exchange]) -> tuple[Spent, ...]:
        """By part."""
        return merged(
            Spent(part=item.part, link_s=self.exchange_s(item), host_s=item.times * self._launch_s) for item in exchanges
        )

    def exchange_s(self, item: Exchange) -> float:
        """Both kinds of links work at once; what goes to other nodes goes straight to every rank there."""
        axis, rates = self._layout.axis(item.axis), self._rates
        near = min(axis.size, max(rates.cards_per_node // axis.stride, 1))
        each = item.bytes_each(axis.size, is_native=self._is_native)
        if item.kind == "send":
            inside, between = (each, 0) if near == axis.size else (0, each)
        else:
            inside, between = each * (near - 1), each * (axis.size - near)
        fixed = rates.attained.between_s if near < axis.size else rates.attained.collective_s
        return item.times * fixed + max(inside / rates.inside_bytes, between / rates.between_bytes)

    def layer(self, layer: Layer, links: Mapping[str, Spent]) -> Estimate:
        """One decoder layer. ``links``: what it exchanges, by part; half of the attention's belongs to the second."""
        exchanged = tuple(links.values())
        if not self._npu.is_moe_overlapped:
            pieces = map(self.price, (*layer.first, *layer.dense, *layer.experts))
            return Estimate(parts=merged([*pieces, *exchanged]))
        main, moe = (cores / CUBE_CORES or 1.0 for cores in (self._npu.main_cube_cores, self._npu.moe_cube_cores))
        first = [self.price(piece) for piece in layer.first]
        dense = [self.price(piece, cores=main) for piece in layer.dense]
        experts = [self.price(piece, cores=moe) for piece in layer.experts]
        link_s = {part: spent.link_s for part, spent in links.items()}
        dense_s = sum(part.device_s for part in dense) + link_s.get("dense", 0.0) + link_s.get("attention", 0.0) / 2
        experts_s = sum(part.device_s for part in experts) + link_s.get("experts", 0.0)
        together = max(dense_s, experts_s, sum(part.bytes_s for part in (*dense, *experts)))
        parts = merged([*first, *dense, *experts, *exchanged])
        return Estimate(parts=parts, beside_s=max(dense_s + experts_s - together, 0.0))

    def whole(self, layers: Sequence[tuple[Estimate, int]], ends: Iterable[Spent]) -> Estimate:
        """Layers, so many of each, and what is in front of them and behind; with waits for the host, if there are any."""
        parts = [part.times(count) for layer, count in layers for part in layer.parts]
        beside = sum(layer.beside_s * count for layer, count in layers)
        found = Estimate(parts=merged([*parts, *ends]), beside_s=beside)
        host = sum(part.host_s for part in found.parts)
        return found + Estimate(waits_s=max(host - found.seconds, 0.0))


def merged(spent: Iterable[Spent]) -> tuple[Spent, ...]:
    """By part, in the order in which parts come first."""
    sums: dict[str, Spent] = {}
    for one in spent:
        sums[one.part] = sums[one.part] + one if one.part in sums else one
    return tuple(sums.values())
