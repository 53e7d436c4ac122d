"""The real torch_npu, imported over link stand-ins, and a processor for it to believe in.

Import it before anything that needs torch_npu or torchair: where the process was not started by `make test-npu` it
skips the module that imports it. Knows nothing of the product.
"""

import contextlib
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

if importlib.util.find_spec("torch_npu") is None or not any(
    Path(folder, "stand_in.c").is_file() for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder
):
    pytest.skip("needs the real torch_npu over link stand-ins: make test-npu", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    import torch_npu
    import torchair
    from torch_npu.npu import _backends, utils
    from torch_npu.op_plugin.meta import _meta_registrations

# The code that torchair writes for a cached method asks each input for its format; what has no memory is in plain ND.
ND = 2
_formats = torch.library.Library("npu", "IMPL")
_formats.impl("get_npu_format", lambda tensor: ND, "Meta")
_formats.impl("npu_format_cast", lambda tensor, acl_format, **_: torch.empty_like(tensor), "Meta")

SOCS = {"Ascend910B3": 223, "Ascend910_9391": 250}  # one of Atlas A2, one of A3


@contextlib.contextmanager
def processor(soc: str) -> Iterator[None]:
    """torch_npu takes the machine for one with `soc`, and CANN for a new one. Python sees no device: who finds one asks
    the runtime for its state, and the runtime is a stand-in."""
    version = SOCS[soc]
    with contextlib.ExitStack() as stack:
        for owner in (_backends, utils, _meta_registrations, torch_npu.npu):
            if hasattr(owner, "get_soc_version"):
                stack.enter_context(mock.patch.object(owner, "get_soc_version", lambda: version))
        stack.enter_context(mock.patch.object(torch_npu.npu, "get_device_name", lambda device=None: soc))
        stack.enter_context(mock.patch.object(torch_npu.npu, "is_available", lambda: False))
        stack.enter_context(mock.patch.object(torch_npu.npu, "device_count", lambda: 0))
        stack.enter_context(mock.patch.object(torch_npu.npu, "_lazy_init", lambda: None))
        stack.enter_context(mock.patch.object(utils, "_is_gte_cann_version", lambda version, module="CANN": True))
        yield


__all__ = ["SOCS", "processor", "torch_npu", "torchair"]
