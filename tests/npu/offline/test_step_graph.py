"""The whole decode step as graphs of the real compiler: every operator converts, streams, cores and prefetches are where
they belong, no copy is made of a cache, and what is compiled computes what eager mode does.

A function of the table of operators: one that converts and is slow, and the product's own.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.engine import ge_graph
from longcat_pd.engine.compile_cache import CacheEntry, code_digest
from longcat_pd.engine.decode_step import DecodeStep
from longcat_pd.engine.grammar import Vocabulary
from longcat_pd.engine.graph import COMPILERS
from longcat_pd.engine.step_parts import Line, Plain, StepPart, Verify, parts_of
from longcat_pd.kernels import NpuSettings, Ops
from longcat_pd.kernels.npu.streams import SIDE_STREAM
from longcat_pd.kernels.reference import table as reference
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from longcat_pd.tiny.tokenizer import train
from tests.npu.device import install
from tests.npu.offline.capture import CUBES, STREAM, VECTORS, Captured, Node, graph_of, ranks, run_eagerly
from tests.npu.offline.capture import ge_graph as capture
from tests.npu.offline.real import SOCS
from tests.npu.offline.shapes import fake
from tests.npu.offline.stand_in_table import stand_ins
from tests.npu.offline.steps import Size, config_of, kinds_of, make_step

Table = Callable[[NpuSettings], Ops]
ALL = NpuSettings(is_overlapped=True, is_prefetched=True, cube_cores=8, vector_cores=16, main_cube_cores=16)
NUM_SEQS = 4
GE = COMPILERS["ge_graph"].limits


def product(settings: NpuSettings) -> Ops:
    return kernels.load("npu", exe_mode="ge_graph", npu=settings)


TABLES: dict[str, Table] = {"stand-ins": stand_ins, "product": product}


@pytest.fixture(params=TABLES)
def table(request: pytest.FixtureRequest) -> Table:
    made: Table = TABLES[request.param]
    if made(NpuSettings()).paged_attention is reference().paged_attention:
        pytest.skip("the product's table is not whole yet")
    return made


@pytest.fixture(autouse=True)
def as_the_product_traces() -> Iterator[None]:
    torch._dynamo.reset()  # equal code counts as the same, also of another test
    with torch._dynamo.config.patch(error_on_recompile=True):
        yield


def graph_of_part(part: StepPart, soc: str) -> Captured:
    found = capture(part.forward, *part.examples(NUM_SEQS), soc=soc)
    print(f"{part.name}: {len(found.nodes)} nodes: {kinds_of(found.histogram())}")
    return found


def num_copied(step: DecodeStep, graph: Captured) -> int:
    """How many caches, which are inputs of the graph, are copied or cast, they or views of them."""
    shapes = {tuple(t.shape) for t in cache_of(step).buffers()}
    sources = [node for node in graph.of("Data") if any(shape in shapes for shape in node.shapes)]
    assert len(sources) >= 2
    return sum(bool({"TensorMove", "Cast"} & read_by(graph, source)) for source in sources)


def read_by(graph: Captured, source: Node) -> set[str]:
    """Types of the nodes that read it, or a view of it."""
    found: set[str] = set()
    for reader in graph.readers(source):
        found |= read_by(graph, reader) if reader.type in ("Reshape", "Squeeze", "Unsqueeze") else {reader.type}
    return found


def cache_of(step: DecodeStep) -> KVCache:
    return step._model.stack._layers[0].first.attention.front._cache


@pytest.mark.parametrize("soc", SOCS)
@pytest.mark.parametrize(("variant", "num_drafts"), [("2.0", 3), ("chat", 3), ("lite", 0)])
def test_a_step_is_graphs_that_copy_no_cache(table: Table, soc: str, variant: str, num_drafts: int) -> None:
    """That there is a graph says that everything converts: the tracer has to take it whole, and no converter is missing."""
    with fake(soc):
        step = make_step(config_of(variant, "num_layers=2"), table(ALL), Size(num_drafts=num_drafts))
        *drafts, check = [part for part in parts_of(step, GE) if part.name not in ("line", "verify")]
        assert [part.name for part in drafts] == [f"draft_{number}" for number in range(num_drafts)]
        for part in drafts:
            assert num_copied(step, graph_of_part(part, soc)) == 0
        found = graph_of_part(check, soc)
        assert num_copied(step, found) == 0
        assert len(found.of("Cmo")) >= 2 * 4  # two halves of two layers
        labelled = [node for node in found.nodes if STREAM in node.attrs]
        assert {node.attrs[STREAM] for node in labelled} == {SIDE_STREAM}
        assert {(node.attrs[CUBES], node.attrs[VECTORS]) for node in labelled} == {("8", "16")}
        beside = [node for node in found.nodes if CUBES in node.attrs and STREAM not in node.attrs]
        assert {(node.attrs[CUBES], node.attrs[VECTORS]) for node in beside} == {("16", "24")}
        assert {"TopKV2", "MoeGatingTopK"} & {node.type for node in labelled}, "the router is beside"
        assert not {"FusedInferAttentionScore", "SparseFlashAttention", "MlaPrologV3"} & {node.type for node in labelled}


def test_in_one_graph_the_draft_layers_cache_would_be_copied(table: Table) -> None:
    """Why drafts are graphs of their own: this compiler lets one node of a graph write to an input in place."""
    with fake():
        step = make_step(config_of("chat", "num_layers=1"), table(NpuSettings()), Size(num_drafts=2))
        layer = step._model._draft_number
        assert num_copied(step, graph_of_part(Plain(step), "Ascend910B3")) == len(
            cache_of(step).spec.entries_of_layer(layer)
        )


@pytest.mark.parametrize("soc", SOCS)
def test_nothing_runs_beside_anything_where_it_is_not_asked_for(table: Table, soc: str) -> None:
    with fake(soc):
        step = make_step(config_of("chat", "num_layers=1"), table(NpuSettings()), Size(num_drafts=0))
        found = graph_of_part(Plain(step), soc)
    assert not found.of("Cmo") and not any(STREAM in node.attrs or CUBES in node.attrs for node in found.nodes)


@pytest.mark.parametrize("soc", SOCS)
def test_both_parts_of_a_step_that_is_cut_are_graphs(table: Table, soc: str) -> None:
    with fake(soc):
        vocabulary = Vocabulary(train(300).to_str(), 1024, [2])
        step = make_step(config_of("2.0", "num_layers=1"), table(ALL), Size(), vocabulary=vocabulary)
        *drafts, check, verify = (len(graph_of_part(part, soc).nodes) for part in parts_of(step, GE))
        assert len(drafts) == 3 and max(drafts) < check < verify


# -- collectives


PARALLEL = ParallelConfig(
    dp_size=2, kvp_size=4, attn_tp_size=4, ep_size=8, dense_tp_size=4, embed_tp_size=8, lmhead_tp_size=8
)
NODES = {
    "all_gather": "HcomAllGather",
    "all_reduce": "HcomAllReduce",
    "reduce_scatter": "HcomReduceScatter",
    "all_to_all": "HcomAllToAll",
}


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """The groups of rank 5 of 8, none of which anybody else is in."""
    layout, rank = ParallelLayout.of(PARALLEL), 5
    with ranks(layout.world_size, rank):
        groups = {}
        for axis in layout.axes:
            if axis.size > 1:
                made = {some: dist.new_group(list(some)) for some in layout.groups(axis.name)}
                groups[axis.name] = made[layout.group_of(rank, axis.name)]
        yield Mesh(layout, rank, groups, platform=platform_of("npu"), local_rank=rank)


@pytest.mark.parametrize("soc", SOCS)
def test_collectives_are_nodes_of_their_groups(table: Table, soc: str, mesh: Mesh) -> None:
    """As many of each kind and group as the step as it stands is noted to have."""
    with fake(soc):
        size = Size(group_size=4, num_groups=2)
        step = make_step(config_of("2.0", "num_layers=1"), table(ALL), size, mesh=mesh)
        part = Plain(step)
        with mesh.traffic.noted() as note, torch.no_grad():
            part(*part.examples(NUM_SEQS))
        found = graph_of_part(part, soc)
    wanted: Counter[tuple[str, str]] = Counter()
    for axis, kinds in note.kinds.items():
        members = ",".join(str(other) for other in mesh.layout.group_of(mesh.rank, axis))  # type: ignore[arg-type]
        wanted.update((NODES[kind.decode()], members) for kind in kinds)
    nodes = [node for node in found.nodes if node.type.startswith("Hcom")]
    assert Counter((node.type, node.attrs["group"].partition("rank_list=")[2]) for node in nodes) == wanted
    print(f"collectives by kind and group: {dict(wanted)}")
    assert {kind for kind, _ in wanted} >= {"HcomAllGather", "HcomReduceScatter", "HcomAllToAll"}
    assert {members for _, members in wanted} == {"0,1,2,3,4,5,6,7", "4,5,6,7"}


# -- the cache of compiled methods


@pytest.fixture
def small(table: Table) -> Iterator[DecodeStep]:
    with fake():
        yield make_step(config_of("chat", "num_layers=1"), table(NpuSettings()), Size(num_drafts=0))


def folders(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir())


def entry(cache: Path, num_seqs: int, **facts: str) -> CacheEntry:
    return CacheEntry(cache, f"m-seqs{num_seqs}-plain", {"code": code_digest(), "num_seqs": str(num_seqs), **facts})


def test_sizes_and_facts_have_folders_of_their_own(small: DecodeStep, tmp_path: Path) -> None:
    part = Plain(small)
    graphs = [graph_of(ge_graph.compiled, part, num_seqs, entry(tmp_path, num_seqs)) for num_seqs in (4, 8)]
    assert len(graphs[0].nodes) == len(graphs[1].nodes)
    four, eight = folders(tmp_path)
    (file,) = (tmp_path / four).rglob("compiled_module")
    assert file.parent.name == "decode_4_plain"
    assert [path.parent.name for path in (tmp_path / eight).rglob("compiled_module")] == ["decode_8_plain"]
    before = file.stat().st_mtime_ns
    again = graph_of(ge_graph.compiled, part, 4, entry(tmp_path, 4))
    assert again.histogram() == graphs[0].histogram() and file.stat().st_mtime_ns == before, "loaded, not compiled"
    torch._dynamo.reset()  # as in a new process
    graph_of(ge_graph.compiled, part, 4, entry(tmp_path, 4, code="other code"))
    changed, same = folders(tmp_path)
    assert same == eight and changed.partition(".")[0] == four.partition(".")[0] and changed != four


# -- numbers


def seated(table: Table, variant: str, num_drafts: int) -> DecodeStep:
    """A step on the host, with weights and with sequences in its slots."""
    torch.manual_seed(3)
    size = Size(num_drafts=num_drafts, device="cpu", num_blocks=40)
    step = make_step(config_of(variant, "num_layers=1"), table(ALL), size)
    for tensor in step.parameters():
        tensor.data.copy_(torch.randn(tensor.shape) * 0.05)
    state = step.state
    for slot, length in zip(range(NUM_SEQS), (5, 130, 260, 2), strict=True):
        num_blocks = -(-(length + 8) // size.block_size)
        state.blocks[slot, :num_blocks] = torch.arange(num_blocks) + 1 + 8 * slot
        state.starts[slot, :num_blocks] = torch.arange(num_blocks) * size.block_size
        state.num_tokens[slot] = length
        state.recent[slot] = torch.randint(32, 1000, state.recent.shape[1:])
        state.final[slot] = torch.randn(state.final.shape[1:])
        state.sampling.temperature[slot] = 0.7 * (slot % 2)
        state.sampling.frequency[slot] = 0.5 * (slot > 1)
    for cached in cache_of(step).buffers():
        cached.copy_(torch.randn(cached.shape))
    return step


@pytest.mark.parametrize(("variant", "num_drafts"), [("2.0", 3), ("chat", 0)])
def test_what_is_compiled_computes_what_eager_mode_does(table: Table, variant: str, num_drafts: int) -> None:
    """Of torch's graphs behind torchair's own passes, in the two parts of a step: tokens, counts, all that is written."""
    if table is product and variant == "chat":
        pytest.skip("torchair's own attention has no form that runs on the host")
    install()
    slots = torch.tensor([1, 0, 3, 2])
    eager, other = (seated(table, variant, num_drafts) for _ in range(2))
    tensors = {name: tensor.clone() for name, tensor in eager.named_buffers()}

    def taken(step: DecodeStep, run: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        (line,) = run(Line(step).forward, slots)
        return run(Verify(step).forward, slots, line, *step.masks(slots, line, is_any_bound=False))

    with torch.no_grad():
        wanted = [taken(eager, lambda function, *given: function(*given)) for _ in range(2)]
    found = [taken(other, run_eagerly) for _ in range(2)]
    for one, expected in zip(itertools.chain(*found), itertools.chain(*wanted), strict=True):
        assert torch.equal(one, expected) if one.dtype == torch.int64 else torch.allclose(one, expected, atol=0.05)
    written = set()
    for (name, one), (_, expected) in zip(other.named_buffers(), eager.named_buffers(), strict=True):
        if name.endswith("grammars.number"):  # of a table, not of what is computed
            continue
        assert torch.allclose(one.double(), expected.double(), atol=0.05, equal_nan=True), name
        written |= {name} if not torch.equal(expected, tensors[name]) else set()
    assert {"state.recent", "state.num_tokens", "state.sampling.counts"} <= written and len(written) >= 5


def test_draws_convert_and_are_those_of_the_reference() -> None:
    """Bit for bit, through the compiler's passes."""
    logits, columns = torch.randn(6, 300), {"temperature": 0.9, "top_p": 0.8, "floor": -3.0, "uniform": 0.4}
    rules = {name: torch.full((6,), value, dtype=torch.float64) for name, value in columns.items()}
    rules["top_k"] = torch.tensor([0, 1, 5, 0, 300, 7])
    static, plain = stand_ins(NpuSettings()).draw, reference().draw

    def drawn(logits: Tensor, *columns: Tensor) -> Tensor:
        return static(logits, **dict(zip(rules, columns, strict=True)))

    assert torch.equal(run_eagerly(drawn, logits, *rules.values()), plain(logits, **rules))
