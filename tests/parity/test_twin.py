"""The training twin against the obvious model: logits, drafts, and what each row looks at."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longcat_pd.config.model import ModelConfig
from longcat_pd.models.tensor_names import draft_tensors, expected_tensors
from longcat_pd.tiny.make import write_tiny
from tests.parity.oracle import Oracle, read_checkpoint, some_tokens
from tools.tiny.twin import Twin

SMALL = ("num_layers=2", "index_topk=24", "index_local_tokens=6", "n_routed_experts=6", "num_attention_heads=4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("twin") / "checkpoint"
    write_tiny(path, "2.0", dtype="float32", with_tokenizer=False, overrides=SMALL)
    return path


def twin_of(path: Path) -> Twin:
    twin = Twin(ModelConfig.load(path), longest=96)
    twin.fill(read_checkpoint(path)[1])
    return twin


def tokens_with_ends(count: int) -> list[int]:
    tokens = some_tokens(count, seed=3)
    tokens[7] = tokens[20] = tokens[21] = 2
    return tokens


@pytest.mark.parametrize("length", [3, 24, 25, 60])
def test_the_same_logits(checkpoint: Path, length: int) -> None:
    tokens, twin = tokens_with_ends(60)[:length], twin_of(checkpoint)
    ids = torch.tensor([tokens, tokens[::-1]])
    with torch.no_grad():
        logits = twin.head(twin(ids, twin.begin(ids, is_sparse=True)))
    truth = Oracle(*read_checkpoint(checkpoint)).logits(tokens)
    torch.testing.assert_close(logits[0].double(), truth, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("length", [12, 50])
def test_the_same_drafts(checkpoint: Path, length: int) -> None:
    """The oracle drafts what it says itself; the twin is given that as the tokens to come."""
    tokens, twin, oracle = tokens_with_ends(60)[:length], twin_of(checkpoint), Oracle(*read_checkpoint(checkpoint))
    truth = oracle.draft_logits(tokens, 3)
    whole = [*tokens, *truth.argmax(-1).tolist()]
    ids = torch.tensor([whole])
    now = twin.begin(ids, is_sparse=True)
    with torch.no_grad():
        drafts = twin.drafts(twin(ids, now), ids, torch.tensor([[length - 2]]), now)
        logits = torch.stack([twin.head(draft)[0, 0] for draft in drafts])
    torch.testing.assert_close(logits.double(), truth, rtol=2e-4, atol=2e-4)


def test_all_tensors_go_out_and_come_in(checkpoint: Path) -> None:
    config, tensors = ModelConfig.load(checkpoint), read_checkpoint(checkpoint)[1]
    out = twin_of(checkpoint).tensors()
    assert {name: tuple(t.shape) for name, t in out.items()} == expected_tensors(config) | draft_tensors(config)
    for name, tensor in out.items():
        torch.testing.assert_close(tensor, tensors[name], rtol=1e-6, atol=1e-6, msg=name)


def test_padding_changes_nothing(checkpoint: Path) -> None:
    tokens, twin = tokens_with_ends(40), twin_of(checkpoint)
    ids = torch.tensor([[*tokens, *[3] * 20]])
    with torch.no_grad():
        padded = twin(ids, twin.begin(ids, is_sparse=True))[:, :40]
        alone = twin(ids[:, :40], twin.begin(ids[:, :40], is_sparse=True))
    torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-5)


def test_to_watch_changes_nothing_and_to_choose_does(checkpoint: Path) -> None:
    twin = twin_of(checkpoint)
    ids = torch.tensor([tokens_with_ends(60)])
    with torch.no_grad():
        dense = twin(ids, twin.begin(ids, is_sparse=False))
        watched = twin(ids, twin.begin(ids, is_sparse=False, watched=torch.tensor([[30, 59]])))
        sparse = twin(ids, twin.begin(ids, is_sparse=True))
    torch.testing.assert_close(dense, watched, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(dense[:, 30:], sparse[:, 30:], atol=1e-3)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_an_indexer_learns_what_is_looked_at_and_nothing_else_learns_from_it(checkpoint: Path, is_sparse: bool) -> None:
    twin = twin_of(checkpoint)
    ids = torch.tensor([tokens_with_ends(60)])
    now = twin.begin(ids, is_sparse=is_sparse, watched=torch.tensor([[30, 40, 59]]))
    twin.drafts(twin(ids, now), ids, torch.tensor([[40, 50]]), now)
    assert len(now.index_losses) == 3
    torch.stack(now.index_losses).sum().backward()
    with_gradient = {name for name, p in twin.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    learning = {name for name, _ in twin.named_parameters() if ".indexer." in name}
    if not is_sparse:  # the first layer's attentions look at nothing yet that would have to be chosen
        learning = {name for name in learning if not name.startswith("layers.0.")}
    assert with_gradient == learning


def test_before_there_is_a_choice_one_attention_alone_looks_far(checkpoint: Path) -> None:
    """What is neither among the first nor the last tokens reaches a row through the first attention of the last layer."""
    twin, tokens = twin_of(checkpoint), tokens_with_ends(90)
    settings = twin.config.indexer
    assert settings is not None
    place = settings.index_init_tokens + 10
    changed = torch.tensor([[*tokens[:place], tokens[place] + 1, *tokens[place + 1 :]]])
    first = list[torch.Tensor]()
    twin.layers[0].register_forward_hook(lambda module, given, gave: first.append(gave.detach()))
    with torch.no_grad():
        before, after = (twin(ids, twin.begin(ids, is_sparse=False)) for ids in (torch.tensor([tokens]), changed))
    # two attentions behind the 5-gram: what a window away may know of it, but nothing farther
    reach = place + 4 + 2 * settings.index_local_tokens
    assert torch.equal(first[0][:, reach:], first[1][:, reach:])
    assert not torch.equal(first[0][:, place], first[1][:, place])
    assert not torch.equal(before[:, -1], after[:, -1])
