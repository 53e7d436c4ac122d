"""One look at the whole cluster, as the status page and others show it: a JSON object, of names, states, counts and times.

Owns its shape. Made of what the pool knows, of the clients' requests that the proxy remembers and of what the workers
answered to ``/debug/seen``; no prompt, text, token id or key is in any of them. All times are ages or durations in seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longcat_pd.load_balancer.pool import Instance, Pool
from longcat_pd.load_balancer.progress import Progress
from longcat_pd.load_balancer.status_words import complaints, lost_ranks, node_of, rank_name
from longcat_pd.version import VERSION

SHOWN = 20  # requests
_LOAD = ("waiting", "running", "slots", "transfers", "accepted")
_FIGURES = ("blocks", "slots", "lanes", "silent_s", "missed", "waits_for", "stands_in")


@dataclass(frozen=True, kw_only=True)
class Heard:
    """What an instance answered to ``/debug/seen``, and when."""

    at: float
    answer: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sight:
    """All that a snapshot is made of. ``heard``: by instance, of those that have ever answered; ``num_open``: requests that
    are in the balancer.
    """

    model: str
    pool: Pool
    recent: Sequence[Progress]
    heard: Mapping[str, Heard]
    now: float
    num_open: int
    is_draining: bool

    def snapshot(self) -> dict[str, Any]:
        """The object."""
        instances = self.pool.instances.values()
        return {
            "model": self.model,
            "version": VERSION,
            "ready": not self.pool.reasons() and not self.is_draining,
            "draining": self.is_draining,
            "open": self.num_open,
            "wrong": complaints(self.pool, draining=self.num_open if self.is_draining else None, now=self.now),
            "instances": [self._instance(instance) for instance in instances],
            "requests": [self._request(progress) for progress in list(self.recent)[-SHOWN:][::-1]],
            "happened": [
                {"ago_s": round(self.now - h.at, 1), "target": h.target, "what": h.what, "reason": h.reason}
                for h in reversed(self.pool.happenings)
            ],
        }

    def _instance(self, instance: Instance) -> dict[str, Any]:
        target, heard = instance.target, self.heard.get(instance.name)
        answer = heard.answer if heard is not None else {}
        pace = answer.get("step_ms")
        return {
            "name": instance.name,
            "role": target.role,
            "state": "drained" if instance.is_drained else "in" if instance.is_in else "out",
            "reason": None if instance.is_in else instance.out_reason,
            "since_s": None if instance.out_since is None else round(self.now - instance.out_since, 1),
            "busy": instance.said.get("busy") is True,
            "breaker_open": instance.breaker.is_open,
            "open_legs": instance.open_legs,
            "heard_s": None if heard is None else round(self.now - heard.at, 1),
            "incarnation": instance.incarnation,
            "peers": instance.said.get("peers", {}),
            "stages": target.stages,
            "groups": target.groups,
            **{key: answer.get(key) for key in _LOAD},
            "step_ms": pace if isinstance(pace, dict) else {},
            "ranks": self._ranks(instance, answer),
        }

    def _ranks(self, instance: Instance, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        target, told = instance.target, answer.get("ranks")
        by_number = {r.get("rank"): r for r in told if isinstance(r, dict)} if isinstance(told, list) else {}
        lost = lost_ranks(instance)
        ranks = []
        for number in range(target.num_ranks):
            figures = by_number.get(number, {})
            state = figures.get("state", "unknown")
            if number in lost:
                state = "lost"
            elif not instance.said:
                state = "gone" if instance.out_reason in ("refused", "silent") else "unknown"
            elif state == "lost":
                state = "unknown"  # its instance has not said so yet, or not of this life
            shown = {key: figures.get(key) for key in _FIGURES}
            name, node = rank_name(target, number), node_of(target, number)
            ranks.append({"rank": number, "name": name, "node": node, "state": state, **shown})
        return ranks

    def _request(self, progress: Progress) -> dict[str, Any]:
        began, first, ended = progress.started, progress.first_token, progress.ended
        return {
            "id": progress.request_id,
            "transfer": progress.transfer_id,
            "pair": list(progress.pair_names),
            "attempt": progress.attempt,
            "outcome": progress.outcome,
            "began": round(self.now - began, 4),
            "first_token": None if first is None else round(self.now - first, 4),
            "ended": None if ended is None else round(self.now - ended, 4),
            "sides": [side for name in progress.pair_names if (side := self._side(name, progress.transfer_id))],
        }

    def _side(self, name: str, transfer: str) -> dict[str, Any] | None:
        """What an instance told of a hand-over; its ages are made those of the snapshot."""
        heard = self.heard.get(name)
        requests = heard.answer.get("requests") if heard is not None else None
        if heard is None or not isinstance(requests, list):
            return None
        found = next((r for r in requests if isinstance(r, dict) and r.get("transfer") == transfer), None)
        return None if found is None else {"instance": name, **_older(found, self.now - heard.at)}


def _older(told: Mapping[str, Any], by_s: float) -> dict[str, Any]:
    def age(value: object) -> float | None:
        return round(value + by_s, 4) if isinstance(value, (int, float)) else None

    events, steps = told.get("events"), told.get("steps")
    return {
        **told,
        "began": age(told.get("began")),
        "ended": age(told.get("ended")),
        "events": [[e[0], age(e[1])] for e in events if isinstance(e, list)] if isinstance(events, list) else [],
        "steps": [age(step) for step in steps] if isinstance(steps, list) else [],
    }
