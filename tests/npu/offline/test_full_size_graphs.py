"""The decode step of released models at full width, as graphs of the real compiler for Atlas A2 and A3.

Depth is cut, because layers are alike: two layers have a first half with an indexer and a second one without, and a router
each. One graph of all 38 layers is made in a test that is marked slow. What graphs ask of CANN is kept in `demands-*.txt`:
node types with the inputs and attributes that are given.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from longcat_pd.config.schema import NpuConfig
from longcat_pd.engine.graph import COMPILERS
from longcat_pd.engine.step_parts import StepPart, parts_of
from longcat_pd.kernels.npu.streams import SIDE_STREAM
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.traffic import Note
from tests.npu.offline.capture import CUBES, STREAM, VECTORS, Captured, ge_graph
from tests.npu.offline.full_size import POOLS, Pool, build, decode_step, rank_of
from tests.npu.offline.kept import check_kept, wrapped
from tests.npu.offline.shapes import fake
from tests.npu.offline.steps import kinds_of
from tests.npu.offline.test_step_graph import NODES, num_copied

HERE = Path(__file__).parent
LAYERS = 2
ATTENTIONS = {"SparseFlashAttention", "FusedInferAttentionScore", "MlaPrologV3"}
EXPERTS = {"GroupedMatmul", "MoeGatingTopK"}
FUSED = ("MoeDistributeDispatchV2", "MoeDistributeCombineV2")
NO_CACHE = "line"  # the part that reads none, where there are no drafts
DOUBLE = "DT_DOUBLE"
PLACES = ("Const", "Data", "RefData", "NetOutput")  # nothing is computed there

CASES = ["2.0 decode A2", "2.0 decode A3", "chat 32 A2", "chat 32 A3", "lite 8 A2", "lite 8 A3", "lite 16 int8 A3"]


def overlapped(name: str, *, layers: int = LAYERS) -> Pool:
    """The pool with everything beside everything, and so many layers."""
    pool = POOLS[name]
    beside = NpuConfig(soc=pool.npu.soc, is_moe_overlapped=True, is_prefetched=True)
    return replace(pool, layers=layers, npu=beside)


@pytest.fixture(autouse=True)
def as_the_product_traces() -> Iterator[None]:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def parts_in_graphs(pool: Pool, mesh: Mesh, *only: str) -> Iterator[tuple[StepPart, Captured, Note, int]]:
    """The parts that are compiled, their graphs, what they are noted to exchange, and copies of caches in them."""
    with fake(pool.soc), torch.no_grad():
        ops = pool.ops("ge_graph")
        step = decode_step(pool, mesh, build(pool, mesh, ops), ops)
        num_seqs = step.state.shape.num_slots
        for part in parts_of(step, COMPILERS["ge_graph"].limits):
            if only and part.name not in only:
                continue
            examples = part.examples(num_seqs)
            with mesh.traffic.noted() as note:
                part(*examples)
            torch._dynamo.reset()
            graph = ge_graph(part.forward, *examples, soc=pool.soc)
            yield part, graph, note, 0 if part.name == NO_CACHE else num_copied(step, graph)


@pytest.mark.parametrize("name", CASES)
def test_parts_of_a_step(name: str) -> None:
    """Every operator converts, or there is no graph; and see each `check`."""
    pool = overlapped(name)
    demands: dict[str, tuple[set[str], set[str]]] = {}
    nodes: dict[str, list[str]] = {}
    with rank_of(pool, 5) as mesh:
        for part, graph, note, copied in parts_in_graphs(pool, mesh):
            assert copied == 0, part.name
            check_collectives(mesh, graph, note)
            has_layers = not part.name.startswith(("draft", "line"))
            if has_layers:
                check_streams(graph)
            check_fused(pool, graph, LAYERS if has_layers else 0)
            for type_, (inputs, attrs) in graph.uses().items():
                known = demands.setdefault(type_, (set(), set()))
                known[0].update(inputs)
                known[1].update(attrs)
            nodes[f"{name}, {LAYERS} layers: {part.name}"] = described(graph)
    check_kept(HERE / "nodes.txt", nodes)
    check_kept(HERE / f"demands-{pool.npu.soc}.txt", {name: asked_of_cann(demands)})


def described(graph: Captured) -> list[str]:
    """How many nodes of each type, and which of them make numbers in fp64, which vector units do not know."""
    made = [node for node in graph.nodes if node.type not in PLACES]
    wide = Counter(node.type for node in made if DOUBLE in node.dtypes)
    lines = wrapped(f"{len(made)} nodes: {kinds_of(Counter(node.type for node in made))}")
    return [*lines, *(wrapped(f"in fp64: {kinds_of(wide)}") if wide else [])]


def asked_of_cann(demands: dict[str, tuple[set[str], set[str]]]) -> list[str]:
    """One line a node type: Type(inputs) attributes."""
    return [
        line
        for type_, (inputs, attrs) in sorted(demands.items())
        if type_ not in PLACES
        for line in wrapped(f"{type_}({', '.join(sorted(inputs))}) {', '.join(sorted(attrs))}")
    ]


def check_collectives(mesh: Mesh, graph: Captured, note: Note) -> None:
    """One node for each exchange that the step is counted to make, of the same group."""
    wanted: Counter[tuple[str, str]] = Counter()
    for axis, kinds in note.kinds.items():
        members = ",".join(map(str, mesh.layout.group_of(mesh.rank, axis)))  # type: ignore[arg-type]
        wanted.update((NODES[kind.decode()], members) for kind in kinds)
    nodes = [node for node in graph.nodes if node.type.startswith("Hcom")]
    assert Counter((node.type, node.attrs["group"].partition("rank_list=")[2]) for node in nodes) == wanted


def check_streams(graph: Captured) -> None:
    """Experts are on a stream of their own with their cores, attentions never; what is beside them has the other cores."""
    labelled = [node for node in graph.nodes if STREAM in node.attrs]
    assert {node.attrs[STREAM] for node in labelled} == {SIDE_STREAM}
    assert {(node.attrs[CUBES], node.attrs[VECTORS]) for node in labelled} == {("12", "24")}
    types = Counter(node.type for node in labelled)
    assert types["MoeGatingTopK"] == LAYERS and types["GroupedMatmul"] == 2 * LAYERS
    assert not ATTENTIONS & types.keys()
    beside = [node for node in graph.nodes if CUBES in node.attrs and STREAM not in node.attrs]
    assert {(node.attrs[CUBES], node.attrs[VECTORS]) for node in beside} == {("12", "24")}
    assert ATTENTIONS & {node.type for node in beside}, "the second attention"
    assert len(graph.of("Cmo")) >= 2 * LAYERS


def check_fused(pool: Pool, graph: Captured, num_layers: int) -> None:
    """On A3 rows travel inside of two operators, with the experts that have no weights as copies."""
    is_fused = pool.parallel.moe_dispatch == "fused"
    for type_ in FUSED:
        nodes = graph.of(type_)
        assert len(nodes) == (num_layers if is_fused else 0)
        for node in nodes:
            assert node.attrs["copy_expert_num"] == pool.config.zero_expert_num
            assert node.attrs["moe_expert_num"] == pool.config.n_routed_experts
            assert (node.attrs["ep_world_size"], node.attrs["ep_rank_id"]) == (pool.parallel.ep_size, 5)
            assert node.attrs["group_ep"] == "fused" and node.attrs["shared_expert_num"] == 0


@pytest.mark.slow
def test_a_graph_of_all_layers() -> None:
    """Each layer adds the same: the graph of all 38 has that of two and 36 times the difference of two and one."""
    sizes = {}
    for layers in (1, 2, 38):
        pool = overlapped("2.0 decode A3", layers=layers)
        with rank_of(pool, 5) as mesh:
            ((_, graph, note, copied),) = parts_in_graphs(pool, mesh, "check_best")
            assert copied == 0
            check_collectives(mesh, graph, note)
            check_fused(pool, graph, layers)
            sizes[layers] = {type_: num for type_, num in graph.histogram().items() if type_ not in PLACES}
    each = {type_: num - sizes[1][type_] for type_, num in sizes[2].items()}
    assert sizes[38] == {type_: num + 36 * each[type_] for type_, num in sizes[2].items()}


def test_a_new_process_knows_what_converts() -> None:
    """The compiler loads what it knows when it first compiles; a rank makes its table before that."""
    program = (
        "import tests.npu.offline.real, longcat_pd.kernels.npu.operators as o; print(o.converts('npu_attention_update'))"
    )
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert found.stdout.split()[-1] == "True"
