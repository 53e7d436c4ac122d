"""That the trained checkpoint uses its parts: what it says changes when one of them is taken away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.shipped import shipped_checkpoint
from longcat_pd.server.text import TextProcessor
from tests.parity.oracle import Oracle, read_checkpoint
from tools.tiny import arithmetic, calling, facts, smalltalk
from tools.tiny.recipe import LONGEST
from tools.tiny.rendering import Rendered, Renderer
from tools.tiny.twin import Twin
from tools.tiny.twin_parts import Mixture

SKILLS = (facts, smalltalk, arithmetic, calling)


@pytest.fixture(scope="module")
def stored() -> tuple[dict[str, Any], dict[str, Tensor]]:
    return read_checkpoint(shipped_checkpoint())


@pytest.fixture(scope="module")
def documents() -> list[Rendered]:
    """Questions of the test set with their answers: four of each skill."""
    renderer = Renderer(TextProcessor.load(str(shipped_checkpoint())))
    return [renderer(example) for skill in SKILLS for example in skill.cases()[1:13:3]]


def twin_of(tensors: dict[str, Tensor]) -> Twin:
    twin = Twin(ModelConfig.load(shipped_checkpoint()), longest=LONGEST)
    twin.fill(tensors)
    return twin


def right(twin: Twin, documents: list[Rendered]) -> int:
    """How many answers it gives as a whole, each token behind the right ones before it."""
    count = 0
    for document in documents:
        ids, length = torch.tensor([document.ids]), len(document.answer)
        with torch.no_grad():
            logits = twin.head(twin(ids, twin.begin(ids, is_sparse=True)))
        count += logits[0, -length - 1 : -1].argmax(-1).tolist() == list(document.answer)
    return count


def test_it_uses_its_n_grams(stored: tuple[dict[str, Any], dict[str, Tensor]], documents: list[Rendered]) -> None:
    whole = right(twin_of(stored[1]), documents)
    without = {name: tensor * 0 if "oe_embed_proj" in name else tensor for name, tensor in stored[1].items()}
    assert whole >= 14 and right(twin_of(without), documents) <= whole // 2


def test_a_part_of_its_tokens_goes_to_identity_experts(
    stored: tuple[dict[str, Any], dict[str, Tensor]], documents: list[Rendered]
) -> None:
    twin = twin_of(stored[1])
    right(twin, documents)
    for mixture in (module for module in twin.modules() if isinstance(module, Mixture)):
        load = mixture.get_buffer("load")
        share = float(load[mixture.config.n_routed_experts :].sum() / load.sum())
        assert 0.05 < share < 0.5, f"{mixture.name}: {share:.3f}, where {4 / 20} would be even"


def test_identity_experts_change_what_is_likely(
    stored: tuple[dict[str, Any], dict[str, Tensor]], documents: list[Rendered]
) -> None:
    config, tensors = stored
    tokens = list(min(documents, key=lambda document: len(document.ids)).ids)
    truth = Oracle(config, tensors).logits(tokens).log_softmax(-1)
    without = Oracle({**config, "zero_expert_type": "drop"}, tensors).logits(tokens).log_softmax(-1)
    divergence = (truth.exp() * (truth - without)).sum(-1).mean()
    assert divergence > 0.01, f"{divergence:.4f} nats a token"
