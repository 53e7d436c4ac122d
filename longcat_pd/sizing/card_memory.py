"""What a rank takes of an NPU beside weights and cache: buffers of communicators, graphs, workspace, the runtime itself.

Estimates from shapes and from what docs/ascend.md says the operators allocate; none was measured. Knows no card.
"""

from __future__ import annotations

from collections.abc import Mapping

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.schema import InstanceSpec, PoolConfig
from longcat_pd.parallel.communicators import Communicator, communicators
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.sizing.steps import LargestStep, logits_bytes, said_bytes

MIB = 1 << 20
RUNTIME_BYTES = 1 << 30  # assumed: context, streams, programs of the operators, rounding of the allocator
HOST_BYTES = 3 << 30  # assumed: what a rank process with torch_npu and CANN holds of the node's memory
GRAPH_BYTES = 64 << 20  # assumed: programs and constants of one compiled graph, beside what it computes in
BUFFER_MB, PAIR_BUFFER_MB = 200, 20  # HCCL's own for HCCL_BUFFSIZE and P2P_HCCL_BUFFSIZE
_INDEX_ELEMENTS = 1 << 26  # of gathered index keys and their products at once (kernels/npu/indexer.py)
_INDEX_BYTES = 2 + 4 + 4  # of each: the key, the key in fp32, the product


class CardNeeds:
    """Of one instance. ``num_lanes``: ranks of the other pool that each of its ranks may exchange cache with."""

    def __init__(self, spec: InstanceSpec, model: ModelConfig, *, num_lanes: int = 0) -> None:
        self._spec = spec
        self._model = model
        self._layout = ParallelLayout.of(spec.parallel)
        self._num_lanes = num_lanes

    def parts(self, rank: int) -> Mapping[str, int]:
        """graphs, buffers, workspace, process; in bytes."""
        return {
            "graphs": self.graphs(),
            "buffers": self.buffers(rank),
            "workspace": self.workspace(LargestStep.of(self._spec)),
            "process": RUNTIME_BYTES,
        }

    def buffers(self, rank: int) -> int:
        """Two for each communicator, one a direction; two smaller ones for each neighbour and each lane."""
        named: dict[str, int] = {}
        others = 0
        for made in set(communicators(self._layout, rank, self._spec.npu).values()):
            size = 2 * self._buffer_bytes(made)
            if made.options.buffer_name:
                named[made.options.buffer_name] = max(named.get(made.options.buffer_name, 0), size)
            else:
                others += size
        pp = self._layout.axis("pp").size
        stage = self._layout.coordinate(rank, "pp")
        num_pairs = int(stage > 0) + int(stage < pp - 1) + self._num_lanes
        return others + sum(named.values()) + num_pairs * 2 * self._told("P2P_HCCL_BUFFSIZE", PAIR_BUFFER_MB) * MIB

    def graphs(self) -> int:
        """Each graph of a step keeps what it computes in for itself; those of drafts compute one layer of few rows.

        Prompts are never compiled.
        """
        engine = self._spec.engine
        if engine.exe_mode == "eager":
            return 0
        pool = PoolConfig(parallel=self._spec.parallel, engine=engine)
        of_drafts = len(engine.buckets) * engine.num_draft_tokens if engine.exe_mode == "ge_graph" else 0
        each = self.workspace(LargestStep.of_decode(self._spec))
        return (pool.num_graphs - of_drafts) * each + pool.num_graphs * GRAPH_BYTES

    def workspace(self, step: LargestStep) -> int:
        """Upper estimate of one step: a layer's activations, attention, and experts beside it; then logits."""
        model, parallel = self._model, self._spec.parallel
        dense = 3 * model.ffn_hidden_size // parallel.dense_tp_size
        activations = step.rows * (8 * model.hidden_size + dense) * 2
        drawn = logits_bytes(step.sampled, parallel, model=model) + said_bytes(self._spec, model)
        return activations + self._attention(step.rows) + self._experts(step) + self._tables(step) + drawn

    def _attention(self, rows: int) -> int:
        """Queries as they are, in parts and of all heads; results in bf16 and fp32, and once more to be merged; keys."""
        model, parallel = self._model, self._spec.parallel
        latent, rope = model.kv_lora_rank, model.qk_rope_head_dim
        heads = model.num_attention_heads // (1 if parallel.kvp_size > 1 else parallel.attn_tp_size)
        merged = 2 if parallel.kvp_size > 1 else 0
        each = 2 * (latent + rope) * 2 + latent * (2 + 4 + 4 * merged)
        return rows * heads * each + self._keys() + self._selection(rows)

    def _keys(self) -> int:
        """Of all ranks, for one attention: as they came, and latents apart from rope parts."""
        model = self._model
        if self._spec.parallel.cp_size == 1:
            return 0
        index = model.indexer.index_head_dim if model.indexer is not None else 0
        return self._spec.engine.max_model_len * (2 * (model.kv_lora_rank + model.qk_rope_head_dim) + index) * 2

    def _selection(self, rows: int) -> int:
        """Scores of the indexer's candidates, computed again, and lists of picked keys as int64, int32 and masks."""
        indexer = self._model.indexer
        if indexer is None:
            return 0
        count = max(indexer.index_topk - indexer.index_local_tokens, 1)
        elements = rows * count * max(indexer.index_head_dim, indexer.index_n_heads)
        lists = rows * indexer.index_topk * (3 * 8 + 4)
        gathered = rows * count * self._spec.parallel.kvp_size * 4 * 8
        return min(elements, _INDEX_ELEMENTS) * _INDEX_BYTES + lists + gathered

    def _experts(self, step: LargestStep) -> int:
        """Rows of all ranks, and for every choice of each: sorted, behind the first product, results, and these in fp32.

        ``grouped_experts`` has room for all choices, whether or not its experts are among them.
        """
        model, parallel = self._model, self._spec.parallel
        handed_in = max(step.rows, step.share * max(parallel.ep_size, parallel.moe_tp_size))
        if parallel.moe_dispatch in ("all_to_all", "two_level") and parallel.ep_size > 1:
            chosen = 2 * step.share * model.moe_topk  # level would be half of it
        else:
            most = model.n_routed_experts // parallel.ep_size if parallel.moe_dispatch == "fused" else model.moe_topk
            chosen = handed_in * min(model.moe_topk, most)
        inner, hidden = model.expert_ffn_hidden_size // parallel.moe_tp_size, model.hidden_size
        is_int8 = model.quantization is not None
        sorted_rows, products = (1, 2 * inner * 4 + inner) if is_int8 else (2, 3 * inner * 2)
        each = sorted_rows * hidden + max(products, hidden * (2 + 4))
        return chosen * each + handed_in * hidden * (2 + 4)

    def _tables(self, step: LargestStep) -> int:
        """N-gram vectors of the rows of all ranks, before they are added up."""
        parallel = self._spec.parallel
        if self._model.over_embedding is None or parallel.ngram_embed_tp_size == 1:
            return 0
        return 2 * step.share * parallel.ngram_embed_tp_size * self._model.hidden_size * 2

    def _buffer_bytes(self, made: Communicator) -> int:
        size = made.options.buffer_mb
        return (self._told("HCCL_BUFFSIZE", BUFFER_MB) if size is None else size) * MIB

    def _told(self, name: str, usual: int) -> int:
        """A size in MB of the environment that ranks inherit."""
        return int(self._spec.env.get(name, usual))
