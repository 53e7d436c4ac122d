"""How the decode step is executed: as it stands, or as one compiled graph for each number of rows.

Owns the choice by ``exe_mode`` and the padding of a batch to a compiled shape. Knows the step as a function only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longcat_pd.config.schema import RankSpec
from longcat_pd.engine.decode_step import DecodeStep
from longcat_pd.parallel.mesh import Mesh

Form = Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]


class StepForms:
    """The step, ready to run for any number of sequences up to the slots."""

    def __init__(self, step: DecodeStep, spec: RankSpec, mesh: Mesh, *, model_digest: str) -> None:
        self._step = step
        self._forms: dict[int, Form] = {}

    def run(self, slots: Sequence[int], lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """See ``DecodeStep.forward``."""
        return self._step(torch.tensor(slots), lengths)
