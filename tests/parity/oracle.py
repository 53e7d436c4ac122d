"""A slow and obvious LongCat: the formulas one after the other, token by token, with nothing of ``longcat_pd`` in it.

Takes a checkpoint as plain data (the dict of ``config.json`` and a dict of tensors) and gives the logits of every
position. Keys and values are expanded per head, experts are called one by one, the sparse selection sorts all scores.
No cache: every call starts from the first token.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor


def some_tokens(count: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [1] + [draw.randrange(32, 1024) for _ in range(count - 1)]


def read_checkpoint(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """config.json and all tensors of a folder."""
    tensors: dict[str, Tensor] = {}
    for shard in sorted(path.glob("*.safetensors")):
        tensors.update(load_file(shard))
    return json.loads((path / "config.json").read_text()), tensors


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps)


def rope_frequencies(config: dict[str, Any]) -> Tensor:
    """omega_i in fp64, one per pair of rope dimensions."""
    d, theta = config["qk_rope_head_dim"], config["rope_theta"]
    plain = [theta ** (-2 * i / d) for i in range(d // 2)]
    yarn = config.get("rope_scaling")
    if not yarn:
        return torch.tensor(plain, dtype=torch.float64)

    def at(turns: float) -> float:
        return d * math.log(yarn["original_max_position_embeddings"] / (2 * math.pi * turns)) / (2 * math.log(theta))

    low = max(math.floor(at(yarn.get("beta_fast", 32))), 0)
    high = min(math.ceil(at(yarn.get("beta_slow", 1))), d - 1)
    width = (high - low) or 0.001
    omegas = []
    for i, omega in enumerate(plain):
        ramp = min(max((i - low) / width, 0.0), 1.0)
        omegas.append(omega * (ramp / yarn["factor"] + 1 - ramp))
    return torch.tensor(omegas, dtype=torch.float64)


def stretch(config: dict[str, Any], scale: float) -> float:
    """YaRN's m(scale)."""
    yarn = config.get("rope_scaling")
    return 0.1 * scale * math.log(yarn["factor"]) + 1 if yarn and yarn["factor"] > 1 else 1.0


def softmax_scale(config: dict[str, Any]) -> float:
    yarn = config.get("rope_scaling") or {}
    head_dim = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    return head_dim**-0.5 * stretch(config, yarn.get("mscale_all_dim", 0)) ** 2


def rope_magnitude(config: dict[str, Any]) -> float:
    """What cos and sin are multiplied by."""
    yarn = config.get("rope_scaling") or {}
    if "mscale" in yarn and "mscale_all_dim" in yarn:
        return stretch(config, yarn["mscale"]) / stretch(config, yarn["mscale_all_dim"])
    return stretch(config, 1)


def rotate(x: Tensor, position: int, omegas: Tensor, *, magnitude: float, interleaved: bool = True) -> Tensor:
    """x: [..., d]. Pair (2i, 2i+1), or (i, i + d/2), turns by position * omega_i and is stretched by ``magnitude``."""
    half = x.shape[-1] // 2
    out = x.clone()
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        angle = position * float(omegas[i])
        cos, sin = magnitude * math.cos(angle), magnitude * math.sin(angle)
        out[..., a] = x[..., a] * cos - x[..., b] * sin
        out[..., b] = x[..., b] * cos + x[..., a] * sin
    return out


def ngram_rows(tokens: Sequence[int], i: int, config: dict[str, Any]) -> list[int]:
    """Row number in every table for the token at position i."""
    ratio, order, splits = ngram_fields(config)
    vocab = config["vocab_size"]
    eos = config["eos_token_id"] if isinstance(config["eos_token_id"], list) else [config["eos_token_id"]]
    ignored = [range(*map(int, part.split(":"))) for part in config.get("ignored_token_ids", "").split(",") if part]
    window: list[int] = []
    for j in range(min(order, i + 1)):
        token = tokens[i - j]
        if (j > 0 and token in eos) or any(token in ids for ids in ignored):
            break
        window.append(token)
    rows = []
    for b in range(splits * (order - 1)):
        n = b // splits + 2
        modulus = math.floor(ratio * vocab) + 2 * b + 1
        rows.append(sum(token * vocab**j for j, token in enumerate(window[:n])) % modulus)
    return rows


def ngram_fields(config: dict[str, Any]) -> tuple[float, int, int] | tuple[None, None, None]:
    for ratio, order, splits in (
        ("oe_vocab_size_ratio", "oe_neighbor_num", "oe_split_num"),
        ("ngram_vocab_size_ratio", "emb_neighbor_num", "emb_split_num"),
    ):
        if ratio in config:
            return config[ratio], config[order], config[splits]
    return None, None, None


class Oracle:
    """The whole model.

    Args:
        config: ``config.json``.
        tensors: the checkpoint's tensors by name.
        dtype: everything is computed in it.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor], dtype: torch.dtype = torch.float64) -> None:
        self.config = config
        self.dtype = dtype
        self.weights = {name: tensor.to(dtype) for name, tensor in tensors.items()}
        self.omegas = rope_frequencies(config)
        self.magnitude = rope_magnitude(config)
        self.sigma = softmax_scale(config)
        self.eps = config["rms_norm_eps"]
        self.lora_eps = config.get("lora_norm_eps", self.eps)
        self.scores: dict[tuple[int, int], Tensor] = {}  # (sub-layer, t) -> raw index scores over s <= t
        self.sets: dict[tuple[int, int], list[int]] = {}  # (sub-layer, t) -> positions attended to

    def w(self, name: str) -> Tensor:
        return self.weights[name + ".weight"]

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """[T, V], one row per token."""
        head = "model.embed_tokens" if self.config.get("tie_word_embeddings") else "lm_head"
        return self.final(tokens) @ self.w(head).T

    def final(self, tokens: Sequence[int]) -> Tensor:
        """[T, H], hidden states behind the final norm."""
        self.scores.clear()
        self.sets.clear()
        x = torch.stack([self.embed(tokens, i) for i in range(len(tokens))])
        for layer in range(self.config["num_layers"]):
            x = self.layer(layer, x)
        return rms(x, self.w("model.norm"), self.eps)

    def draft_logits(self, tokens: Sequence[int], num_drafts: int) -> Tensor:
        """[num_drafts, V] behind ``tokens``, of which the target has not computed the last; each draft is the arg-max.

        The first draft's row attends to its 3S set; the later ones to the same set and all positions since.
        """
        g, tokens, logits = list(self.final(tokens[:-1])), list(tokens), []
        mtp, first = 2 * self.config["num_layers"], len(tokens) - 2
        for step in range(num_drafts):
            out = self.draft_layer(mtp, torch.stack(g), tokens[1:], first if step else None)
            g.append(out[-1])
            logits.append(out[-1] @ self.w("lm_head").T)
            tokens.append(int(logits[-1].argmax()))
        return torch.stack(logits)

    def draft_layer(self, sublayer: int, g: Tensor, next_tokens: Sequence[int], first: int | None) -> Tensor:
        p = "model.mtp.layers.0"
        e = torch.stack([self.w("model.mtp.embed_tokens")[t] for t in next_tokens])
        halves = (rms(e, self.w(f"{p}.enorm.m"), self.eps), rms(g, self.w(f"{p}.hnorm.m"), self.eps))
        x = torch.cat(halves, -1) @ self.w(f"{p}.eh_proj").T
        h = rms(x, self.w(f"{p}.input_layernorm"), self.eps)
        x = x + self.attention(sublayer, f"{p}.self_attn", h, kept_since=first)
        x = x + self.mlp(f"{p}.transformer_layer.mlp", rms(x, self.w(f"{p}.post_attention_layernorm"), self.eps))
        return rms(x, self.w("model.mtp.norm"), self.eps)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """arg-max tokens, lowest id on ties, not stopping at EOS."""
        tokens = list(prompt)
        for _ in range(num_tokens):
            last = self.logits(tokens)[-1]
            tokens.append(int((last == last.max()).nonzero()[0]))
        return tokens[len(prompt) :]

    def embed(self, tokens: Sequence[int], i: int) -> Tensor:
        total = self.w("model.embed_tokens")[tokens[i]]
        if ngram_fields(self.config)[0] is None:
            return total
        rows = ngram_rows(tokens, i, self.config)
        is_lite = "model.ngram_embeddings.embedders.0.weight" in self.weights
        for b, row in enumerate(rows):
            if is_lite:
                table, proj = f"model.ngram_embeddings.embedders.{b}", f"model.ngram_embeddings.post_projs.{b}"
            else:
                table, proj = f"model.oe_embed_tokens{b}", f"model.oe_embed_proj{b}"
            total = total + self.w(proj) @ self.w(table)[row]
        return total / (len(rows) + 1)

    def layer(self, index: int, x: Tensor) -> Tensor:
        p = f"model.layers.{index}"
        h0 = rms(x, self.w(f"{p}.input_layernorm.0"), self.eps)
        a = x + self.attention(2 * index, f"{p}.self_attn.0", h0)
        h1 = rms(a, self.w(f"{p}.post_attention_layernorm.0"), self.eps)
        s = torch.stack([self.moe(f"{p}.mlp", token) for token in h1])
        b = a + self.mlp(f"{p}.mlps.0", h1)
        h2 = rms(b, self.w(f"{p}.input_layernorm.1"), self.eps)
        c = b + self.attention(2 * index + 1, f"{p}.self_attn.1", h2)
        h3 = rms(c, self.w(f"{p}.post_attention_layernorm.1"), self.eps)
        return c + self.mlp(f"{p}.mlps.1", h3) + s

    def mlp(self, p: str, x: Tensor) -> Tensor:
        gate, up = x @ self.w(f"{p}.gate_proj").T, x @ self.w(f"{p}.up_proj").T
        return (gate * torch.sigmoid(gate) * up) @ self.w(f"{p}.down_proj").T

    def moe(self, p: str, h: Tensor) -> Tensor:
        """One token: h is [H]."""
        probs = torch.softmax(self.w(f"{p}.router.classifier") @ h, dim=0)
        biased = (probs + self.weights[f"{p}.router.e_score_correction_bias"]).tolist()
        chosen = sorted(range(len(biased)), key=lambda e: -biased[e])[: self.config["moe_topk"]]
        out = torch.zeros_like(h)
        for e in chosen:
            weight = probs[e] * self.config["routed_scaling_factor"]
            if e < self.config["n_routed_experts"]:
                out += weight * self.mlp(f"{p}.experts.{e}", h)
            else:  # the two older kinds of zero expert ignore the weight, or contribute nothing
                out += {"identity": weight, "copy": 1, "drop": 0}[self.config["zero_expert_type"]] * h
        return out

    def attention(self, sublayer: int, p: str, x: Tensor, kept_since: int | None = None) -> Tensor:
        """``kept_since``: rows behind this one attend to its set and to what came since."""
        c = self.config
        hidden, nope, v_dim, heads = c["hidden_size"], c["qk_nope_head_dim"], c["v_head_dim"], c["num_attention_heads"]
        u = rms(x @ self.w(f"{p}.q_a_proj").T, self.w(f"{p}.q_a_layernorm"), self.lora_eps)
        q = (u @ self.w(f"{p}.q_b_proj").T).unflatten(-1, (heads, -1))
        if c["mla_scale_q_lora"]:
            q = q * math.sqrt(hidden / c["q_lora_rank"])
        z = x @ self.w(f"{p}.kv_a_proj_with_mqa").T
        latent, k_pe = z[:, : c["kv_lora_rank"]], z[:, c["kv_lora_rank"] :]
        latent = rms(latent, self.w(f"{p}.kv_a_layernorm"), self.lora_eps)
        if c["mla_scale_kv_lora"]:
            latent = latent * math.sqrt(hidden / c["kv_lora_rank"])
        expanded = (latent @ self.w(f"{p}.kv_b_proj").T).unflatten(-1, (heads, nope + v_dim))
        k_pe = torch.stack([self.turn(k_pe[s], s) for s in range(len(x))])
        self.select(sublayer, p, x, u)
        for t in range(len(x) if kept_since is None else kept_since + 1, len(x)):
            self.sets[sublayer, t] = [*self.sets[sublayer, kept_since], *range(kept_since + 1, t + 1)]
        rows = []
        for t in range(len(x)):
            q_pe = self.turn(q[t, :, nope:], t)
            kept = torch.tensor(self.sets[sublayer, t])
            outs = []
            for h in range(heads):
                scores = expanded[kept, h, :nope] @ q[t, h, :nope] + k_pe[kept] @ q_pe[h]
                outs.append(torch.softmax(self.sigma * scores, dim=0) @ expanded[kept, h, nope:])
            rows.append(torch.cat(outs))
        return torch.stack(rows) @ self.w(f"{p}.o_proj").T

    def turn(self, x: Tensor, position: int, *, interleaved: bool = True) -> Tensor:
        return rotate(x, position, self.omegas, magnitude=self.magnitude, interleaved=interleaved)

    def select(self, sublayer: int, p: str, x: Tensor, u: Tensor) -> None:
        """Fill ``sets`` of a sub-layer: everything, a new selection, or that of the owner before it."""
        shared = self.config.get("cli_factor", 1)
        for t in range(len(x)):
            if self.config.get("index_topk") is None:
                self.sets[sublayer, t] = list(range(t + 1))
            elif sublayer % shared:
                self.sets[sublayer, t] = self.sets[sublayer - sublayer % shared, t]
        if self.config.get("index_topk") is None or sublayer % shared:
            return
        score = self.index_scorer(f"{p}.indexer", x, u)
        for t in range(len(x)):
            self.scores[sublayer, t] = score(t)
            self.sets[sublayer, t] = self.select_3s(self.scores[sublayer, t].tolist())

    def index_scorer(self, p: str, x: Tensor, u: Tensor) -> Callable[[int], Tensor]:
        c = self.config
        heads, dim, rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        interleaved = c.get("indexer_rope_interleave", True)
        iq = (u @ self.w(f"{p}.wq_b").T).unflatten(-1, (heads, dim))
        ik = rms(x @ self.w(f"{p}.wk").T, self.w(f"{p}.k_norm"), c.get("index_k_norm_eps", 1e-6))
        head_weights = (x @ self.w(f"{p}.weights_proj").T) * heads**-0.5 * dim**-0.5
        for vectors in (iq, ik):
            for t in range(len(x)):
                vectors[t, ..., :rope] = self.turn(vectors[t, ..., :rope], t, interleaved=interleaved)

        def score(t: int) -> Tensor:
            return sum(head_weights[t, h] * (ik[: t + 1] @ iq[t, h]).clamp(min=0) for h in range(heads))

        return score

    def select_3s(self, scores: list[float]) -> list[int]:
        """Sink, sliding window, sparse: positions kept for the last one of ``scores``, ascending."""
        c = self.config
        t = len(scores) - 1
        if t + 1 <= c["index_topk"]:
            return list(range(t + 1))
        forced = [s < c["index_init_tokens"] or s > t - c["index_local_tokens"] for s in range(t + 1)]
        order = sorted(range(t + 1), key=lambda s: (-math.inf if forced[s] else -scores[s], s))
        return sorted(order[: c["index_topk"]])
