"""What the fused pair of dispatch and combine takes, by series of devices and way to travel (``comm_alg``).

Documented limits, which neither the operators' schemas nor their shape functions know: beyond them a device computes
garbage or hangs.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from longcat_pd.kernels.npu.settings import NpuSettings
from longcat_pd.kernels.refusal import Unsupported

_MEBI = 1 << 20
_ALTERNATIVES = "gather, two_level or all_to_all take any size"


class Variant(NamedTuple):
    """``is_bare``: it knows neither copies nor masks, and wants the weights of rows when they leave."""

    ranks: Collection[int]
    ranks_in_words: str
    max_hidden: int
    max_rows: int
    min_hidden: int = 1
    max_topk: int = 16
    max_experts: int = 1024
    is_bare: bool = False


_A2_MESH = Variant((*range(2, 9), 16, 32, 64, 128, 256), "2 to 8, 16, 32, 64, 128 or 256", max_hidden=7168, max_rows=256)
_A2_TREE = Variant((16, 32, 64), "16, 32 or 64", max_hidden=10240, max_rows=512, is_bare=True)
_A3_MESH = Variant(range(2, 769), "2 to 768", min_hidden=1024, max_hidden=8192, max_rows=512)
_VARIANTS = {
    False: {"": _A2_MESH, "fullmesh": _A2_MESH, "hierarchy": _A2_TREE},
    True: {
        "": _A3_MESH,
        "fullmesh_v1": _A3_MESH,
        "fullmesh_v2": _A3_MESH._replace(max_rows=256, max_topk=12),
        "hierarchy": _A3_MESH._replace(max_rows=256, max_experts=512),
    },
}


def variant_of(settings: NpuSettings) -> Variant:
    """The way to travel that was asked for.

    Raises:
        Unsupported: the series does not have it.
    """
    known = _VARIANTS[settings.is_series_a3]
    if settings.dispatch_algorithm not in known:
        text = f"{_place(settings)}: no such algorithm; there are {', '.join(map(repr, known))}"
        raise Unsupported(text, param="parallel.moe_dispatch")
    return known[settings.dispatch_algorithm]


def check_fused(settings: NpuSettings, *, hidden: int, ep_size: int, rows: int, num_experts: int, topk: int) -> None:
    """``rows``: the most that one rank hands in at once; ``num_experts``: those with weights, of all ranks.

    Raises:
        Unsupported: every limit that is exceeded, with the numbers, and what can be done instead.
    """
    wrong = exceeded(variant_of(settings), hidden=hidden, ep_size=ep_size, rows=rows, num_experts=num_experts, topk=topk)
    if wrong:
        others = [] if settings.is_series_a3 else _ways_on_a2(hidden, ep_size, rows, num_experts=num_experts, topk=topk)
        instead = "; ".join((*others, _ALTERNATIVES))
        raise Unsupported(f"{_place(settings)}: {'; '.join(wrong)}. Instead: {instead}", param="parallel.moe_dispatch")


def exceeded(variant: Variant, *, hidden: int, ep_size: int, rows: int, num_experts: int, topk: int) -> list[str]:
    """Limits that do not hold, in words."""
    checks = [
        (ep_size in variant.ranks, f"ep_size {ep_size}, allowed are {variant.ranks_in_words}"),
        (
            variant.min_hidden <= hidden <= variant.max_hidden,
            f"hidden size {hidden}, allowed are {variant.min_hidden} to {variant.max_hidden}",
        ),
        (1 <= rows <= variant.max_rows, f"{rows} rows of a rank at once, allowed are 1 to {variant.max_rows}"),
        (1 <= topk <= variant.max_topk, f"{topk} experts for each row, at most {variant.max_topk}"),
        (num_experts % ep_size == 0, f"{num_experts} experts are no multiple of {ep_size} ranks"),
        (num_experts <= variant.max_experts, f"{num_experts} experts, at most {variant.max_experts}"),
    ]
    if variant.is_bare:  # copies give their places to experts that a row did not choose
        checks.append((num_experts >= 2 * topk, f"{num_experts} experts with {topk} for each row, at least {2 * topk}"))
    return [text for holds, text in checks if not holds]


def fused_buffer_bytes(settings: NpuSettings, *, hidden: int, ep_size: int, rows: int, num_experts: int, topk: int) -> int:
    """What the pair's communicator needs for its buffer (``HCCL_BUFFSIZE``), in bytes; arguments as in ``check_fused``."""
    local, variant = num_experts // ep_size, variant_of(settings)
    if variant.is_bare:
        row = 2 * hidden + 16 * _aligned(topk, 8)
        return (num_experts + ep_size // 4) * _aligned(rows * row, 512) + 8 * _MEBI
    if not settings.is_series_a3:
        return 2 * (rows * ep_size * hidden * 2 * min(local, topk) + 2 * _MEBI)
    there = local * rows * ep_size * _aligned(_aligned(2 * hidden, 32) + 64, 512)
    return 2 * (there + topk * rows * _aligned(2 * hidden, 512))


def _ways_on_a2(hidden: int, ep_size: int, rows: int, *, num_experts: int, topk: int) -> list[str]:
    """Which other settings would do."""
    found = []
    for ranks in (ep_size, 64):
        asked = {"hidden": hidden, "ep_size": ranks, "rows": rows, "num_experts": num_experts, "topk": topk}
        if not exceeded(_A2_TREE, **asked):
            found = [f"the algorithm 'hierarchy' with ep_size {ranks}"]
            break
    if not exceeded(_A3_MESH, hidden=hidden, ep_size=ep_size, rows=rows, num_experts=num_experts, topk=topk):
        found.append("Atlas A3")
    return found


def _aligned(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _place(settings: NpuSettings) -> str:
    series = "A3" if settings.is_series_a3 else "A2"
    return f"parallel.moe_dispatch=fused on Atlas {series} with algorithm {settings.dispatch_algorithm!r}"
