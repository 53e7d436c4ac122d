"""Released models at their size, on the ranks of the layouts that they are served with, without memory.

A `Pool` is a release and a layout. `rank_of` makes one of its ranks, alone in a world of all of them; `build` its stage of
the model with a table of operators. `Seen` is what was launched meanwhile, and what modules returned.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from longcat_pd import kernels, wire
from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import (
    EngineConfig,
    InstanceSpec,
    ModelSection,
    NpuConfig,
    ParallelConfig,
    Role,
    TransferConfig,
)
from longcat_pd.engine.decode_state import DecodeShape, DecodeState
from longcat_pd.engine.decode_step import DecodeStep
from longcat_pd.engine.inputs import InputsBuilder
from longcat_pd.engine.operators import npu_settings, sizes_of
from longcat_pd.engine.plan import Admit, SlotSampling
from longcat_pd.engine.slots import Load, SlotState, Span
from longcat_pd.engine.speculative import ModelDrafts
from longcat_pd.kernels import Ops
from longcat_pd.kernels.npu import attention
from longcat_pd.kernels.reference import sampling
from longcat_pd.kv_cache.layout import BlockSplit
from longcat_pd.kv_cache.spec import CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.models.attention import Attention
from longcat_pd.models.batch import ForwardInputs
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.context import ModelContext
from longcat_pd.models.decoder import DecoderLayer
from longcat_pd.models.embedding import LmHead
from longcat_pd.models.linear import GatedMlp
from longcat_pd.models.moe import MixtureOfExperts
from longcat_pd.models.ngram import NgramEmbedding
from longcat_pd.models.rope import RotaryPositions
from longcat_pd.models.tensor_names import can_be_int8, draft_tensors, expected_tensors
from longcat_pd.parallel.layout import ParallelLayout, layers_of_stage
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from tests.npu.offline.capture import ranks
from tests.releases import CHAT, FULL_2_0, LITE

RELEASES = {"2.0": FULL_2_0, "chat": CHAT, "lite": LITE}
BLOCK = 128
GREEDY = SlotSampling(temperature=0.0, top_p=1.0, top_k=0, seed=0, choice=0, num_logprobs=None)


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Ranks that serve a release together.

    `num_blocks` of each rank's cache; `chunk` tokens of a prefill plan; `layers`: the first so many, 0 for all.
    """

    release: str
    role: Role
    parallel: ParallelConfig
    num_drafts: int = 0
    is_int8: bool = False
    num_seqs: int = 64
    num_blocks: int = 2048
    max_model_len: int = 131072
    chunk: int = 16384
    layers: int = 0
    npu: NpuConfig = field(default_factory=NpuConfig)

    @property
    def config(self) -> ModelConfig:
        """Of the release."""
        config = ModelConfig.from_dict(RELEASES[self.release] | {"torch_dtype": "bfloat16"})
        return replace(config, num_layers=self.layers) if self.layers else config

    @property
    def soc(self) -> str:
        """Of the series."""
        return {"A2": "Ascend910B3", "A3": "Ascend910_9391"}[self.npu.soc]

    @property
    def engine(self) -> EngineConfig:
        """As far as a rank has to do with it."""
        return EngineConfig(
            block_size=BLOCK,
            max_model_len=self.max_model_len,
            max_num_seqs=self.num_seqs,
            max_num_batched_tokens=self.chunk,
            num_draft_tokens=self.num_drafts,
            num_blocks=self.num_blocks,
        )

    @property
    def instance(self) -> InstanceSpec:
        """What ranks are told."""
        return InstanceSpec(
            name="i0",
            role=self.role,
            host="127.0.0.1",
            http_port=1,
            device="npu",
            model=ModelSection(path="nowhere", dtype="bfloat16"),
            parallel=self.parallel,
            engine=self.engine,
            transfer=TransferConfig(),
            npu=self.npu,
        )

    def int8(self) -> frozenset[str]:
        """The modules that the release has in int8."""
        names = (*expected_tensors(self.config), *draft_tensors(self.config)) if self.is_int8 else ()
        return frozenset(name.removesuffix(".weight") for name in names if can_be_int8(name))

    def ops(self, exe_mode: str) -> Ops:
        """The product's table, after the product's own question whether its operators take these sizes."""
        settings = npu_settings(self.npu, torch.bfloat16)
        kernels.check_sizes("npu", sizes_of(self.instance, self.config, is_int8=self.is_int8), npu=settings)
        return kernels.load("npu", exe_mode=exe_mode, npu=settings)


@contextlib.contextmanager
def rank_of(pool: Pool, rank: int) -> Iterator[Mesh]:
    """One rank of the pool's instance, in the groups that the product makes; nobody else is there."""
    layout = ParallelLayout.of(pool.parallel)
    with ranks(layout.world_size, rank):
        made: dict[tuple[int, ...], dist.ProcessGroup] = {}
        groups = {}
        for axis in layout.axes:
            if axis.size == 1 or axis.name == "dp":
                continue
            members = layout.group_of(rank, axis.name)
            if members not in made:
                made[members] = dist.new_group(list(members))
            groups[axis.name] = made[members]
        mesh = Mesh(layout, rank, groups, platform=platform_of("npu"), local_rank=rank)
        mesh.axis("ep").communicator = "fused"
        yield mesh


def build(pool: Pool, mesh: Mesh, ops: Ops, *, device: str = "npu", moe_dispatch: str = "") -> CausalLM:
    """The rank's stage of the model; weights are prepared, and there are none."""
    config, pp = pool.config, mesh.axis("pp")
    layers = layers_of_stage(pool.parallel, config.num_layers, pp.rank)
    is_last = pp.rank == pp.size - 1
    has_draft = is_last and pool.num_drafts > 0
    cached = range(layers.start, layers.stop + has_draft)
    spec = CacheSpec.of(config, cached, torch.bfloat16)
    model = CausalLM(
        ModelContext(
            config=config,
            ops=ops,
            mesh=mesh,
            cache=KVCache(spec, pool.num_blocks, BLOCK, torch.device(device)),
            layers=layers,
            is_first=pp.rank == 0,
            is_last=is_last,
            kv_access=mesh.cache_shard.access,
            dtype=torch.bfloat16,
            device=torch.device(device),
            int8=pool.int8(),
            moe_dispatch=moe_dispatch or pool.parallel.moe_dispatch,
            has_draft=has_draft,
        )
    )
    model.prepare()
    return model


def decode_step(pool: Pool, mesh: Mesh, model: CausalLM, ops: Ops, *, device: str = "npu") -> DecodeStep:
    """The decode step as ``Decoder`` makes it."""
    config = pool.config
    shape = DecodeShape.of(
        pool.engine,
        mesh.cache_shard,
        num_groups=mesh.layout.axis("dp").size,
        group_size=mesh.axis("attn_tp").size,
        ngram_order=config.over_embedding.oe_neighbor_num if config.over_embedding is not None else 0,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
    )
    state = DecodeState(shape, mesh.cache_shard, dtype=torch.bfloat16, device=torch.device(device))
    return DecodeStep(model, state, ops=ops, drafts=ModelDrafts(model, state) if pool.num_drafts else None)


def chunk(pool: Pool, mesh: Mesh, *spans: tuple[int, int, bool]) -> ForwardInputs:
    """A plan's rows as they come to this rank, on the host: of each span start, end and whether the prompt ends there.

    With several groups each has the same spans. Outside of any fake mode.
    """
    shard, made, first = mesh.cache_shard, [], 1
    for slot, (start, end, is_last) in enumerate(spans):
        num_tokens = end if is_last else end + BLOCK
        split = BlockSplit(shard.num_ranks, BLOCK, slot % shard.num_ranks)
        num_blocks = split.num_blocks(num_tokens)
        admit = Admit(
            slot=slot,
            group=0,
            token_ids=wire.pack(np.arange(num_tokens) % 1000 + 3),
            prompt_len=num_tokens,
            num_computed=start,
            blocks=wire.pack(first + split.local_index(block) for block in range(num_blocks)),
            split_start=split.start,
            sampling=GREEDY,
        )
        first += split.num_rounds(num_blocks)
        made.append(Span(SlotState(admit, shard.num_ranks, BLOCK), start, end, is_last))
    assert first <= pool.num_blocks
    tp, num_groups, over = mesh.axis("attn_tp").size, mesh.layout.axis("dp").size, pool.config.over_embedding
    builder = InputsBuilder(
        shard,
        BLOCK,
        over.oe_neighbor_num if over is not None and mesh.axis("pp").rank == 0 else 0,
        torch.device("cpu"),
        has_draft=pool.num_drafts > 0 and mesh.axis("pp").rank == mesh.axis("pp").size - 1,
        group_size=tp,
        is_split=tp > 1 and num_groups > 1,
    )
    rows, outputs = sum(end - start for start, end, _ in spans), sum(is_last for *_, is_last in spans)
    return builder.build(made, Load((rows,) * num_groups, (outputs,) * num_groups))


def on(device: str, inputs: ForwardInputs) -> ForwardInputs:
    """The same without memory, on a device. Inside of a fake mode."""
    given = {f.name: getattr(inputs, f.name) for f in fields(inputs)}
    moved = {n: torch.empty(t.shape, dtype=t.dtype, device=device) for n, t in given.items() if isinstance(t, Tensor)}
    return replace(inputs, **moved)


# -- what is seen

NO_LAUNCHES = {
    *("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided"),
    *("detach", "alias", "lift_fresh", "_unsafe_view", "_reshape_alias", "wait_tensor", "device"),
}
KINDS: dict[type[nn.Module], str] = {
    NgramEmbedding: "embedding",
    DecoderLayer: "layer",
    Attention: "attention",
    GatedMlp: "dense MLP",
    LmHead: "head",
}
METHODS = {(MixtureOfExperts, "mix"): "experts", (MixtureOfExperts, "give"): "experts' rows to all"}
Shape = tuple[tuple[int, ...], torch.dtype]


class Seen(TorchDispatchMode):
    """Counts operators that are neither views nor allocations, in all and inside of modules.

    `parts`: by kind of module, how often it launched how many. `doubles`: those whose result is fp64, which vector units do
    not know. `crossings`: copies between host and device. `returned`: what modules gave back, in their order.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()
        self.doubles: Counter[str] = Counter()
        self.crossings: Counter[str] = Counter()
        self.parts: dict[str, Counter[int]] = {}
        self.returned: list[tuple[str, tuple[Shape, ...]]] = []
        self._began: list[int] = []
        self._model = model

    @property
    def num(self) -> int:
        """Launches so far."""
        return sum(self.operators.values())

    @contextlib.contextmanager
    def part(self, kind: str) -> Iterator[None]:
        """What is launched inside is of this kind."""
        began = self.num
        yield
        self.parts.setdefault(kind, Counter())[self.num - began] += 1

    def __enter__(self) -> "Seen":
        self._patches = contextlib.ExitStack()
        for (owner, method), kind in METHODS.items():
            self._patches.enter_context(mock.patch.object(owner, method, self._within(vars(owner)[method], kind)))
        for name, module in self._model.named_modules():
            for hook in (
                module.register_forward_pre_hook(lambda *_: self._began.append(self.num)),
                module.register_forward_hook(self._ended(name)),
            ):
                self._patches.callback(hook.remove)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if not func.is_view and name not in NO_LAUNCHES:
            self.operators[name] += 1
            if isinstance(out, Tensor):
                self.doubles[name] += out.dtype == torch.float64
                source = args[1] if name == "copy_" else args[0] if name == "_to_copy" else out
                if source.device.type != out.device.type:
                    self.crossings[f"{source.device.type} -> {out.device.type}"] += 1
        return out

    def _within(self, method: Callable[..., Tensor], kind: str) -> Callable[..., Tensor]:
        """A part of a layer that is a method, not a module."""

        def within(*given: Any) -> Tensor:
            with self.part(kind):
                out = method(*given)
            self.returned.append((kind, ((tuple(out.shape), out.dtype),)))
            return out

        return within

    def _ended(self, name: str) -> Callable[..., None]:
        def ended(module: nn.Module, _given: Any, out: Any) -> None:
            num = self.num - self._began.pop()
            kind = KINDS.get(type(module))
            if kind is not None:
                kind = f"{kind} with indexer" if isinstance(module, Attention) and module.indexer is not None else kind
                self.parts.setdefault(kind, Counter())[num] += 1
            found = (out,) if isinstance(out, Tensor) else out if isinstance(out, tuple) else ()
            shapes = tuple((tuple(t.shape), t.dtype) for t in found if isinstance(t, Tensor))
            if not isinstance(module, RotaryPositions):  # whose result is a table's own business
                self.returned.append((name, shapes))

        return ended

    def table(self) -> list[str]:
        """Launches of one module by its kind, and how many such there are."""
        lines = [
            f"{kind}: " + ", ".join(f"{num} (x {times})" for num, times in sorted(found.items()))
            for kind, found in self.parts.items()
        ]
        wide = ", ".join(f"{name} {times}" for name, times in self.doubles.most_common() if times)
        return [*lines, f"all: {self.num}", *([f"in fp64: {wide}"] if wide else [])]


def static(ops: Ops) -> Ops:
    """Draws that look at no data: on tensors without any the others cannot be seen."""
    return replace(
        ops,
        keyed_uniform=sampling.keyed_uniform_static,
        draw=sampling.draw_static,
        draw_edited=sampling.draw_edited_static,
    )


def reference_ops() -> Ops:
    """The reference table, as far as it can be executed without data: what looks at data is sealed, with its shapes."""
    return replace(kernels.load("cpu", exe_mode="inductor"), tile_elements=1 << 62)


@contextlib.contextmanager
def lists(
    sizes: Callable[[str, Tensor], Any] = lambda place, x: np.ones(x.shape, dtype=int).tolist(),
) -> Iterator[Counter[str]]:
    """Lets tensors without data become lists and numbers of Python, and counts by who asks. `sizes` says what they get.

    Outside of it who asks for data fails.
    """
    places: Counter[str] = Counter()

    def asked(x: Tensor) -> Any:
        code = sys._getframe(1).f_code
        place = f"{Path(code.co_filename).stem}.{code.co_name}"
        places[place] += 1
        return sizes(place, x)

    with (
        mock.patch.object(FakeTensor, "tolist", asked),
        mock.patch.object(FakeTensor, "__int__", asked, create=True),
        mock.patch.object(attention, "FakeTensor", ()),  # so that it takes them for what has memory
    ):
        yield places


# -- layouts

PREFILL = ParallelConfig(
    pp_size=8,
    cp_size=8,
    ep_size=8,
    lmhead_tp_size=8,
    ngram_embed_tp_size=8,
    layers_per_stage=(4, 5, 5, 5, 5, 5, 5, 4),
)
DECODE = ParallelConfig(
    dp_size=16,
    kvp_size=8,
    attn_tp_size=8,
    dense_tp_size=8,
    ep_size=128,
    lmhead_tp_size=16,
    ngram_embed_tp_size=128,
)
FUSED = replace(DECODE, moe_dispatch="fused")
CHAT_32 = ParallelConfig(dp_size=32, dense_tp_size=8, ep_size=32, embed_tp_size=8, lmhead_tp_size=8, ngram_embed_tp_size=8)
LITE_8 = ParallelConfig(dp_size=2, attn_tp_size=4, ep_size=8, lmhead_tp_size=8, ngram_embed_tp_size=8)
LITE_16 = ParallelConfig(dp_size=4, attn_tp_size=4, ep_size=16, lmhead_tp_size=16, ngram_embed_tp_size=16)
LITE_TP = ParallelConfig(
    attn_tp_size=8, dense_tp_size=8, moe_tp_size=8, embed_tp_size=8, lmhead_tp_size=8, ngram_embed_tp_size=8
)
A2, A3 = NpuConfig(), NpuConfig(soc="A3")
_CHAT = {"release": "chat", "role": "standalone", "num_drafts": 1, "max_model_len": 4736, "chunk": 4608}
_LITE = {"release": "lite", "role": "standalone", "max_model_len": 1152, "chunk": 1024}
POOLS: dict[str, Pool] = {
    "2.0 prefill": Pool(release="2.0", role="prefill", parallel=PREFILL, num_drafts=3, is_int8=True, max_model_len=262144),
    "2.0 bf16 prefill": Pool(release="2.0", role="prefill", parallel=PREFILL, num_drafts=3, max_model_len=262144),
    "2.0 decode A2": Pool(release="2.0", role="decode", parallel=DECODE, num_drafts=3, is_int8=True, npu=A2),
    "2.0 decode A3": Pool(release="2.0", role="decode", parallel=FUSED, num_drafts=3, is_int8=True, npu=A3),
    "2.0 bf16 decode A3": Pool(release="2.0", role="decode", parallel=FUSED, num_drafts=3, npu=A3),
    "chat 32 A2": Pool(parallel=CHAT_32, npu=A2, **_CHAT),
    # rows of a prompt are more than the fused pair takes
    "chat 32 A3": Pool(parallel=replace(CHAT_32, moe_dispatch="fused"), npu=A3, **_CHAT | {"role": "decode"}),
    "lite 8 A2": Pool(parallel=LITE_8, num_seqs=2, npu=A2, **_LITE),
    "lite 8 A3": Pool(parallel=replace(LITE_8, moe_dispatch="fused"), num_seqs=2, npu=A3, **_LITE),
    "lite 8tp A3": Pool(parallel=LITE_TP, num_seqs=1, npu=A3, **_LITE),
    "lite 16 int8 A3": Pool(parallel=replace(LITE_16, moe_dispatch="fused"), num_seqs=16, is_int8=True, npu=A3, **_LITE),
}
