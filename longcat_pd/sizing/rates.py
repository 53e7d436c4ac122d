"""What a card is taken to reach in service: parts of the peaks of ``cards.py``, and times that are paid whatever the size.

One small table to edit. Some figures were fitted to the published times of LongCat-Flash-Lite, once for all of its rows
(docs/estimates.md says how well that goes); the others are assumed. Nothing was measured here.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from longcat_pd.sizing.cards import Card

GIGA, TERA = 1e9, 1e12


@dataclass(frozen=True, kw_only=True)
class Attained:
    """Shares of a card's peaks, and seconds.

    Attributes:
        matmul: of the peak of matrix products; fitted, to prompts in the main.
        hbm: of the rate of the card's memory; assumed.
        link: of the rate of a link; assumed.
        fp32: fp32 products against bf16 ones; assumed.
        collective_s, between_s: one collective of a group inside a node, and of one that joins nodes, without its bytes;
            assumed.
        graph_operator_s: from one operator of a compiled step to the next; fitted.
        graph_step_s: driver, plan and start of a compiled step; assumed.
        eager_operator_s: the host's time for one operator of an eager step; fitted.
        accepted: of the drafts of a step; assumed, as it depends on the text.
    """

    matmul: float = 0.24
    hbm: float = 0.7
    link: float = 0.6
    fp32: float = 0.25
    collective_s: float = 15e-6
    between_s: float = 30e-6
    graph_operator_s: float = 6e-6
    graph_step_s: float = 0.5e-3
    eager_operator_s: float = 90e-6
    accepted: float = 0.6


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Of one card in service: operations and bytes in a second, links in one direction, and ``Attained``'s seconds."""

    bf16_flops: float
    int8_ops: float
    hbm_bytes: float
    inside_bytes: float
    between_bytes: float
    host_bytes: float
    cards_per_node: int
    attained: Attained = field(default_factory=Attained)

    @property
    def fp32_flops(self) -> float:
        """Products in fp32."""
        return self.bf16_flops * self.attained.fp32


def rates_of(card: Card, *, cards_per_node: int, attained: Attained | None = None) -> Rates:
    """What a card reaches. ``cards_per_node``: of the cluster at hand."""
    reached = Attained() if attained is None else attained
    return Rates(
        bf16_flops=card.bf16_tflops.value * TERA * reached.matmul,
        int8_ops=card.int8_tops.value * TERA * reached.matmul,
        hbm_bytes=card.hbm_gb_s.value * GIGA * reached.hbm,
        inside_bytes=card.inside_gb_s.value * GIGA * reached.link,
        between_bytes=card.between_gb_s.value * GIGA * reached.link,
        host_bytes=card.host_gb_s.value * GIGA * reached.link,
        cards_per_node=cards_per_node,
        attained=reached,
    )
