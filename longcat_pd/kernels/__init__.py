"""What a device can do. ``load`` gives the table of operators of a device; the table itself is ``ops.Ops``."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from longcat_pd.kernels.npu import NpuSettings
from longcat_pd.kernels.npu import table as npu_table
from longcat_pd.kernels.npu.execution import executed
from longcat_pd.kernels.npu.sizes import IndexerSizes, ModelSizes, fused_bytes
from longcat_pd.kernels.npu.sizes import check_sizes as check_npu_sizes
from longcat_pd.kernels.opaque import sealed
from longcat_pd.kernels.ops import Ops
from longcat_pd.kernels.reference import steady_table, table
from longcat_pd.kernels.refusal import Unsupported
from longcat_pd.kernels.unfused import unfused as with_twins

__all__ = ["IndexerSizes", "ModelSizes", "NpuSettings", "Ops", "Unsupported", "check_sizes", "load"]


def load(
    device: str,
    *,
    exe_mode: str = "eager",
    is_steady: bool = False,
    unfused: Collection[str] = (),
    npu: NpuSettings | None = None,
) -> Ops:
    """The operators of a device kind, one that the resolver lets pass: plain torch wherever nothing better is known.

    ``exe_mode``: whether a compiler looks at what is computed with them.
    ``is_steady``: sums over keys that are spread over ranks, and norms, activations, rotations and routing, are made in
    fp64 and rounded once, so that layouts and executions (torch, a compiled graph) agree to the bit. Worth its price where
    the last bit decides about a whole step: in front of a product that quantises. On cpu only: others round as they do.
    ``unfused``: parts whose operators are replaced by slow, obvious twins (see ``unfused``). An NPU has a composition for
    the prolog, and no twins: its weights are prepared for its own operators.
    ``npu``: what can be chosen on that device.

    Raises:
        Unsupported: the device or its software lacks what is asked for.
    """
    if device == "npu":
        if others := sorted(set(unfused) - {"prolog"}):
            text = f"engine.unfused={others}: device=npu has twins of nothing but the prolog; leave them out"
            raise Unsupported(text, param="engine.unfused")
        settings = npu or NpuSettings()
        settings = replace(settings, is_prolog_fused=settings.is_prolog_fused and "prolog" not in unfused)
        return executed(npu_table(settings, exe_mode=exe_mode), settings, exe_mode=exe_mode)
    plain = with_twins(steady_table() if is_steady else table(), unfused, is_steady=is_steady)
    return plain if exe_mode == "eager" else sealed(plain, is_steady=is_steady, unfused=unfused)


def check_sizes(device: str, sizes: ModelSizes, *, npu: NpuSettings) -> int:
    """Bytes that the communicator of the fused pair needs as a buffer; 0: there is none.

    Raises:
        Unsupported: operators of the device do not take a model of these sizes. Plain torch takes any.
    """
    if device != "npu":
        return 0
    check_npu_sizes(sizes, npu)
    return fused_bytes(sizes, npu)
