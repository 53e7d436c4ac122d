"""All tests in two runs of pytest beside each other, for two cores: `python -m tests.halves ARGUMENTS`.

One half starts processes and waits for them, the other computes in one process most of the time. The output of the first is
shown as it comes, that of the other when both have ended, then one closing line for both. Ends with status 0 if both do.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import IO

TESTS = Path(__file__).parent
WITH_PROCESSES = ("fault", "integration", "soak")
KINDS = ("failed", "passed", "skipped", "deselected", "xfailed", "xpassed", "warning", "warnings", "error", "errors")


def halves() -> tuple[list[str], list[str]]:
    """Folders with tests; each is in one of the halves."""
    folders = sorted({file.relative_to(TESTS).parts[0] for file in TESTS.glob("*/**/test_*.py")})
    paths = {name: f"{TESTS.name}/{name}" for name in folders}
    return [paths[n] for n in WITH_PROCESSES if n in paths], [
        path for name, path in paths.items() if name not in WITH_PROCESSES
    ]


def closing(outputs: list[str], seconds: float) -> str:
    """Of several outputs of pytest: the counts of their last lines as one."""
    counts = Counter[str]()
    for output in outputs:
        last = output.rstrip().rpartition("\n")[2]
        counts.update({kind: int(count) for count, kind in re.findall(r"(\d+) (\w+)", last) if kind in KINDS})
    counted = ", ".join(f"{counts[kind]} {kind}" for kind in KINDS if counts[kind])
    return f"{counted} in {seconds:.2f}s ({timedelta(seconds=int(seconds))})"


def run(arguments: list[str]) -> int:
    began, outputs = time.monotonic(), list[str]()
    with tempfile.TemporaryFile("w+") as kept:
        first, second = ([sys.executable, "-m", "pytest", *arguments, *half] for half in halves())
        with (
            subprocess.Popen(second, stdout=kept, stderr=subprocess.STDOUT, cwd=TESTS.parent, text=True) as behind,
            subprocess.Popen(first, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=TESTS.parent, text=True) as shown,
        ):
            try:
                assert shown.stdout is not None
                outputs.append(_echoed(shown.stdout))
                statuses = [shown.wait(), behind.wait()]
            finally:  # an interrupt reaches both, any other end only this process
                shown.terminate()
                behind.terminate()
        kept.seek(0)
        outputs.append(_echoed(kept))
    print(closing(outputs, time.monotonic() - began))
    return next((status for status in statuses if status), 0)


def _echoed(source: IO[str]) -> str:
    """What it says, when all of it was shown."""
    said = list[str]()
    while text := source.read(1):
        said.append(text)
        print(text, end="", flush=True)
    return "".join(said)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
