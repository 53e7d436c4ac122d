"""What a small checkpoint is good for: taking any part of the model away changes its tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd.models.checkpoint import checkpoint_digest
from longcat_pd.tiny.make import write_tiny
from tests.parity.conftest import MakeCheckpoint
from tests.parity.oracle import Oracle, read_checkpoint, some_tokens

LENGTH, EOS_AT = 90, 60
Change = Callable[[Oracle], None]


def without(part: str) -> Change:
    def change(oracle: Oracle) -> None:
        names = [name for name in oracle.weights if part in name]
        assert names
        for name in names:
            oracle.weights[name] = torch.zeros_like(oracle.weights[name])

    return change


def field(**fields: Any) -> Change:
    def change(oracle: Oracle) -> None:
        assert fields.keys() <= oracle.config.keys() | {"indexer_rope_interleave"}
        oracle.config |= fields

    return change


def drop_zero_experts(oracle: Oracle) -> None:
    """Zero experts are still chosen, and contribute nothing: without ``h`` they are what remains."""
    full = oracle.moe

    def moe(p: str, h: Tensor) -> Tensor:
        probs = torch.softmax(oracle.w(f"{p}.router.classifier") @ h, dim=0)
        biased = probs + oracle.weights[f"{p}.router.e_score_correction_bias"]
        chosen = biased.topk(oracle.config["moe_topk"]).indices
        zeros = chosen[chosen >= oracle.config["n_routed_experts"]]
        return full(p, h) - probs[zeros].sum() * oracle.config["routed_scaling_factor"] * h

    oracle.moe = moe  # type: ignore[method-assign]


EVERYWHERE = {
    "attention": without("o_proj"),
    "experts": without(".experts."),
    "zero experts": drop_zero_experts,
    "dense MLPs": without(".mlps."),
    "correction bias": without("e_score_correction_bias"),
    "scaling factor": field(routed_scaling_factor=1.0),
    "q factor": field(mla_scale_q_lora=False),
    "latent factor": field(mla_scale_kv_lora=False),
}
NGRAMS = {"word embedding": without("model.embed_tokens"), "EOS as a border": field(eos_token_id=3)}
OE = NGRAMS | {"tables": without("model.oe_embed_proj"), "farthest neighbour": without("model.oe_embed_proj11")}
SPARSE = {
    "selection": field(index_topk=4096),
    "sink": field(index_init_tokens=0),
    "window": field(index_local_tokens=8),
    "index scores": without("weights_proj"),
    "rotation style": field(indexer_rope_interleave=False),
    "shared sets": field(cli_factor=1),
}
ABLATIONS = {
    "2.0": EVERYWHERE | OE | SPARSE,
    "lite-sparse": EVERYWHERE | OE | SPARSE,
    "lite": EVERYWHERE | NGRAMS | {"tables": without("post_projs")},
    "chat": EVERYWHERE,
}


@pytest.mark.parametrize("variant", ["2.0", "lite", "chat", pytest.param("lite-sparse", marks=pytest.mark.slow)])
def test_every_part_changes_tokens(tiny: MakeCheckpoint, variant: str) -> None:
    fields, tensors = read_checkpoint(tiny(variant))
    if "index_topk" in fields:  # so that sharing of sets can be switched off
        for layer in range(fields["num_layers"]):
            for part in ("wq_b", "wk", "k_norm", "weights_proj"):
                name = f"model.layers.{layer}.self_attn.{{}}.indexer.{part}.weight"
                tensors[name.format(1)] = tensors[name.format(0)]
    prompt = some_tokens(LENGTH)
    prompt[EOS_AT] = 2
    logits = Oracle(fields, tensors, torch.float32).logits(prompt)
    tokens = logits.argmax(-1)
    two = logits.topk(2, dim=-1).values
    assert 2 < logits.std() < 5
    assert (two[:, 0] - two[:, 1]).quantile(0.1) > 0.02  # rounding does not decide
    assert len(set(tokens.tolist())) > LENGTH // 2
    for name, change in ABLATIONS[variant].items():
        oracle = Oracle(dict(fields), tensors, torch.float32)
        change(oracle)
        changed = (oracle.logits(prompt).argmax(-1) != tokens)[EOS_AT:].sum()
        assert changed >= 3, name


def test_another_process_makes_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "longcat_pd.tiny", "--variant", "2.0", "--seed", "7", "--out", str(tmp_path / "a")]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONHASHSEED": "1"})
    write_tiny(tmp_path / "b", "2.0", seed=7)
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab")
    assert a == b
    assert checkpoint_digest(tmp_path / "a") == checkpoint_digest(tmp_path / "b")
