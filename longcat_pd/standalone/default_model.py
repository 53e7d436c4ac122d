"""Which checkpoint is served where none is named: the small trained one of the package, under a name of its own.

It is computed in float32, so that one engine says at temperature 0 what the cluster of ``local-cpu.yaml`` says; on NPUs,
whose operators take 16 bits, as it is stored. Knows the two ways of naming one on the command line, and no engine.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from longcat_pd.config.shipped import SERVED_NAME, shipped_checkpoint

HELP = "checkpoint's folder; without it the small trained model that comes with the package"


def with_default(model: str | None, overrides: Sequence[str]) -> tuple[str, Sequence[str]]:
    """The folder of the checkpoint, and the settings to lay over it. Says on standard error that none was named.

    Args:
        model: of ``--model``, or None.
        overrides: ``key.path=value``; one for ``model.path`` names a checkpoint too.

    Raises ConfigError where the package's own is damaged.
    """
    if model is not None:
        return model, overrides
    if any(item.startswith(("model.path=", "model=")) for item in overrides):
        return ".", overrides
    folder = str(shipped_checkpoint())
    sys.stderr.write(f"no --model: the small trained model of the package, {folder}\n")
    dtype = [] if "device=npu" in overrides else ["model.dtype=float32"]
    return folder, [f"model.served_name={SERVED_NAME}", *dtype, *overrides]
