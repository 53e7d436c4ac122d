"""What is said to a process of runners and by it (see ``runner.py``), and the process as its caller sees it. No torch."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.bench.servers import BenchFailed

READY = "ready"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One runner: its name in orders, its checkpoint, and its settings as in `serve --set`."""

    name: str
    model: str
    settings: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Prefill ``batch`` prompts of ``length`` ids in one plan; then decode until each has ``num_tokens`` more on average.

    Measured are the decode steps, or the prompts where ``num_tokens`` is 0. ``grammar``: what all answers are bound to.
    """

    name: str
    batch: int
    length: int
    num_tokens: int
    seed: int
    grammar: str = ""

    @classmethod
    def from_json(cls, line: str) -> Order:
        """What ``to_json`` made."""
        return cls(**json.loads(line))

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True, kw_only=True)
class Took:
    """``steps`` took ``seconds`` together and brought ``tokens``; ``step_s`` is the median of them."""

    step_s: float
    seconds: float
    steps: int
    tokens: int

    @classmethod
    def from_json(cls, line: str) -> Took:
        """What ``to_json`` made."""
        return cls(**json.loads(line))

    def to_json(self) -> str:
        """One line."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Runners:
    """A process of runners. Starts at once; ``wait_until_ready`` before the first order."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self._process = process
        self._log = log
        self._began = time.monotonic()

    def wait_until_ready(self) -> float:
        """Seconds from the command to there."""
        answer = self._read()
        if answer != READY:
            raise BenchFailed(f"runners said {answer!r}; see {self._log}")
        return time.monotonic() - self._began

    def take(self, order: Order) -> Took:
        """Have an order obeyed."""
        assert self._process.stdin is not None
        self._process.stdin.write(order.to_json() + "\n")
        self._process.stdin.flush()
        return Took.from_json(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchFailed(f"runners ended; see {self._log}:\n{self._log.read_text(errors='replace')[-2000:]}")
        return line.strip()


@contextmanager
def runners(setups: Sequence[Setup], *, folder: Path) -> Iterator[Runners]:
    """A process with these runners, its log in ``folder``. Ends with the block."""
    said = json.dumps([dataclasses.asdict(setup) for setup in setups])
    log = folder / f"runners-{'-'.join(setup.name for setup in setups).replace(' ', '-')}.log"
    with log.open("a", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "longcat_pd.bench.runner", said],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            bufsize=1,
        )
    with process:
        yield Runners(process, log)  # leaving the block closes its standard input, which ends it
