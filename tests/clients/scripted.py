"""A small checkpoint that says something known: a short text and one tool call, then the end.

A random model never writes a tool call by itself, so no client could be shown parsing one. Here every token decides the
next one: behind the prompt of an assistant's turn comes ``ANSWER``, token by token; behind any other token another id.
All parts of the model still compute, with branches too weak to change what is said.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer

from longcat_pd.tiny.make import PREDICTABLE, write_tiny

PROMPT_END = "\n"  # what the template ends with, in thinking and out of it
CONTENT = "OK."
CALL_NAME, CALL_ARGUMENTS = "plan", {"city": "Rome"}
ANSWER = (
    f"{CONTENT}<longcat_tool_call>{CALL_NAME}<longcat_arg_key>city</longcat_arg_key>"
    "<longcat_arg_value>Rome</longcat_arg_value></longcat_tool_call></longcat_s>"
)
_BRANCHES = ("o_proj.weight", "down_proj.weight", "post_projs.", "oe_embed_proj")
_WEAK = 0.02
_HEAD = "lm_head.weight"


def write_scripted(folder: Path) -> Path:
    """Write the checkpoint into ``folder``, which must not exist; the same bytes every time."""
    write_tiny(folder, "2.0" + PREDICTABLE, dtype="float32")
    follows = successors(Tokenizer.from_file(str(folder / "tokenizer.json")), vocab_size=_vocab_size(folder))
    embedding = _tensor(folder, "model.embed_tokens.weight")
    for shard in sorted(folder.glob("*.safetensors")):
        with safe_open(shard, "pt") as file:
            metadata, tensors = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name in tensors:
            if any(part in name for part in _BRANCHES):
                tensors[name] = tensors[name] * _WEAK
        if _HEAD in tensors:
            scale = tensors[_HEAD][-1].norm() / embedding.norm(dim=1).mean()
            head = torch.zeros_like(tensors[_HEAD])
            head[follows] = embedding * scale
            tensors[_HEAD] = head
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, shard, metadata)
    return folder


def successors(tokenizer: Tokenizer, *, vocab_size: int) -> torch.Tensor:
    """For each id the one that follows it; a permutation, so that no two rows of the head add up."""
    script = tokenizer.encode(PROMPT_END + ANSWER, add_special_tokens=False).ids
    assert len(set(script)) == len(script), "a token of the script stands in it twice"
    follows = torch.full((vocab_size,), -1, dtype=torch.long)
    follows[script[:-1]] = torch.tensor(script[1:])
    taken = set(script[1:])
    others = [v for v in range(vocab_size) if follows[v] < 0]
    free = [v for v in range(vocab_size) if v not in taken]
    follows[others] = torch.tensor(free[1:] + free[:1])
    return follows


def _vocab_size(folder: Path) -> int:
    return int(json.loads((folder / "config.json").read_text(encoding="utf-8"))["vocab_size"])


def _tensor(folder: Path, name: str) -> torch.Tensor:
    for shard in folder.glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            if name in file.keys():  # noqa: SIM118
                return file.get_tensor(name)
    raise AssertionError(f"{name} is in no shard")
