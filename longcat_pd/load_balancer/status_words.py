"""What is wrong in the cluster, and since when, in words.

Owns the sentences. Judges by what the pool and the ranks' own drivers have said; asks nobody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from longcat_pd.load_balancer.pool import Instance, Pool, Target

_GONE = {
    "refused": "nobody answers at its address",
    "silent": "it does not answer /ready",
    "mismatch": "what answers there is of another name, role or configuration",
}
_SEVERE = ("rank_lost", "rank_silent", "step_overdue")


@dataclass(frozen=True, kw_only=True)
class Complaint:
    """One thing that is wrong. ``level``: error, or warning where requests are served all the same; ``since_s``: seconds,
    None where that is not known.
    """

    level: str
    words: str
    since_s: float | None = None
    instance: str | None = None
    rank: int | None = None


def complaints(pool: Pool, *, draining: int | None, now: float) -> list[dict[str, Any]]:
    """All that is wrong, the worst first. ``draining``: open requests of a balancer that takes no more."""
    found = list(_of_cluster(pool, draining, now))
    for instance in pool.instances.values():
        found += _of_instance(pool, instance, now)
    found += _of_links(pool)
    return [asdict(complaint) for complaint in sorted(found, key=lambda c: c.level)]  # "error" before "warning"


def rank_name(target: Target, rank: int) -> str:
    """A rank with its place and its machine."""
    width = max(target.num_ranks // target.stages, 1)
    stage, place = divmod(rank, width)
    where = f" on {node_of(target, rank)}" if target.nodes else ""
    parts = [f"stage {stage}"] if target.stages > 1 else []
    if target.groups > 1:
        parts.append(f"group {place // max(width // target.groups, 1)}")
    if width > 1:
        parts.append(f"place {place}")
    return f"rank {rank}" + (f" ({', '.join(parts)})" if parts else "") + where


def node_of(target: Target, rank: int) -> str | None:
    """The machine of a rank."""
    each = max(target.num_ranks // max(len(target.nodes), 1), 1)
    return target.nodes[min(rank // each, len(target.nodes) - 1)] if target.nodes else None


def lost_ranks(instance: Instance) -> dict[int, str]:
    """Ranks that ended an instance, with what was said of them: now, or before its process ended too."""
    own = instance.said.get("reasons")
    reasons = [*(own if isinstance(own, list) else ()), *instance.last_words]
    return {r["rank"]: str(r.get("detail")) for r in _mappings(reasons) if r.get("code") == "rank_lost" and _is_rank(r)}


def _of_cluster(pool: Pool, draining: int | None, now: float) -> Iterator[Complaint]:
    if draining is not None:
        yield Complaint(level="error", words=f"The balancer takes no new requests; {draining} are open.")
    for reason in pool.reasons():
        role = {"no_prefill": "prefill", "no_decode": "decode"}.get(reason["code"])
        if role is None:
            yield Complaint(
                level="error", words="No request can be served: no prefill and decode instance hear each other."
            )
            continue
        since = [i.out_since for i in pool.instances.values() if i.target.role == role and i.out_since is not None]
        words = f"No request can be served: no {role} instance is ready ({reason['detail']})."
        yield Complaint(level="error", words=words, since_s=now - max(since) if since else None)


def _of_instance(pool: Pool, instance: Instance, now: float) -> Iterator[Complaint]:
    name, target = instance.name, instance.target
    since_s = None if instance.out_since is None else now - instance.out_since
    lost = lost_ranks(instance)
    for rank, end in lost.items():
        words = f"{name} has lost {rank_name(target, rank)}: {end}."
        yield Complaint(level="error", words=words, since_s=since_s, instance=name, rank=rank)
    for reason in _mappings(instance.reasons if not instance.is_in else ()):
        code, detail = str(reason.get("code")), reason.get("detail")
        if code == "rank_lost" and _is_rank(reason):
            continue
        where = reason["rank"] if _is_rank(reason) else None
        level = "error" if code in _SEVERE or code in _GONE else "warning"
        told = _sentence(target, code, detail=detail, rank=where)
        yield Complaint(level=level, words=told, since_s=since_s, instance=name, rank=where)
    if instance.is_drained:
        words = f"{name} was taken out of use by an operator; {instance.open_legs} requests are open there."
        yield Complaint(level="warning", words=words, since_s=_since(pool, name, "drained", now), instance=name)
    if instance.breaker.is_open:
        words = f"{name} gets no requests for a while, as several in a row failed there; then one is tried."
        yield Complaint(level="warning", words=words, since_s=_since(pool, name, "breaker opened", now), instance=name)


def _sentence(target: Target, code: str, *, detail: object, rank: int | None) -> str:
    if code in _GONE:
        return f"{target.name} is out: {_GONE[code]}."
    if rank is not None and code == "rank_silent":
        return f"{target.name}: {rank_name(target, rank)} is silent: {detail}."
    told = f": {detail}" if detail else ""
    if rank is not None:
        return f"{target.name}: {code.replace('_', ' ')} at {rank_name(target, rank)}{told}."
    return f"{target.name} is not ready, {code.replace('_', ' ')}{told}."


def _of_links(pool: Pool) -> Iterator[Complaint]:
    """Ready instances that could hand over to each other and do not hear each other."""
    for p in pool.ready("prefill"):
        for d in pool.ready("decode"):
            views = [_link(p, d.name), _link(d, p.name)]
            if views != ["up", "up"]:
                words = (
                    f"No hand-over between {p.name} and {d.name}: {p.name} calls the link {views[0]}, {d.name} {views[1]}."
                )
                yield Complaint(level="warning", words=words, instance=p.name)


def _link(instance: Instance, peer: str) -> str:
    peers = instance.said.get("peers")
    return str(peers.get(peer)) if isinstance(peers, dict) else "unknown"


def _since(pool: Pool, name: str, what: str, now: float) -> float | None:
    ages = [now - h.at for h in pool.happenings if h.target == name and h.what == what]
    return ages[-1] if ages else None


def _mappings(values: object) -> list[Mapping[str, Any]]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, (list, tuple)) else []


def _is_rank(reason: Mapping[str, Any]) -> bool:
    return type(reason.get("rank")) is int
