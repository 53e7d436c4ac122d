"""GE graphs without a device: torchair compiles a function for real, up to the point where the graph would go to the
engine.

`ge_graph` gives the nodes of that graph and what it demands of CANN. A function that the compiler refuses raises what
the compiler raised. Knows nothing of the product.
"""

import contextlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.npu.offline.real import processor, torchair

from torchair._ge_concrete_graph import compat_ir, fx2ge_converter  # isort: skip
from torchair.core import _backend  # isort: skip
from torchair.ge import _ge_graph, ge_custom  # isort: skip

STREAM, CUBES, VECTORS = "_user_stream_label", "_op_aicore_num", "_op_vectorcore_num"
BOOKKEEPING = {"_inference_rule", *(f"_{side}_name_{part}" for side in ("input", "output") for part in ("key", "value"))}


@dataclass(frozen=True)
class Node:
    """One operator of a graph: `inputs` name tensors (`node:output`; "" for one that is not given; `node:-1` for a control
    edge), `arguments` are their names in the prototype, `shapes` and `dtypes` theirs as far as the compiler knows them."""

    type: str
    name: str
    inputs: tuple[str, ...]
    arguments: tuple[str, ...]
    attrs: dict[str, Any]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Demand:
    """A node type that the compiler asks CANN about before it uses it, with the optional inputs and attributes given.

    It asks for some of the newer types only; `Captured.uses` is the longer list of what the target has to know.
    """

    type: str
    inputs: tuple[str, ...]
    attrs: tuple[str, ...]


@dataclass(frozen=True)
class Captured:
    """A graph as the engine would have got it, in the order of its text."""

    nodes: tuple[Node, ...]
    demands: tuple[Demand, ...]

    def histogram(self) -> dict[str, int]:
        """How many nodes of each type, the most frequent first."""
        return dict(Counter(node.type for node in self.nodes).most_common())

    def of(self, *types: str) -> list[Node]:
        """The nodes of these types."""
        return [node for node in self.nodes if node.type in types]

    def uses(self) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
        """For each type, the inputs given to some node of it and its attributes, the compiler's own left out."""
        found: dict[str, tuple[set[str], set[str]]] = {}
        for node in self.nodes:
            inputs, attrs = found.setdefault(node.type, (set(), set()))
            inputs.update(argument for argument, source in zip(node.arguments, node.inputs, strict=False) if source)
            attrs.update(name for name in node.attrs if not name.startswith("_"))
        return {type_: (tuple(sorted(inputs)), tuple(sorted(attrs))) for type_, (inputs, attrs) in sorted(found.items())}

    def readers(self, node: Node) -> list[Node]:
        """The nodes that take an output of `node`, control edges left out."""
        outputs = f"{node.name}:"
        return [other for other in self.nodes if any(i.startswith(outputs) and not i.endswith(":-1") for i in other.inputs)]

    def writers(self, node: Node) -> list[Node]:
        """The nodes whose outputs `node` takes, control edges left out."""
        sources = {name.rpartition(":")[0] for name in node.inputs if not name.endswith(":-1")}
        return [other for other in self.nodes if other.name in sources]


class _Built(Exception):
    def __init__(self, graph: Any) -> None:
        super().__init__("a graph was built")
        self.graph = graph


class _Native:
    """torchair's native module with another answer about prototypes registered in CANN."""

    def __init__(self, native: Any, status: str) -> None:
        self._native, self._status = native, status

    def __getattr__(self, name: str) -> Any:
        return getattr(self._native, name)

    def get_registered_ir_def(self, operator: str) -> tuple[str, list[Any], list[Any], list[Any]]:
        return self._status, [], [], []


def ge_graph(
    function: Callable[..., Any], *args: Any, soc: str = "Ascend910B3", config: Any = None, dynamic: bool = False
) -> Captured:
    """The graph of `function(*args)`: FakeTensors of `shapes.empty`, then inside `shapes.fake`, or CPU tensors."""
    torch._dynamo.reset()
    backend = torchair.get_npu_backend(compiler_config=config or torchair.CompilerConfig())
    return graph_of(torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic), *args, soc=soc)


def graph_of(compiled: Callable[..., Any], *args: Any, soc: str = "Ascend910B3") -> Captured:
    """The graph that a function compiled by torchair, or one of its cached methods, would run for these arguments."""
    with compiler(soc) as demands, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compiled(*args)
        except _Built as built:
            return Captured(tuple(_node(op) for op in built.graph.op), tuple(dict.fromkeys(demands)))
    raise AssertionError("the function ran without a graph being built")


def run_eagerly(function: Callable[..., Any], *args: Any, soc: str = "Ascend910B3", config: Any = None) -> Any:
    """What `function(*args)` gives after torchair's own passes over torch's graph, computed on CPU tensors by torch and the
    kernels of `tests.npu.device`; arguments that it writes to are written to."""
    torch._dynamo.reset()
    config = config or torchair.CompilerConfig()
    config.debug.run_eagerly = True
    backend = torchair.get_npu_backend(compiler_config=config)
    with compiler(soc, stop=False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.compile(function, backend=backend, fullgraph=True, dynamic=False)(*args)


@contextlib.contextmanager
def compiler(soc: str, *, stop: bool = True) -> Iterator[list[Demand]]:
    """torchair up to the engine; yields the demands on CANN as they arise. With `stop` a graph is raised, not run."""
    demands: list[Demand] = []

    def compatible(type_: str, runtime_optional_inputs: tuple[str, ...], runtime_optional_attrs: tuple[str, ...]) -> str:
        demands.append(Demand(type_, tuple(runtime_optional_inputs), tuple(runtime_optional_attrs)))
        return ""

    def built(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Built(self.graph)

    def loaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Built(self)

    with processor(soc), contextlib.ExitStack() as stack:
        for owner, name, value in (
            (fx2ge_converter, "initialize_graph_engine", lambda *args, **kwargs: None),
            (_backend, "initialize_graph_engine", lambda *args, **kwargs: None),
            (fx2ge_converter, "_torchair", _Native(fx2ge_converter._torchair, "ERROR")),
            (ge_custom, "_torchair", _Native(ge_custom._torchair, "SUCCESS")),
            (compat_ir, "is_cann_compat", compatible),
            *(((fx2ge_converter.GeConcreteGraph, "__call__", built), (_ge_graph.GeGraph, "load", loaded)) if stop else ()),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield demands


@contextlib.contextmanager
def ranks(world_size: int, rank: int = 0) -> Iterator[dist.ProcessGroup]:
    """A world that only this process is in: collectives have their shapes, and nothing travels."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def _node(op: Any) -> Node:
    descriptions = tuple(op.input_desc)
    return Node(
        op.type,
        op.name,
        tuple(op.input),
        tuple(described.name for described in descriptions),
        {name: _value(attr) for name, attr in op.attr.items() if name not in BOOKKEEPING},
        tuple(_dtype(described) for described in descriptions),
        tuple(tuple(described.shape.dim) for described in descriptions),
    )


def _dtype(described: Any) -> str:
    return described.DESCRIPTOR.fields_by_name["dtype"].enum_type.values_by_number[described.dtype].name


def _value(attr: Any) -> Any:
    kind = attr.WhichOneof("value")
    if kind is None:
        return None
    value = getattr(attr, kind)
    if kind == "s":
        return value.decode("utf-8", "replace")
    if kind == "list":
        items = [item for field, values in value.ListFields() if field.name != "val_type" for item in values]
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in items]
    return value if kind in ("i", "f", "b") else str(value)
