"""A small checkpoint whose next token mostly follows from the last one, so that its own draft layer is mostly right.

The embedding outweighs what the layers add to the stream, and the head reads it back shifted by one id: behind id v comes
v + 1, unless the layers say otherwise, which they do often enough to reject some drafts. The draft layer has the same
embedding and passes the token half of its input through, so it says v + 1 as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from longcat_pd.tiny.tensors import NUM_QUIET_IDS

# Of every projection that writes into the stream: an n-gram embedding is an average, about half as large as a plain one.
_BRANCH_GAIN, _BRANCH_GAIN_NGRAM = 1.0, 0.5
_HEAD_GAIN = 0.8
_BRANCHES = ("o_proj.weight", "down_proj.weight")


def predictable(tensors: Iterable[tuple[str, torch.Tensor]], *, has_ngrams: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of ``random_tensors``, in the same order, made predictable."""
    embedding = torch.zeros(0)
    gain = _BRANCH_GAIN_NGRAM if has_ngrams else _BRANCH_GAIN
    for name, tensor in tensors:
        if name == "model.embed_tokens.weight":
            embedding = tensor / tensor.float().std().to(tensor.dtype)
        yield name, tensor * gain if name.endswith(_BRANCHES) else _changed(name, tensor, embedding)


def _changed(name: str, tensor: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
    if name == "lm_head.weight":
        head = torch.cat((tensor[:NUM_QUIET_IDS], embedding[NUM_QUIET_IDS:].roll(1, 0)))
        return head * _HEAD_GAIN * tensor.float().std().to(tensor.dtype)
    if name == "model.mtp.embed_tokens.weight":
        return embedding
    if name.endswith("eh_proj.weight"):
        hidden = tensor.shape[0]
        return torch.cat((torch.eye(hidden, dtype=tensor.dtype), 0.1 * tensor[:, hidden:]), 1)
    if "oe_embed_proj" in name or ".post_projs." in name:
        return tensor * _BRANCH_GAIN_NGRAM
    return tensor
