"""transformers' LongcatFlash with the weights of a chat checkpoint: `generate` as the measure from outside.

Reads one order a line (`batch length num_tokens seed`) and answers each with output tokens per second. A process of its
own, so that its torch and ours do not share threads or memory.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM

from longcat_pd.bench.client import prompt
from longcat_pd.config.model import ModelConfig
from longcat_pd.models.tensor_names import expected_tensors
from longcat_pd.models.weight_spec import WeightSpec
from longcat_pd.models.weights import load_weights

SAME_NAME = (
    "vocab_size",
    "hidden_size",
    "num_layers",
    "num_attention_heads",
    "ffn_hidden_size",
    "expert_ffn_hidden_size",
    "n_routed_experts",
    "zero_expert_num",
    "moe_topk",
    "routed_scaling_factor",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
)


def load(path: Path) -> LongcatFlashForCausalLM:
    """The checkpoint as transformers' model, in float32."""
    fields = json.loads((path / "config.json").read_text(encoding="utf-8"))
    config = LongcatFlashConfig(
        **{name: fields[name] for name in SAME_NAME},
        head_dim=fields["qk_rope_head_dim"],
        rope_parameters={"rope_type": "default", "rope_theta": fields["rope_theta"]},
        eos_token_id=fields["eos_token_id"],
        pad_token_id=fields["eos_token_id"],
    )
    model = LongcatFlashForCausalLM(config)
    model.train(False)
    tensors = read_tensors(path)
    model.load_state_dict(fused(tensors, num_layers=fields["num_layers"], zero_experts=fields["zero_expert_num"]))
    return model


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the main model, whole, in float32."""
    config = ModelConfig.load(path)
    tensors = {name: torch.empty(shape) for name, shape in expected_tensors(config).items()}
    specs = [WeightSpec(name=name, shape=tuple(into.shape), store=partial(_fill, into)) for name, into in tensors.items()]
    load_weights(specs, path, config=config)
    return tensors


def _fill(into: torch.Tensor, tensor: torch.Tensor) -> None:
    into.copy_(tensor)


def fused(tensors: Mapping[str, torch.Tensor], *, num_layers: int, zero_experts: int) -> dict[str, torch.Tensor]:
    """transformers keeps gate and up of all experts in one parameter, with rows for zero experts too."""
    state = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        count = sum(name.startswith(f"{prefix}.") and name.endswith("down_proj.weight") for name in tensors)
        part = {
            kind: torch.stack([tensors[f"{prefix}.{expert}.{kind}_proj.weight"] for expert in range(count)])
            for kind in ("gate", "up", "down")
        }
        both = torch.cat([part["gate"], part["up"]], dim=1)
        state[f"{prefix}.gate_up_proj"] = torch.cat([both, both.new_zeros(zero_experts, *both.shape[1:])])
        state[f"{prefix}.down_proj"] = part["down"]
    return state


def rate(model: LongcatFlashForCausalLM, *, batch: int, length: int, num_tokens: int, seed: int) -> float:
    """Output tokens per second of one greedy `generate` over a batch of equally long prompts."""
    ids = torch.tensor([prompt(length, seed=seed * 1000 + number) for number in range(batch)])
    settings: dict[str, Any] = {"do_sample": False, "min_new_tokens": num_tokens, "max_new_tokens": num_tokens}
    began = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    return batch * num_tokens / (time.perf_counter() - began)


def main() -> None:
    """Obey orders until standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m longcat_pd.bench.judge")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = load(options.model)
    for line in sys.stdin:
        batch, length, num_tokens, seed = (int(word) for word in line.split())
        sys.stdout.write(f"{rate(model, batch=batch, length=length, num_tokens=num_tokens, seed=seed)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
