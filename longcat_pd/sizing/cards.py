"""What a card of each series has: memory, speed and links. One table to edit; every figure says where it comes from.

Nobody has measured these here. Peaks are what a data sheet would say; what part of a peak is reached is not said here. A
card is what a rank runs on: of A3, whose package holds two chips, one chip.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from longcat_pd.config.schema import ClusterConfig, InstanceSpec

_PACKAGE = "half of a 910C package in the published description of CloudMatrix384 (2025)"
_EXAMPLE = "assumed: 64 GiB less what driver, runtime and alignment keep, as `npu-smi` shows on cards in use"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A number, and who says so."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """One series. Bytes are GiB (2^30) for memory and GB/s (10^9) for rates; rates of links are of one direction.

    Attributes:
        memory_gib, usable_gib: on the card, and what ranks may take of it.
        bf16_tflops, int8_tops: dense peaks of matrix products.
        hbm_gb_s: reading the card's memory.
        inside_gb_s: one card to all others of its node together.
        between_gb_s: one card to cards of other nodes.
        host_gb_s: one card to or from the memory of its node.
        cards_per_node, host_memory_gib: of a node.
    """

    name: str
    memory_gib: Figure
    usable_gib: Figure
    bf16_tflops: Figure
    int8_tops: Figure
    hbm_gb_s: Figure
    inside_gb_s: Figure
    between_gb_s: Figure
    host_gb_s: Figure
    cards_per_node: Figure
    host_memory_gib: Figure

    @property
    def figures(self) -> dict[str, Figure]:
        """All of them by name."""
        return {name: value for name, value in vars(self).items() if isinstance(value, Figure)}


CARDS: Mapping[str, Card] = MappingProxyType(
    {
        "A2": Card(
            name="Atlas A2 (910B)",
            memory_gib=Figure(value=64.0, source="the published deployment runs on 64 GB cards"),
            usable_gib=Figure(value=60.9, source=_EXAMPLE),
            bf16_tflops=Figure(value=313.0, source="assumed: 910B3, as commonly listed; other parts of the series differ"),
            int8_tops=Figure(value=626.0, source="assumed: twice bf16"),
            hbm_gb_s=Figure(value=1600.0, source="assumed: 910B with 64 GB, as commonly listed"),
            inside_gb_s=Figure(value=25.0, source="published: cards of a node talk over RoCE; 200 Gbit/s a card assumed"),
            between_gb_s=Figure(value=25.0, source="assumed: one 200 Gbit/s RoCE port a card"),
            host_gb_s=Figure(value=26.0, source="assumed: PCIe 4.0 x16, about 80 % of 32 GB/s"),
            cards_per_node=Figure(value=16, source="the published deployment"),
            host_memory_gib=Figure(value=1024.0, source="assumed; look at your nodes, and see the plan's host total"),
        ),
        "A3": Card(
            name="Atlas A3 (one chip of a 910C)",
            memory_gib=Figure(value=64.0, source=_PACKAGE),
            usable_gib=Figure(value=60.9, source=_EXAMPLE),
            bf16_tflops=Figure(value=376.0, source=_PACKAGE),
            int8_tops=Figure(value=752.0, source=_PACKAGE),
            hbm_gb_s=Figure(value=1600.0, source=_PACKAGE),
            inside_gb_s=Figure(value=196.0, source=_PACKAGE),
            between_gb_s=Figure(value=196.0, source=f"{_PACKAGE}, inside one supernode; 25 over RoCE outside of it"),
            host_gb_s=Figure(value=26.0, source="assumed: as A2"),
            cards_per_node=Figure(value=16, source="eight packages of two chips in a node of CloudMatrix384"),
            host_memory_gib=Figure(value=1536.0, source="assumed; look at your nodes, and see the plan's host total"),
        ),
    }
)


_CARDS_OF: Mapping[str, Mapping[str, Card]] = MappingProxyType({"npu": CARDS})  # kinds of device: others have no table


def card_of(config: ClusterConfig | InstanceSpec) -> Card | None:
    """The card that ranks run on; None where they share the memory of their machine."""
    return _CARDS_OF.get(config.device, {}).get(config.npu.soc)


def usable_bytes(config: ClusterConfig | InstanceSpec) -> int | None:
    """Bytes that a rank may take of its card: ``device_memory_gib``, or the table's. None where it has no card."""
    card = card_of(config)
    if card is None:
        return None
    return int((config.device_memory_gib or card.usable_gib.value) * (1 << 30))
