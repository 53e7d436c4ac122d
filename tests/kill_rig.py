"""One process of a cluster is killed while a request is in a known phase; what became of everybody is told.

Owns the cluster, the phases and how each is reached, and the judgement that is the same for all of them. A phase is held by
``tests/fault/held.py``: nothing here is a guess about how long something takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

from tests.fault.held import Hold, Holds
from tests.processes import Processes, all_linked, gauge, instance_answer, ranks_of, running
from tests.topology import CHUNK, Topology, cluster_file
from tests.watched import CUT, Watched

Kind = Literal[
    "balancer",
    "prefill",
    "prefill first rank",
    "prefill last rank",
    "decode",
    "decode first rank",
    "decode last rank",
]
Phase = Literal["queued", "prefilling", "transferring", "committed", "first token", "decoding", "ending"]

KINDS: tuple[Kind, ...] = get_args(Kind)
PHASES: tuple[Phase, ...] = get_args(Phase)
BEFORE_HANDOVER = PHASES[:4]

TARGET = list(range(100, 100 + 4 * CHUNK + 20))  # the request that is met in a phase: five chunks
BESIDE = list(range(300, 340))  # those that run at the same time
NUM_TARGET, NUM_BESIDE = 24, 200
SLOTS = 2  # of a decode instance
HOLDS: dict[Phase, tuple[str, int, Hold]] = {  # letter of the instances, rank, point
    "prefilling": ("p", 0, Hold(at="prefill", prompt_len=len(TARGET), n=2 * CHUNK)),
    "transferring": ("p", 0, Hold(at="data", prompt_len=len(TARGET), n=2)),
    "committed": ("p", 1, Hold(at="end", prompt_len=len(TARGET))),
    "first token": ("d", 0, Hold(at="decode", prompt_len=len(TARGET), n=1)),
    "decoding": ("d", 0, Hold(at="decode", prompt_len=len(TARGET), n=NUM_TARGET // 2)),
    "ending": ("d", 0, Hold(at="decode", prompt_len=len(TARGET), n=NUM_TARGET - 1)),
}
BODY: dict[str, Any] = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}

TYPED = ("worker_unavailable", "transfer_failed", "rank_lost", "draining", "starting")
REACHED_S = 60.0
READY_WITHIN_S = 120.0
FATE_WITHIN_S = 30.0
SETTLED_S = 0.2
REFUSED_WITHIN_S = 4.0  # stated: one; less than the five of a silent link, for an ended process is seen at once
NO_PAIR_S = 5.0  # so long another pair is waited for to go on with an answer
ENDS_WITHIN_S = 90.0  # an answer that is begun again or finished by another pair
IDLE_WITHIN_S = 12.0  # stated: two seconds and the five until a link is known to be down
TRIES = 3


class Missed(Exception):
    """The phase was over before the kill."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One combination and how it went. Seconds count from the kill."""

    pools: str
    kind: Kind
    phase: Phase
    is_streamed: bool
    outcome: str
    end_s: float
    serving_s: float
    tries: int

    def __str__(self) -> str:
        how = "streamed" if self.is_streamed else "whole"
        return (
            f"{self.pools:6} {self.kind:19} {self.phase:13} {how:9} {self.outcome:20} "
            f"ended after {self.end_s:5.2f} s  serving after {self.serving_s:5.2f} s  tries {self.tries}"
        )


class Rig:
    """A running cluster in which one process after the other is killed and comes back."""

    def __init__(self, processes: Processes, topology: Topology, holds: Holds) -> None:
        self.processes = processes
        self.topology = topology
        self.holds = holds
        self.right: dict[str, tuple[int, ...]] = {}
        self._number = 0
        self._judged: dict[str, int] = {}  # characters of each log

    @property
    def pools(self) -> str:
        return f"{len(self._of('p'))}P+{len(self._of('d'))}D"

    async def undisturbed(self) -> None:
        """The right answers."""
        for name, body in (("target", _target(True)), ("beside", _BESIDE_BODY)):
            call = await self._ended(self._start(name, body))
            assert isinstance(call.outcome, tuple), call.outcome
            self.right[name] = call.outcome
        assert (len(self.right["target"]), len(self.right["beside"])) == (NUM_TARGET, NUM_BESIDE)

    async def meet(self, kind: Kind, phase: Phase, *, is_streamed: bool) -> Row:
        """Kill one process of this kind while a request is in this phase; judge; bring it back."""
        for tries in range(1, TRIES + 1):
            self._number += 1
            try:
                return await self._meet(kind, phase, is_streamed=is_streamed, tries=tries)
            except Missed:
                self.holds.clear()
                await self.topology.idle_within(ENDS_WITHIN_S)  # the others come to their end
            finally:
                self.holds.clear()
        raise AssertionError(f"{phase} was missed {TRIES} times")

    async def _meet(self, kind: Kind, phase: Phase, *, is_streamed: bool, tries: int) -> Row:
        before = await self._incarnations()
        beside = await self._start_beside(SLOTS if phase == "queued" else 1)
        self._put_holds(phase)
        target = self._start("target", _target(is_streamed))
        pair = await self._reached(phase, target)
        victim = "balancer" if kind == "balancer" else pair[kind[0]]
        killed = self._kill(kind, victim)
        self.holds.clear(but=victim)  # what it was about to do it must not do with its last breath
        serving = asyncio.ensure_future(self._serves())
        try:
            for call in (target, *beside):
                await self._ended(call)
            self._judge(kind, phase, victim, target, end_s=target.ended - killed)
            for call in beside:
                self._judge_beside(kind, victim, call)
            self._judge_fate(kind, victim)
            self.processes.start(victim)
            serving_s = await asyncio.wait_for(serving, READY_WITHIN_S) - killed
        finally:
            serving.cancel()
        await all_linked(self.processes, self.topology)
        await self.topology.idle_within(IDLE_WITHIN_S)
        after = await self._incarnations()
        assert {name for name in after if after[name] != before[name]} == {victim} - {"balancer"}
        self._judge_logs(kind, phase, victim, target)
        return Row(
            pools=self.pools,
            kind=kind,
            phase=phase,
            is_streamed=is_streamed,
            outcome="right" if isinstance(target.outcome, tuple) else str(target.outcome),
            end_s=target.ended - killed,
            serving_s=serving_s,
            tries=tries,
        )

    # -- reaching a phase ------------------------------------------------------------------------------------------

    def _start(self, name: str, body: dict[str, Any]) -> Watched:
        return Watched.start(self.topology.client, f"{self._number}-{name}", body)

    async def _start_beside(self, each: int) -> list[Watched]:
        """Calls that are decoding, ``each`` at every decode instance."""
        calls = [self._start(f"beside-{i}", _BESIDE_BODY) for i in range(each * len(self._of("d")))]
        await self._until(lambda: all(call.token_ids for call in calls), calls)
        running = [
            await gauge(self.processes, self.topology, name, "sequences", 'state="running"') for name in self._of("d")
        ]
        if running != [each] * len(running):
            raise Missed
        return calls

    def _put_holds(self, phase: Phase) -> None:
        letter, rank, hold = HOLDS.get(phase, ("d", 0, Hold(at="decode", prompt_len=len(BESIDE))))
        for name in self._of(letter):
            self.holds.put(name, rank, hold)

    async def _reached(self, phase: Phase, target: Watched) -> dict[str, str]:
        """Wait until the request is in the phase; the instances that it is at, by letter."""
        if phase == "queued":
            await self._until(lambda: self.holds.held() == self._of("d"), [target])
            pair = {"d": await self._where("d", "sequences", target, label='state="waiting"')}
        else:
            letter, _, _ = HOLDS[phase]
            await self._until(lambda: bool(self.holds.held()), [target])
            pair = {letter: self.holds.held()[0]}
        others = [letter for letter in "pd" if letter not in pair]
        for letter in others:
            is_over = letter == "p" and phase not in BEFORE_HANDOVER
            pair[letter] = self._of("p")[0] if is_over else await self._where(letter, "transfers_open", target)
        if phase == "committed":
            await asyncio.sleep(SETTLED_S)  # of the prefill side only what the rank is held at is missing by then
        _, _, hold = HOLDS.get(phase, ("", 0, Hold(at="prefill", prompt_len=0)))
        if hold.at == "decode" and target.is_streamed:  # half a character is not said before the other half
            await self._until(lambda: hold.n >= len(target.token_ids) >= max(1, hold.n - 4), [target])
        elif target.token_ids or target.outcome is not None:
            raise Missed
        return pair

    async def _where(self, letter: str, metric: str, target: Watched, *, label: str = "") -> str:
        """The one instance whose gauge is not zero."""
        until = time.monotonic() + REACHED_S
        while time.monotonic() < until:
            for name in self._of(letter):
                if await gauge(self.processes, self.topology, name, metric, label):
                    return name
            if target.outcome is not None:
                raise Missed
            await asyncio.sleep(0.02)
        raise AssertionError(f"no instance with {metric}")

    async def _until(self, is_so: Callable[[], bool], calls: Iterable[Watched]) -> None:
        until = time.monotonic() + REACHED_S
        while not is_so():
            if any(call.outcome is not None for call in calls):
                raise Missed
            assert time.monotonic() < until, "the phase is not reached"
            await asyncio.sleep(0.005)

    # -- the kill and its end --------------------------------------------------------------------------------------

    def _kill(self, kind: Kind, victim: str) -> float:
        """When it was."""
        if kind.endswith("rank"):
            ranks = ranks_of(self.processes.running[victim])
            os.kill(ranks[0 if "first" in kind else -1], signal.SIGKILL)
        else:
            self.processes.signal(victim)
        return time.monotonic()

    async def _ended(self, call: Watched) -> Watched:
        assert call.task is not None
        await asyncio.wait_for(call.task, ENDS_WITHIN_S)
        return call

    async def _serves(self) -> float:
        """When an ordinary request was answered well again."""
        for number in itertools.count():
            call = await self._ended(self._start(f"after-{number}", _target(False)))
            if call.outcome == self.right["target"]:
                return call.ended
            assert call.outcome in (CUT, *TYPED), call.outcome
            await asyncio.sleep(0.1)
        raise AssertionError

    # -- judging ---------------------------------------------------------------------------------------------------

    def _judge(self, kind: Kind, phase: Phase, victim: str, target: Watched, *, end_s: float) -> None:
        """The one end that this combination has."""
        right = self.right["target"]
        assert tuple(target.token_ids) == right[: len(target.token_ids)], "what was said stands"
        assert len(target.heads) <= 1, "all chunks have one head"
        if not self._is_hit(kind, phase):
            assert target.outcome == right, target.outcome
            return
        if kind == "balancer":
            assert target.outcome == CUT
        elif self._has_other(victim):
            assert target.outcome == right, target.outcome
        else:
            codes = {"rank_lost": 500} if kind.endswith("rank") else {"worker_unavailable": 503}
            if kind.endswith("rank") and phase in BEFORE_HANDOVER:
                codes["draining"] = (
                    503  # to the second attempt, where the other side's echo was all that the first one heard
                )
            assert target.outcome in codes, target.outcome
            assert target.status == (200 if target.token_ids else codes[str(target.outcome)])
            assert end_s < REFUSED_WITHIN_S + NO_PAIR_S * (phase not in BEFORE_HANDOVER)

    def _is_hit(self, kind: Kind, phase: Phase) -> bool:
        """Whether the request needs the process still."""
        return not kind.startswith("prefill") or phase in BEFORE_HANDOVER

    def _judge_beside(self, kind: Kind, victim: str, call: Watched) -> None:
        """Calls that were decoding; some may have ended before the kill."""
        outcomes = {self.right["beside"]} if kind != "balancer" else {self.right["beside"], CUT}
        if kind.startswith("decode") and not self._has_other(victim):
            outcomes.add("rank_lost" if kind.endswith("rank") else "worker_unavailable")
        assert call.outcome in outcomes, call.outcome
        assert tuple(call.token_ids) == self.right["beside"][: len(call.token_ids)]

    def _judge_fate(self, kind: Kind, victim: str) -> None:
        """A killed process is gone with all that it started; a lost rank ends its instance."""
        status = self.processes.wait(victim, FATE_WITHIN_S)
        assert self.processes.left_of(victim, grace_s=FATE_WITHIN_S) == []
        self.holds.clear()
        if kind.endswith("rank"):
            assert status == 1
            assert self.processes.log(victim).count(" error rank_lost ") == 1
        else:
            assert status == 128 + signal.SIGKILL

    def _judge_logs(self, kind: Kind, phase: Phase, victim: str, target: Watched) -> None:
        """No trace of what is expected; the balancer tells of the request's end once, and of its cause once an attempt."""
        new = {name: self._new_of_log(name) for name in self.processes.names}
        for name, text in new.items():
            assert "Traceback" not in text or name == victim, f"{name}: {text}"
        if kind == "balancer":
            gone = f" request_cancelled .* by=client .*request={target.request_id}$"
            assert any(re.search(gone, text, re.MULTILINE) for text in new.values()), new
            return
        lines = [line for line in new["balancer"].splitlines() if f"request={target.request_id}" in line]
        ends = [line for line in lines if " request_finished " in line or " request_failed " in line]
        assert len(ends) == 1, lines
        blamed = sum(" leg_failed " in line and f"target={victim} cause=self " in line for line in lines)
        attempts = 1 + sum(" retry " in line for line in lines)
        is_told_elsewhere = kind.endswith("rank")  # by its instance, which may have heard of it from the others at first
        assert blamed <= (attempts if self._is_hit(kind, phase) else 0), lines
        assert blamed or is_told_elsewhere or not self._is_hit(kind, phase), lines

    def _new_of_log(self, name: str) -> str:
        log = self.processes.running[name].log
        text = Path(log).read_text()
        before, self._judged[log] = self._judged.get(log, 0), len(text)
        return text[before:]

    # -- the cluster -----------------------------------------------------------------------------------------------

    def _of(self, letter: str) -> list[str]:
        return sorted(name for name in self.processes.http_urls if name.startswith(letter))

    def _has_other(self, victim: str) -> bool:
        return len(self._of(victim[0])) > 1

    async def _incarnations(self) -> dict[str, str]:
        said = [(n, await instance_answer(self.processes, self.topology, n, "/ready")) for n in self.processes.http_urls]
        return {name: answer["incarnation"] for name, answer in said}


def _target(is_streamed: bool) -> dict[str, Any]:
    return {**BODY, "prompt": TARGET, "max_tokens": NUM_TARGET, "stream": is_streamed}


_BESIDE_BODY = {**BODY, "prompt": BESIDE, "max_tokens": NUM_BESIDE, "stream": True}


@contextlib.asynccontextmanager
async def rig(folder: Path, checkpoint: Path, *, num_prefill: int, num_decode: int) -> AsyncIterator[Rig]:
    """A cluster whose ranks can be held; prompts are computed and handed over anew each time."""
    engine = {"rank_lost_s": 2, "prefix_cache": False, "queue_timeout_s": 2 * ENDS_WITHIN_S}
    config = cluster_file(
        folder,
        checkpoint,
        num_prefill=num_prefill,
        num_decode=num_decode,
        prefill={"pp_size": 2},
        decode={"kvp_size": 2, "attn_tp_size": 2},
        prefill_engine=engine,
        decode_engine={**engine, "max_num_seqs": SLOTS},
        model={"path": str(checkpoint), "dtype": "float32"},
    )
    holds = Holds(folder / "holds")
    modules = {f"longcat_pd.{role}_worker": ("tests.fault.held", role, str(holds.folder)) for role in ("prefill", "decode")}
    async with running(config, partial(Processes, modules=modules)) as (processes, topology):
        made = Rig(processes, topology, holds)
        await all_linked(processes, topology)
        await made.undisturbed()
        yield made
