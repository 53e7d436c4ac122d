"""What the stream-capture backend ("npugraph_ex") makes of a function, up to the code it would capture a stream with.

Shows that a function is accepted, what is replaced in it, and which list arguments may change without another capture. The
capture itself needs a device. Knows nothing of the product.
"""

import contextlib
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from tests.npu.offline.real import processor, torch_npu

from npugraph_ex import npu_fx_compiler  # isort: skip  (on the path once torch_npu is imported)


class _Written(Exception):
    def __init__(self, code: str) -> None:
        super().__init__("code was written")
        self.code = code


def capture_code(
    function: Callable[..., Any],
    *args: Any,
    soc: str = "Ascend910B3",
    dynamic: bool = False,
    options: dict[str, Any] | None = None,
) -> str:
    """The Python that the backend writes for `function(*args)`; what it refuses raises."""
    torch._dynamo.reset()

    def written(code: str) -> Any:
        raise _Written(code)

    stream = SimpleNamespace(stream_id=0)
    with contextlib.ExitStack() as stack:
        stack.enter_context(processor(soc))
        stack.enter_context(mock.patch.object(torch_npu.npu, "current_stream", lambda device=None: stream))
        stack.enter_context(mock.patch.object(npu_fx_compiler, "_compile_py_code", written))
        stack.enter_context(torch.no_grad())
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        compiled = torch.compile(function, backend="npugraph_ex", options=options or {}, fullgraph=True, dynamic=dynamic)
        try:
            compiled(*args)
        except _Written as result:
            return result.code
    raise AssertionError("the function ran without code being written")
