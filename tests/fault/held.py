"""Workers whose ranks stop where a test tells them to, so that a request can be met in one phase and in no other.

    python -m tests.fault.held ROLE FOLDER --config YAML --instance NAME

A test writes a hold for a rank into the folder (``Holds``); the rank looks there at every point that it passes, and stays
at the one that is meant until the hold is taken away. Everything else of the worker is the product's.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from longcat_pd import wire
from longcat_pd.config.schema import RankSpec
from longcat_pd.decode_worker import __main__ as decode_main
from longcat_pd.decode_worker.rank import arrival_lanes
from longcat_pd.engine.handover import Lanes, MakeLanes
from longcat_pd.engine.plan import StepOutput, StepPlan
from longcat_pd.engine.rank import run_rank
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.frames import decode_header, transfer_key
from longcat_pd.kv_transfer.messages import Push
from longcat_pd.kv_transfer.push import PushLanes, Report
from longcat_pd.kv_transfer.transport import Caller, Lane, LaneEnd
from longcat_pd.prefill_worker import __main__ as prefill_main
from longcat_pd.prefill_worker.rank import push_lanes
from longcat_pd.server.peered import WorkerRole
from longcat_pd.server.worker import run_worker

FOLDER = "LONGCAT_PD_TEST_HOLDS"  # the ranks of a driver are told by their environment
LONGEST_S = 60.0  # a hold that nobody takes away
LOOK_S = 0.004

At = Literal["prefill", "decode", "data", "end"]


@dataclass(frozen=True, kw_only=True)
class Hold:
    """A point in the life of the sequences with a prompt of ``prompt_len`` tokens.

    ``at``: before the prompt's chunk that begins at position ``n``; before the ``n``-th decode step; before the ``n``-th
    message of a layer's blocks on a lane; before the message that says that a lane has them all. Or any later one.
    """

    at: At
    prompt_len: int
    n: int = 0


class Holds:
    """The folder as a test sees it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def put(self, instance: str, rank: int, hold: Hold) -> None:
        """The rank will stay at this point."""
        new = self.folder / f"{instance}.{rank}.new"
        new.write_text(json.dumps(asdict(hold)))
        new.rename(_hold_file(self.folder, instance, rank))

    def held(self) -> list[str]:
        """Instances with a rank that stays somewhere now."""
        return sorted({path.name.split(".")[0] for path in self.folder.glob("*.held")})

    def clear(self, *, but: str = "") -> None:
        """All go on, but the ranks of one instance."""
        for path in [*self.folder.glob("*.hold"), *self.folder.glob("*.held")]:
            if path.name.split(".")[0] != but:
                path.unlink(missing_ok=True)


def _hold_file(folder: Path, instance: str, rank: int) -> Path:
    return folder / f"{instance}.{rank}.hold"


class _Gate:
    """The folder as one rank sees it."""

    def __init__(self, spec: RankSpec) -> None:
        self._hold = _hold_file(Path(os.environ[FOLDER]), spec.instance.name, spec.rank)

    def pass_by(self, at: At, prompt_len: int, n: int = 0) -> None:
        """Stay here for as long as a hold says so."""
        try:
            wanted = Hold(**json.loads(self._hold.read_text()))
        except FileNotFoundError:
            return
        if (at, prompt_len) != (wanted.at, wanted.prompt_len) or n < wanted.n:
            return
        held, until = self._hold.with_suffix(".held"), time.monotonic() + LONGEST_S
        held.touch()
        while self._hold.exists() and time.monotonic() < until:
            time.sleep(LOOK_S)
        held.unlink(missing_ok=True)


class _HeldRunner:
    """``ModelRunner.execute`` behind a gate. Knows of each slot how long its prompt is and how often it has stepped."""

    def __init__(self, gate: _Gate) -> None:
        self._gate = gate
        self._lengths: dict[int, int] = {}
        self._steps = Counter[int]()

    def execute(self, runner: ModelRunner, plan: StepPlan) -> StepOutput:
        for admit in plan.admit:
            self._lengths[admit.slot] = admit.prompt_len
            self._steps[admit.slot] = 0
        for segment in plan.segments:
            length = self._lengths[segment.slot]
            if segment.start >= 0:
                self._gate.pass_by("prefill", length, segment.start)
            else:
                self._steps[segment.slot] += 1
                self._gate.pass_by("decode", length, self._steps[segment.slot])
        return _EXECUTE(runner, plan)


_EXECUTE = ModelRunner.execute


class _HeldCaller:
    """Lanes of another caller, behind a gate."""

    def __init__(self, inner: Caller, gate: _Gate) -> None:
        self._inner = inner
        self.gate = gate
        self.lengths: dict[int, int] = {}  # of prompts, by the key of their transfer

    def begun(self, push: Push, prompt_len: int) -> None:
        self.lengths[transfer_key(push.transfer_id, push.generation)] = prompt_len

    def open(self, target: LaneEnd, address: tuple[str, int], timeout_s: float) -> Lane:
        return _HeldLane(self, self._inner.open(target, address, timeout_s))

    def close(self) -> None:
        self._inner.close()


class _HeldLane:
    def __init__(self, owner: _HeldCaller, inner: Lane) -> None:
        self._owner = owner
        self._inner = inner
        self._sent = Counter[int]()

    def send(self, message: Sequence[torch.Tensor]) -> None:
        header = decode_header(message[0])
        self._sent[header.key] += 1
        length = self._owner.lengths.get(header.key, 0)
        self._owner.gate.pass_by("end" if header.is_end else "data", length, self._sent[header.key])
        self._inner.send(message)

    def receive_into(self, tensor: torch.Tensor, timeout_s: float | None) -> None:
        self._inner.receive_into(tensor, timeout_s)

    def drain(self, timeout_s: float) -> None:
        self._inner.drain(timeout_s)

    def close(self) -> None:
        self._inner.close()


def _held_push(spec: RankSpec, cache: KVCache, report: Report) -> Lanes:
    push, arrival = push_lanes(spec, cache, report)
    assert isinstance(push, PushLanes)
    caller, begin = _HeldCaller(push.caller, _Gate(spec)), push.begin

    def noted_begin(push: Push, *, prompt_len: int, blocks: bytes, split_start: int) -> None:
        caller.begun(push, prompt_len)
        begin(push, prompt_len=prompt_len, blocks=blocks, split_start=split_start)

    push.caller, push.begin = caller, noted_begin  # type: ignore[method-assign]
    return push, arrival


def _run(config: str, lanes: MakeLanes) -> None:
    spec = wire.from_json(RankSpec, config)
    held = _HeldRunner(_Gate(spec))
    ModelRunner.execute = lambda runner, plan: held.execute(runner, plan)  # type: ignore[method-assign]
    run_rank(spec, lanes)


prefill = partial(_run, lanes=_held_push)
decode = partial(_run, lanes=arrival_lanes)

_BUILD = {"prefill": prefill_main.build, "decode": decode_main.build}


def main(role: str, folder: str, arguments: list[str]) -> int:
    os.environ[FOLDER] = folder
    return run_worker(WorkerRole(name=role, rank_entry=f"tests.fault.held:{role}", build=_BUILD[role]), arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
