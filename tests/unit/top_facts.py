"""Facts of clusters as a balancer tells them (``load_balancer/status_facts.py``), for what draws them."""

from __future__ import annotations

from typing import Any

Facts = dict[str, Any]


def rank(number: int, *, state: str = "ok", stages: int = 1, node: str = "10.0.0.1", **figures: Any) -> Facts:
    place = f"stage {number}" if stages > 1 else f"place {number}"
    blocks = {"total": 128, "free": 120, "cached": 8, "reserved": 0, "live": 0, "quarantined": 0}
    return {
        "rank": number,
        "name": f"rank {number} ({place}) on {node}",
        "node": node,
        "state": state,
        "blocks": blocks,
        "slots": {"total": 16, "used": 0},
        "lanes": {"posted": 0, "unsent": 0},
        "silent_s": 0.2,
        "missed": "",
        "waits_for": "",
        "stands_in": "",
        **figures,
    }


def instance(name: str, *, num_ranks: int = 2, stages: int = 1, groups: int = 1, **figures: Any) -> Facts:
    role = "prefill" if name[0] == "p" else "decode"
    return {
        "name": name,
        "role": role,
        "state": "in",
        "reason": None,
        "since_s": None,
        "busy": False,
        "breaker_open": False,
        "open_legs": 1,
        "heard_s": 0.1,
        "incarnation": "f00d",
        "peers": {"d0" if role == "prefill" else "p0": "up"},
        "stages": stages,
        "groups": groups,
        "waiting": 2,
        "running": 3,
        "slots": 16,
        "transfers": 1,
        "accepted": 1.75 if role == "decode" else None,
        "step_ms": {"prefill": 41.5, "decode": None} if role == "prefill" else {"prefill": None, "decode": 8.25},
        "ranks": [rank(number, stages=stages) for number in range(num_ranks)],
        **figures,
    }


def request(**fields: Any) -> Facts:
    p0 = {
        "instance": "p0",
        "transfer": "t1",
        "began": 1.0,
        "ended": 0.8,
        "prompt": 192,
        "cached": 64,
        "output": 0,
        "num_steps": 3,
        "choices": 1,
        "moved_bytes": 4096,
        "early_bytes": 1024,
        "events": [
            ["arrived", 1.0],
            ["offered", 0.998],
            ["granted", 0.99],
            ["prefill_started", 0.98],
            ["prefill_ended", 0.85],
            ["committed", 0.805],
            ["finished", 0.8],
        ],
        "steps": [0.94, 0.9, 0.85],
    }
    d0 = {
        **p0,
        "instance": "d0",
        "ended": 0.3,
        "output": 9,
        "num_steps": 8,
        "events": [["arrived", 1.0], ["granted", 0.99], ["committed", 0.805], ["first_token", 0.8], ["finished", 0.3]],
        "steps": [],
    }
    return {
        "id": "req-1",
        "transfer": "t1",
        "pair": ["p0", "d0"],
        "attempt": 1,
        "outcome": "length",
        "began": 1.0,
        "first_token": 0.8,
        "ended": 0.3,
        "sides": [p0, d0],
        **fields,
    }


def wrong(words: str, *, level: str = "error", since_s: float | None = 12.0, **about: Any) -> Facts:
    return {"level": level, "words": words, "since_s": since_s, "instance": None, "rank": None, **about}


def cluster(*instances: Facts, **fields: Any) -> Facts:
    return {
        "model": "longcat-tiny",
        "version": "0.1.0",
        "ready": True,
        "draining": False,
        "open": 3,
        "wrong": [],
        "instances": list(instances) or [instance("p0", stages=2), instance("d0")],
        "requests": [request()],
        "happened": [{"ago_s": 100.0, "target": "d0", "what": "in", "reason": None}],
        **fields,
    }


def with_a_killed_rank() -> Facts:
    ranks = [rank(0, state="gone", stages=2), rank(1, state="lost", stages=2, node="10.0.0.2")]
    p0 = instance("p0", stages=2, state="out", reason="refused", since_s=12.0, heard_s=13.0, ranks=ranks)
    words = "p0 has lost rank 1 (stage 1) on 10.0.0.2: rank 1 ended with status -9."
    gone = [
        wrong("No request can be served: no prefill instance is ready (p0 refused)."),
        wrong(words, instance="p0", rank=1),
        wrong("p0 is out: nobody answers at its address.", instance="p0"),
    ]
    happened = [{"ago_s": 12.0, "target": "p0", "what": "out", "reason": "refused"}]
    return cluster(p0, instance("d0"), ready=False, wrong=gone, happened=happened)


def with_a_full_pool() -> Facts:
    blocks = {"total": 128, "free": 0, "cached": 0, "reserved": 16, "live": 108, "quarantined": 4}
    full = rank(0, blocks=blocks, lanes={"posted": 3, "unsent": 1}, slots={"total": 16, "used": 16})
    d0 = instance("d0", busy=True, waiting=12, running=16, transfers=4, ranks=[full, rank(1, blocks=blocks)])
    return cluster(instance("p0", stages=2), d0)


def without_decode() -> Facts:
    words = "No request can be served: no decode instance is ready (d0 silent)."
    unseen = {"waiting": None, "running": None, "slots": None, "transfers": None, "accepted": None, "step_ms": {}}
    unknown = rank(0, state="gone", blocks=None, slots=None, lanes=None, missed=None, waits_for=None, stands_in=None)
    d0 = instance("d0", state="out", reason="silent", since_s=100.0, heard_s=None, num_ranks=1, ranks=[unknown], **unseen)
    failed = request(id="req-2", pair=[], outcome="worker_unavailable", first_token=None, sides=[])
    going = request(id="req-3", outcome=None, ended=None, first_token=None, attempt=2, sides=[])
    found = [wrong(words, since_s=100.0), wrong("d0 is out: it does not answer /ready.", since_s=None)]
    return cluster(instance("p0", stages=2), d0, ready=False, wrong=found, requests=[failed, going])


def large() -> Facts:
    """Six instances of eight ranks."""
    pools = [instance(f"p{place}", num_ranks=8, stages=4, groups=1) for place in range(2)]
    pools += [instance(f"d{place}", num_ranks=8, groups=2) for place in range(4)]
    return cluster(*pools)
