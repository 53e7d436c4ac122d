"""Experts and rows for the NPU table beside the reference: drawn matrices as they are loaded, and prepared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.kernels import NpuSettings, Ops
from tests.npu.device import install

install()
HIDDEN, INNER, EXPERTS, TOPK = 1024, 64, 4, 3
REFERENCE = kernels.load("cpu")


def npu_ops(dtype: torch.dtype = torch.float32, **settings: Any) -> Ops:
    return kernels.load("npu", npu=NpuSettings(dtype=dtype, **settings))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype = torch.float32) -> None:
    """``wanted`` in fp32, ``got`` computed with inputs and results in ``dtype``."""
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    scale = float(wanted.float().abs().max().clamp_min(1e-6)) if wanted.numel() else 1.0
    torch.testing.assert_close(got.float(), wanted.float(), rtol=tolerance, atol=tolerance * scale)


@dataclass(frozen=True)
class Experts:
    """As they are loaded. ``given``: the keywords of an operator of the reference."""

    given: dict[str, Tensor]

    @classmethod
    def drawn(
        cls,
        *,
        is_int8: bool = False,
        dtype: torch.dtype = torch.float32,
        count: int = EXPERTS,
        hidden: int = HIDDEN,
        inner: int = INNER,
    ) -> Experts:
        if not is_int8:
            gate_up = randn(count, hidden, 2 * inner, seed=1, dtype=dtype) * hidden**-0.5
            return cls({"gate_up": gate_up, "down": randn(count, inner, hidden, seed=2, dtype=dtype) * inner**-0.5})
        draw = torch.Generator().manual_seed(3)
        shapes = {"gate_up": (count, 2 * inner, hidden), "down": (count, hidden, inner)}
        given = {name: torch.randint(-127, 128, shape, generator=draw).to(torch.int8) for name, shape in shapes.items()}
        for name, (_, out, inside) in shapes.items():
            given[f"{name}_scale"] = (0.5 + torch.rand(count, out, generator=draw)) * inside**-0.5 / 64
        return cls(given)

    @property
    def is_int8(self) -> bool:
        return "down_scale" in self.given

    def prepared(self, ops: Ops) -> dict[str, Tensor]:
        kind = "experts_int8" if self.is_int8 else "experts"
        made = dict(self.given)
        made["gate_up"], made["down"] = (ops.prepare(self.given[name], kind) for name in ("gate_up", "down"))
        if self.is_int8:
            made["down_scale"] = ops.prepare(self.given["down_scale"], "experts_scale")
        return made


def drawn_ids(rows: int, *, among: int, topk: int = TOPK, seed: int = 0) -> Tensor:
    """Distinct in a row."""
    draw = torch.Generator().manual_seed(seed)
    ids = [torch.randperm(among, generator=draw)[:topk] for _ in range(rows)]
    return torch.stack(ids) if ids else torch.empty(0, topk, dtype=torch.int64)
