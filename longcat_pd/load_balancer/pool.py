"""Which instances there are, which of them can serve, how busy they are, and the choice among them.

Owned and written by the balancer's event loop alone. Knows nothing of requests or of HTTP: how ``/ready`` is asked is
given as a function, and what became of a call is reported by ``attempt.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from longcat_pd import log
from longcat_pd.clock import BREAKER_FAILURES, READY_POLL_S, Clock
from longcat_pd.errors import LongcatError, WorkerUnavailable
from longcat_pd.load_balancer.breaker import Breaker
from longcat_pd.load_balancer.workers import NoRoomHere, WorkerRefused
from longcat_pd.metrics import Metrics

LegRole = Literal["prefill", "decode"]
MISSES_OUT = 2  # polls without an answer that put an instance out
HAPPENINGS_KEPT = 32


@dataclass(frozen=True, kw_only=True)
class Target:
    """An instance as the configuration names it; ``/ready`` of what answers at ``url`` must say the same.

    Ranks are numbered stage by stage, group by group, and share ``nodes`` evenly, neighbours together.
    """

    name: str
    role: LegRole
    url: str
    config_digest: str
    nodes: tuple[str, ...] = ()
    stages: int = 1
    groups: int = 1
    num_ranks: int = 1


@dataclass(frozen=True, kw_only=True)
class Happening:
    """Something that became of an instance, for who looks later.

    ``what``: in, out, breaker opened, breaker closed, drained, undrained.
    """

    at: float
    target: str
    what: str
    reason: str = ""


Ask = Callable[[str], Awaitable[Mapping[str, Any]]]


class Instance:
    """What the balancer knows of one instance. Written by ``Pool`` only."""

    def __init__(self, target: Target, clock: Clock) -> None:
        self.target = target
        self.breaker = Breaker(clock)
        self.said: Mapping[str, Any] = {}  # its last answer to /ready
        self.judged: object = None  # the incarnation that the breaker's record is about
        self.is_in = False
        self.is_drained = False  # by an operator, here at the balancer
        self.out_reason = "starting"
        self.out_since: float | None = clock.now()  # None: it is in
        self.last_words: Sequence[
            Any
        ] = ()  # its reasons, of the last that it said before it was gone; until it is in again
        self.misses = 0
        self.open_legs = 0
        self.open_bytes = 0  # of the bodies of its open legs
        self.turn = 0  # when it was chosen last, counted in choices

    @property
    def name(self) -> str:
        """Its name in the configuration."""
        return self.target.name

    @property
    def incarnation(self) -> object:
        """Which process it is, as far as is known."""
        return self.said.get("incarnation")

    @property
    def is_ready(self) -> bool:
        """Whether it may be chosen."""
        return self.is_in and not self.is_drained

    @property
    def load(self) -> tuple[int, int]:
        """What the choice compares: work first, then turns. A prompt's work grows with its bytes, a decode row is one."""
        return (self.open_bytes if self.target.role == "prefill" else self.open_legs, self.turn)

    @property
    def reasons(self) -> Sequence[Any]:
        """Why it is not ready, in its own words where it has given some."""
        if self.is_drained:
            return [{"code": "draining", "detail": "taken out at the balancer", "rank": None}]
        if self.is_in:
            return []
        own = self.said.get("reasons")
        return own if isinstance(own, list) and own else [{"code": self.out_reason, "detail": None, "rank": None}]


@dataclass(frozen=True)
class Pair:
    """One prefill and one decode instance that can hand over to each other."""

    prefill: Instance
    decode: Instance

    @property
    def names(self) -> tuple[str, str]:
        """For logs and answers."""
        return self.prefill.name, self.decode.name


@dataclass(frozen=True, kw_only=True)
class Avoid:
    """What the attempt before has taught: another pair, by preference without ``blamed``.

    ``same_pair``: the same pair may be tried again when there is no other. ``never``: ``blamed`` is of no use now, in
    which ``incarnation`` None stands for any.
    """

    pair: Pair
    blamed: Instance | None = None
    same_pair: bool = False
    never: bool = False
    incarnation: object = None

    def blames(self, pair: Pair) -> bool:
        """Whether the blamed instance, as it was then, is in ``pair``."""
        blamed = self.blamed
        if blamed is None or blamed not in (pair.prefill, pair.decode):
            return False
        return self.incarnation is None or blamed.incarnation == self.incarnation


class Pool:
    """All instances of the configuration: polls them, counts their load, chooses pairs."""

    def __init__(self, targets: Sequence[Target], *, ask: Ask, clock: Clock, metrics: Metrics) -> None:
        self.instances = {target.name: Instance(target, clock) for target in targets}
        self.has_been_ready = asyncio.Event()  # one linked pair has been ready since the start
        self._ask = ask
        self._clock = clock
        self._metrics = metrics
        self._turns = 0
        self._news = asyncio.Event()
        self._complaints: dict[str, str] = {}
        self.happenings: deque[Happening] = deque(maxlen=HAPPENINGS_KEPT)

    # ------------------------------------------------------------------ health

    async def watch(self) -> None:
        """Poll every instance each second until cancelled."""
        await asyncio.gather(*(self._watch(instance) for instance in self.instances.values()))

    async def poll(self, instance: Instance) -> None:
        """Ask one instance once and draw the conclusion."""
        try:
            answer = await self._ask(instance.target.url)
        except NoRoomHere:
            return  # it was not asked
        except WorkerRefused:
            self._put_out(instance, "refused")
        except (LongcatError, TimeoutError):
            instance.misses += 1
            if instance.misses >= MISSES_OUT:
                self._put_out(instance, "silent")
        else:
            instance.misses = 0
            self._hear(instance, answer)
        if not self.has_been_ready.is_set() and self._linked_pairs():
            self.has_been_ready.set()

    def refused(self, instance: Instance) -> None:
        """A call could not connect: the instance is out until a poll succeeds."""
        self._put_out(instance, "refused")

    def _hear(self, instance: Instance, answer: Mapping[str, Any]) -> None:
        expected = {"instance": instance.name, "role": instance.target.role, "config_digest": instance.target.config_digest}
        wrong = [
            f"{key} {answer.get(key)!r}, expected {value!r}" for key, value in expected.items() if answer.get(key) != value
        ]
        if wrong:
            complaint = "; ".join(wrong)
            if self._complaints.get(instance.name) != complaint:
                log.logger().error("instance_mismatch", target=instance.name, detail=complaint)
                self._complaints[instance.name] = complaint
            instance.said = {}
            self._put_out(instance, "mismatch")
            return
        self._complaints.pop(instance.name, None)
        if instance.judged != answer.get("incarnation"):
            instance.breaker.succeed()  # the failures were another process's
            instance.judged = answer.get("incarnation")
        instance.said = answer
        if answer.get("ready") is not True:
            own = answer.get("reasons")
            codes = [str(r.get("code")) for r in own if isinstance(r, dict)] if isinstance(own, list) else []
            self._put_out(instance, ",".join(codes) or "not ready")
        elif not instance.is_in:
            instance.is_in, instance.out_since, instance.last_words = True, None, ()
            self._note(instance, "in")
            log.logger().info("instance_in", target=instance.name, incarnation=answer.get("incarnation"))
        self._show(instance)

    def _put_out(self, instance: Instance, reason: str) -> None:
        if instance.is_in:
            log.logger().warning("instance_out", target=instance.name, reason=reason)
            self._note(instance, "out", reason)
            instance.out_since = self._clock.now()
        if reason in ("refused", "silent"):
            own = instance.said.get("reasons")
            instance.last_words = own if isinstance(own, list) and own else instance.last_words
            instance.said = {}
        instance.is_in = False
        instance.out_reason = reason
        self._show(instance)

    def _note(self, instance: Instance, what: str, reason: str = "") -> None:
        self.happenings.append(Happening(at=self._clock.now(), target=instance.name, what=what, reason=reason))

    async def _watch(self, instance: Instance) -> None:
        while True:
            await self.poll(instance)
            await self._clock.sleep(READY_POLL_S)

    def news(self) -> Awaitable[object]:
        """Is done when something has been heard of an instance after this call."""
        return self._news.wait()

    def _show(self, instance: Instance) -> None:
        """What is known of ``instance`` may have changed."""
        self._news.set()
        self._news = asyncio.Event()
        self._metrics.balancer.instance_ready(instance.name).set(instance.is_ready)
        self._metrics.balancer.breaker_open(instance.name).set(instance.breaker.is_open)

    # ------------------------------------------------------------------ choice

    def choose(self, avoid: Avoid | None = None) -> Pair:
        """The least loaded usable pair; equal ones in turn. Raises WorkerUnavailable when there is none."""
        pairs = self._linked_pairs()
        if avoid is not None:
            pairs = _without(pairs, avoid)
        # an open breaker only says "rather not": a refusal of everything is worse than the instance's true error
        pairs = [p for p in pairs if p.prefill.breaker.allows and p.decode.breaker.allows] or pairs
        if not pairs:
            detail = "; ".join(f"{reason['code']}: {reason['detail']}" for reason in self.reasons())
            raise self._unavailable(f"no usable pair of instances ({detail or 'no other than the one that failed'})")
        best = min(pairs, key=lambda pair: (pair.prefill.load, pair.decode.load))
        self._turns += 1
        for instance in (best.prefill, best.decode):
            instance.turn = self._turns
        return best

    def a_prefill(self) -> Instance:
        """The least loaded ready prefill instance. Raises WorkerUnavailable."""
        ready = self.ready("prefill")
        if not ready:
            raise self._unavailable("no prefill instance is ready")
        return min(ready, key=lambda instance: instance.load)

    def ready(self, role: LegRole) -> list[Instance]:
        """The instances of a role that may be chosen."""
        return [i for i in self.instances.values() if i.target.role == role and i.is_ready]

    def reasons(self) -> list[dict[str, Any]]:
        """Why no pair can be chosen; empty when one can."""
        if self._linked_pairs():
            return []
        found = []
        for role, code in (("prefill", "no_prefill"), ("decode", "no_decode")):
            instances = [i for i in self.instances.values() if i.target.role == role]
            if not any(i.is_ready for i in instances):
                detail = ", ".join(f"{i.name} {'draining' if i.is_drained else i.out_reason}" for i in instances)
                found.append({"code": code, "detail": detail, "rank": None})
        return found or [{"code": "no_linked_pair", "detail": "no link between ready instances is up", "rank": None}]

    def _unavailable(self, message: str) -> WorkerUnavailable:
        return WorkerUnavailable(message, code="worker_unavailable" if self.has_been_ready.is_set() else "starting")

    def _linked_pairs(self) -> list[Pair]:
        return [Pair(p, d) for p in self.ready("prefill") for d in self.ready("decode") if _are_linked(p, d)]

    # ------------------------------------------------------------------ load and verdicts

    @contextmanager
    def leg(self, instance: Instance, num_bytes: int) -> Iterator[None]:
        """Count one call as open. To be entered right after ``choose``, without a wait in between."""
        gauge = self._metrics.balancer.legs_open(instance.target.role)
        instance.open_legs += 1
        instance.open_bytes += num_bytes
        gauge.inc()
        is_trial = instance.breaker.take()
        try:
            yield
        finally:
            instance.open_legs -= 1
            instance.open_bytes -= num_bytes
            gauge.dec()
            if is_trial:
                instance.breaker.release()

    def succeeded(self, instance: Instance) -> None:
        """A call to it came to its good end."""
        if instance.breaker.is_open:
            log.logger().info("breaker_closed", target=instance.name)
            self._note(instance, "breaker closed")
        instance.breaker.succeed()
        self._show(instance)

    def failed(self, instance: Instance) -> None:
        """A call to it failed through its own fault."""
        others = [i for i in self.ready(instance.target.role) if i is not instance]
        was_open = instance.breaker.is_open
        instance.breaker.fail(may_open=bool(others))
        if instance.breaker.is_open and not was_open:
            log.logger().warning("breaker_opened", target=instance.name, reason=f"{BREAKER_FAILURES} failures in a row")
            self._note(instance, "breaker opened")
        self._show(instance)

    def drain(self, name: str, *, out: bool) -> Instance | None:
        """Take an instance out of the choice, or put it back. None: there is none of that name."""
        instance = self.instances.get(name)
        if instance is not None:
            if instance.is_drained != out:
                self._note(instance, "drained" if out else "undrained")
            instance.is_drained = out
            self._show(instance)
        return instance


def _are_linked(prefill: Instance, decode: Instance) -> bool:
    """Both sides say so: after a restart the survivor may still believe in the old link for a poll."""
    return _link(prefill, decode.name) == _link(decode, prefill.name) == "up"


def _link(instance: Instance, peer: str) -> object:
    peers = instance.said.get("peers")
    return peers.get(peer) if isinstance(peers, dict) else None


def _without(pairs: list[Pair], avoid: Avoid) -> list[Pair]:
    """Those that the attempt before leaves: others without the blamed instance, else others, else the same if allowed."""
    unblamed = [p for p in pairs if not avoid.blames(p)]
    if avoid.never:
        return unblamed
    others = [p for p in pairs if p != avoid.pair]
    return (
        [p for p in others if p in unblamed] or others or ([avoid.pair] if avoid.same_pair and avoid.pair in pairs else [])
    )
