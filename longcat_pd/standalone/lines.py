"""The request bodies of a file, answered by an engine whose one rank is this process, or by several in their own.

Owns the file and the life of the engine.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.errors import ConfigError
from longcat_pd.server.checked_face import checked_face
from longcat_pd.server.run import STATUS_FAULT, STATUS_OK
from longcat_pd.server.text import TextProcessor
from longcat_pd.standalone.batch import answer_in_order
from longcat_pd.standalone.measured import over_processes
from longcat_pd.standalone.offline import offline
from longcat_pd.standalone.start import ShownStart


def read_lines(path: str) -> list[tuple[int, bytes]]:
    """The lines that are not empty, with their numbers in the file. Raises ConfigError."""
    try:
        numbered = enumerate(Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), start=1)
        return [(number, line) for number, line in numbered if line.strip()]
    except OSError as error:
        raise ConfigError(f"--input {path}: {error.strerror}") from error


async def answer_file(spec: InstanceSpec, lines: Sequence[tuple[int, bytes]], out: TextIO, *, progress: TextIO) -> int:
    """Answer every line; the exit status. Raises ConfigError.

    ``spec``: on ports of its own. ``progress``: where the start is shown, if it is a terminal.
    """
    clock = MonotonicClock()
    shown = ShownStart(progress, clock)
    if spec.parallel.world_size == 1:
        with shown.inline() as tell:
            service = offline(spec, tell=tell)
    else:
        service = over_processes(spec, clock, on_progress=shown.progressed).service
    face = checked_face(service, TextProcessor.load(spec.model.path))
    try:
        await shown.start(service)
        await answer_in_order(face, lines, out, width=2 * spec.engine.max_num_seqs)
    finally:
        await service.close()
    return STATUS_FAULT if service.readiness().is_lost else STATUS_OK
