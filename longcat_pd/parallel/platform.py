"""What differs between kinds of devices for a rank process: one record for each kind. Knows no models and no layouts."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from longcat_pd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Platform:
    """One kind of device.

    Attributes:
        kind: name in the configuration, and of the torch device.
        collective_backend: backend of torch.distributed.
        scheduling_policy: policy of ``os.sched_setscheduler`` for rank processes; None leaves the default. On CPU it is
            SCHED_BATCH: gloo's spinning IO thread otherwise starves the thread that holds its lock for a scheduler tick,
            which makes small collectives of ranks that outnumber the cores 2.5 to 5 times slower.
        threads: torch threads of a rank; None leaves torch's choice.
    """

    kind: str
    collective_backend: str
    scheduling_policy: int | None
    threads: int | None

    def prepare_rank(self) -> None:
        """First act of a rank process; threads that start later inherit it. Needs no privilege."""
        if self.scheduling_policy is not None:
            os.sched_setscheduler(0, self.scheduling_policy, os.sched_param(0))
        if self.threads is not None:
            torch.set_num_threads(self.threads)


_PLATFORMS = {
    "cpu": Platform(kind="cpu", collective_backend="gloo", scheduling_policy=os.SCHED_BATCH, threads=1),
}


def platform_of(device: str) -> Platform:
    """The record of a device kind. Raises ConfigError for a kind without one."""
    if device not in _PLATFORMS:
        raise ConfigError(f"device {device}: no such platform, one of {', '.join(_PLATFORMS)}", param="device")
    return _PLATFORMS[device]
