"""This machine's processor in place of a device, for what a test wants to see without one."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroupGloo  # type: ignore[attr-defined]

from longcat_pd.parallel import platform
from longcat_pd.parallel.platform import HostRuntime

_FOREVER = timedelta(days=1)


def host(kind: str, collectives: str) -> None:
    """In this process the device ``kind`` is the processor, whose ranks are joined by gloo."""
    cpu = platform._PLATFORMS["cpu"]
    platform._PLATFORMS[kind] = replace(cpu, kind=kind, collectives=collectives)


class PairedRuntime(HostRuntime):
    """A device of which two have a network between them: gloo plays its part."""

    def make_pair(self, store: Any, place: int) -> Any:
        return ProcessGroupGloo(store, place, 2, _FOREVER)

    def abort(self, group: Any) -> None:
        for end in (0, 1):  # one of them is not this one, and a receive that is too late ends the pair
            group.recv([torch.empty(1)], end, 1).wait(timedelta(milliseconds=1))
