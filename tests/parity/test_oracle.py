"""The oracle before judges from outside: transformers' LongcatFlash and DSA indexer, and published numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM
from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Indexer

from tests.parity.conftest import MakeCheckpoint
from tests.parity.oracle import Oracle, ngram_rows, read_checkpoint, rms, rope_frequencies, softmax_scale, some_tokens

CONFIG_2_0 = {
    "vocab_size": 163840,
    "eos_token_id": 2,
    "oe_vocab_size_ratio": 100.567,
    "oe_neighbor_num": 5,
    "oe_split_num": 4,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 1e6,
    "rope_scaling": {"factor": 120, "original_max_position_embeddings": 8192, "mscale": 1, "mscale_all_dim": 1},
}
CONFIG_LITE = {
    "vocab_size": 131072,
    "eos_token_id": 2,
    "ngram_vocab_size_ratio": 78,
    "emb_neighbor_num": 4,
    "emb_split_num": 4,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rope_theta": 5e6,
    "rope_scaling": {"factor": 10, "original_max_position_embeddings": 32768, "mscale": 1, "mscale_all_dim": 1},
}
YARN = '{"rope_type": "yarn", "factor": 8, "original_max_position_embeddings": 512, "mscale": 1, "mscale_all_dim": 1}'


def transformers_model(path: Path) -> LongcatFlashForCausalLM:
    """The checkpoint as transformers' model. Its state is built by hand: it fuses gate and up of all experts into one
    parameter with rows for zero experts too, which the files do not have."""
    fields, tensors = read_checkpoint(path)
    rope = {"rope_type": "default", "rope_theta": fields["rope_theta"], **fields.pop("rope_scaling", {})}
    fields = {name: value for name, value in fields.items() if not name.startswith(("mla_", "rope_"))}
    config = LongcatFlashConfig(**fields, head_dim=fields["qk_rope_head_dim"], rope_parameters=rope)
    config._attn_implementation = "eager"
    model = LongcatFlashForCausalLM(config).eval()
    state = {name: tensor for name, tensor in tensors.items() if ".experts." not in name and ".mtp." not in name}
    for layer in range(fields["num_layers"]):
        p = f"model.layers.{layer}.mlp.experts"
        experts = range(fields["n_routed_experts"])
        fused = [torch.cat([tensors[f"{p}.{e}.{part}_proj.weight"] for part in ("gate", "up")]) for e in experts]
        fused += [torch.zeros_like(fused[0])] * fields["zero_expert_num"]
        state[f"{p}.gate_up_proj"] = torch.stack(fused)
        state[f"{p}.down_proj"] = torch.stack([tensors[f"{p}.{e}.down_proj.weight"] for e in experts])
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="plain"),
        pytest.param(("moe_topk=12",), id="topk 12"),
        pytest.param((f"rope_scaling={YARN}",), id="yarn"),
        pytest.param((f"rope_scaling={YARN}", "rope_scaling.mscale_all_dim=0.5"), id="yarn with unequal scales"),
    ],
)
def test_chat_logits_equal_transformers(tiny: MakeCheckpoint, overrides: tuple[str, ...]) -> None:
    # transformers norms the lora vectors with 1e-6, whatever rms_norm_eps says.
    path = tiny("chat", "lora_norm_eps=1e-6", *overrides)
    tokens = some_tokens(70)
    with torch.no_grad():
        theirs = transformers_model(path)(torch.tensor([tokens])).logits[0]
    for dtype in (torch.float32, torch.float64):
        ours = Oracle(*read_checkpoint(path), dtype=dtype).logits(tokens)
        assert ours.std() > 2
        assert (ours - theirs).abs().max() < 1e-4


class _TopkScores(TorchFunctionMode):
    """Sees the scores from which somebody takes the top k."""

    scores: Tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.topk:
            self.scores = args[0]
        return func(*args, **(kwargs or {}))


def their_indexer(fields: dict[str, Any], weights: dict[str, Tensor], *, interleaved: bool) -> DeepseekV32Indexer:
    """DeepSeek's indexer with our weights. It turns halves and not neighbours, and it has a LayerNorm: rows are put in its
    order where ours are interleaved, and the norm is exchanged."""
    names = ("hidden_size", "q_lora_rank", "qk_rope_head_dim", "index_n_heads", "index_head_dim", "index_topk")
    indexer = DeepseekV32Indexer(DeepseekV32Config(**{name: fields[name] for name in names}), layer_idx=0)
    dim, rope = fields["index_head_dim"], fields["qk_rope_head_dim"]
    order = [*range(0, rope, 2), *range(1, rope, 2), *range(rope, dim)] if interleaved else list(range(dim))
    indexer.k_norm = torch.nn.RMSNorm(dim, eps=1e-6)
    state = {name: weights[f"{name}.weight"] for name in ("wq_b", "wk", "k_norm", "weights_proj")}
    state["wq_b"] = state["wq_b"].unflatten(0, (-1, dim))[:, order].flatten(0, 1)
    state["wk"], state["k_norm"] = state["wk"][order], state["k_norm"][order]
    indexer.load_state_dict({f"{name}.weight": tensor for name, tensor in state.items()})
    return indexer


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("forced", [(0, 0), (4, 16)], ids=["plain top-k", "3S"])
def test_index_scores_and_sets_equal_transformers(tiny: MakeCheckpoint, interleaved: bool, forced: tuple[int, int]) -> None:
    init, local = forced
    path = tiny("2.0", f"indexer_rope_interleave={str(interleaved).lower()}")
    fields, tensors = read_checkpoint(path)
    fields |= {"index_init_tokens": init, "index_local_tokens": local}
    oracle = Oracle(fields, tensors, dtype=torch.float32)
    length, p = 130, "model.layers.1.self_attn.0"
    x = torch.randn(length, fields["hidden_size"], generator=torch.Generator().manual_seed(3))
    u = rms(x @ oracle.w(f"{p}.q_a_proj").T, oracle.w(f"{p}.q_a_layernorm"), fields["rms_norm_eps"])
    oracle.select(2, p, x, u)

    prefix = f"{p}.indexer."
    weights = {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    angles = torch.arange(length)[:, None] * rope_frequencies(fields).float()
    positions = (torch.cat([angles, angles], -1).cos()[None], torch.cat([angles, angles], -1).sin()[None])
    t, s = torch.arange(length)[:, None], torch.arange(length)[None, :]
    mask = torch.zeros(length, length).masked_fill(s > t, -math.inf)
    mask = mask.masked_fill((s <= t) & ((s < init) | (s > t - local)), math.inf)
    indexer = their_indexer(fields, weights, interleaved=interleaved)
    with _TopkScores() as seen:
        chosen = indexer(x[None], u[None], positions, mask[None], None)[0]

    checked = 0
    for row in range(length):
        ours, theirs = oracle.scores[2, row], seen.scores[0, row, : row + 1]
        free = torch.isfinite(theirs)
        torch.testing.assert_close(ours[free], theirs[free], atol=1e-5, rtol=1e-5)
        our_set, their_set = set(oracle.sets[2, row]), {int(i) for i in chosen[row] if i <= row}
        assert len(our_set) == len(their_set) == min(row + 1, fields["index_topk"])
        for position in our_set ^ their_set:  # only where scores tie with the last one that got in
            last = min(float(ours[i]) for i in our_set if free[i])
            assert abs(float(ours[position]) - last) < 1e-5
        checked += our_set == their_set
    assert checked > length // 2


def test_ngram_rows_of_the_releases() -> None:
    tokens = [1, 17, 163839, 2, 5, 7, 0, 11, 13]
    expected = [
        [1, 1, 1, 1, 1],
        [163857, 163857, 163857, 163857, 163857],
        [2949119, 5614845, 5601813, 5588781, 5579007],
        [2514920, 14865418, 3978294, 10369658, 6926082],
        [5, 5, 5, 5, 5],
        [819207, 819207, 819207, 819207, 819207],
        [1146880, 14475510, 14410350, 14345190, 14296320],
        [11, 2183187, 14736951, 14821687, 14892043],
        [1802253, 1802253, 9619099, 16433733, 8826893],
    ]
    for i, row in enumerate(expected):
        rows = ngram_rows(tokens, i, CONFIG_2_0)
        assert [rows[b] for b in (0, 4, 8, 12, 15)] == row
    tokens[2] = 131071
    lite = {2: [2359295, 6538479, 6525039, 6514959], 3: [4061554, 3528867, 2116828, 9482214]}
    lite |= {7: [11, 8807049, 2862638, 9855489], 8: [1441805, 1441805, 3474997, 5184884]}
    for i, row in lite.items():
        rows = ngram_rows(tokens, i, CONFIG_LITE)
        assert [rows[b] for b in (0, 4, 8, 11)] == row


def test_rope_of_the_releases() -> None:
    omegas = rope_frequencies(CONFIG_2_0).tolist()
    assert omegas[0] == 1
    for i, value in {8: 0.0316228, 10: 0.01039653, 15: 3.521869e-4, 31: 1.283272e-8}.items():
        assert omegas[i] == pytest.approx(value, rel=1e-5)
    omegas = rope_frequencies(CONFIG_LITE).tolist()
    assert omegas[12] == pytest.approx(2.383351e-3, rel=1e-6)
    assert omegas[31] == pytest.approx(3.238716e-8, rel=1e-6)
    assert softmax_scale(CONFIG_2_0) == pytest.approx(0.1578114, rel=1e-6)
    assert softmax_scale(CONFIG_LITE) == pytest.approx(0.1092301, rel=1e-6)
    assert softmax_scale({"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}) == pytest.approx(0.0721688, rel=1e-6)
