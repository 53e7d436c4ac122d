"""This machine's processor in place of a device, for what a test wants to see without one."""

from __future__ import annotations

from dataclasses import replace

from longcat_pd.parallel import platform


def host(kind: str, collectives: str) -> None:
    """In this process the device ``kind`` is the processor, whose ranks are joined by gloo."""
    cpu = platform._PLATFORMS["cpu"]
    platform._PLATFORMS[kind] = replace(cpu, kind=kind, collectives=collectives)
