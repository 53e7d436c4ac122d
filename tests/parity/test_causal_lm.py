"""CausalLM against the oracle and against transformers: every variant, every way to cut a prompt into steps."""

from __future__ import annotations

import pytest
import torch

from longcat_pd.tiny.configs import VARIANTS
from tests.parity.conftest import MakeCheckpoint
from tests.parity.oracle import Oracle, read_checkpoint, some_tokens
from tests.parity.single import SingleProcess
from tests.parity.test_oracle import transformers_model

TOPK = 48
LIMIT = 1e-4


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def oracle(variant: str, tiny: MakeCheckpoint) -> Oracle:
    return Oracle(*read_checkpoint(tiny(variant)))


@pytest.fixture
def single(variant: str, tiny: MakeCheckpoint) -> SingleProcess:
    return SingleProcess(tiny(variant))


def distance(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    assert ours.dtype == torch.float32
    return float((ours - theirs).abs().max())


def test_whole_prompts_around_topk(oracle: Oracle, single: SingleProcess) -> None:
    tokens = some_tokens(150)
    expected = oracle.logits(tokens)
    for length in (1, 2, 3, 4, 5, 6, 7, 8, 9, TOPK - 1, TOPK, TOPK + 1, TOPK + 2, 64, 150):
        logits = single.step((single.admit(tokens[:length]), length))[0]
        assert distance(logits, expected[:length]) < LIMIT, length


@pytest.mark.parametrize("cuts", [(40, 16, 32, 62), (47, 1, 1, 1, 100), (8, 142)])
def test_prompt_in_chunks(oracle: Oracle, single: SingleProcess, cuts: tuple[int, ...]) -> None:
    tokens = some_tokens(150, seed=2)
    state = single.admit(tokens)
    logits = torch.cat([single.step((state, cut))[0] for cut in cuts])
    assert distance(logits, oracle.logits(tokens)) < LIMIT


def test_token_by_token(oracle: Oracle, single: SingleProcess) -> None:
    tokens = some_tokens(70, seed=3)
    state = single.admit(tokens)
    logits = torch.cat([single.step((state, 1))[0] for _ in tokens])
    assert distance(logits, oracle.logits(tokens)) < LIMIT


@pytest.mark.parametrize(
    "prompt", [[2], [2, 2], [5, 2, 2, 7], [2, 9, 0, 0, 11], [7, 8, 2], [1, 0, 5, 2, 6, 0, 7, 8]], ids=str
)
def test_eos_and_zero_inside_short_prompts(oracle: Oracle, single: SingleProcess, prompt: list[int]) -> None:
    expected = oracle.logits(prompt)
    assert distance(single.step((single.admit(prompt), len(prompt)))[0], expected) < LIMIT
    state = single.admit(prompt)
    assert distance(torch.cat([single.step((state, 1))[0] for _ in prompt]), expected) < LIMIT


def test_eos_inside_long_prompt(oracle: Oracle, single: SingleProcess) -> None:
    tokens = some_tokens(100, seed=4)
    for place in (0, 13, 14, 60, 99):
        tokens[place] = 2
    state = single.admit(tokens)
    logits = torch.cat([single.step((state, cut))[0] for cut in (16, 48, 36)])
    assert distance(logits, oracle.logits(tokens)) < LIMIT


def test_packed_sequences_do_not_see_each_other(oracle: Oracle, single: SingleProcess) -> None:
    prompts = [some_tokens(length, seed=length) for length in (1, 3, 17, 49, 80, 2)]
    states = [single.admit(prompt, room=1) for prompt in prompts]
    first = single.step(*((state, min(16, len(p))) for state, p in zip(states, prompts, strict=True)))
    rest = [(s, p) for s, p in zip(states, prompts, strict=True) if len(p) > 16]
    second = single.step(*((state, len(p) - 16) for state, p in rest))
    for state, prompt in zip(states, prompts, strict=True):
        state.append(prompt[0] + 40)
    third = single.step(*((state, 1) for state in states))
    later = dict(zip((id(s) for s, _ in rest), second, strict=True))
    for state, prompt, head, tail in zip(states, prompts, first, third, strict=True):
        parts = [head, later[id(state)], tail] if id(state) in later else [head, tail]
        assert distance(torch.cat(parts), oracle.logits([*prompt, prompt[0] + 40])) < LIMIT


@pytest.mark.parametrize("length", [1, 5, TOPK - 4, 100])
def test_greedy_tokens(oracle: Oracle, single: SingleProcess, length: int) -> None:
    prompt = some_tokens(length, seed=length)
    tokens = single.greedy(prompt, 16)
    # Each token is the oracle's choice after those before it, so the oracle alone would have written the same.
    choices = oracle.logits(prompt + tokens).argmax(-1).tolist()
    assert tokens == choices[length - 1 : -1]


def test_bfloat16_agrees_on_most_tokens(oracle: Oracle, variant: str, tiny: MakeCheckpoint) -> None:
    tokens = some_tokens(100, seed=5)
    expected = oracle.logits(tokens)
    single = SingleProcess(tiny(variant), dtype="bfloat16")
    logits = single.step((single.admit(tokens), len(tokens)))[0]
    agreement = (logits.argmax(-1) == expected.argmax(-1)).float().mean()
    assert agreement > 0.75
    assert (logits - expected).abs().median() < 0.3


@pytest.mark.parametrize(
    ("variant", "override"),
    [
        ("2.0", "index_head_dim=24"),
        ("2.0", "zero_expert_num=0"),
        ("2.0", "moe_topk=12"),
        ("2.0", "eos_token_id=[2,700]"),
        ("lite", "ignored_token_ids=600:800,5:6"),
        ("lite", "mla_scale_q_lora=false"),
        ("lite", "rope_scaling.mscale_all_dim=0.5"),
        ("chat", "zero_expert_type=copy"),
        ("chat", "zero_expert_type=drop"),
        ("chat", "tie_word_embeddings=true"),
        ("chat", "mla_scale_kv_lora=false"),
        ("chat", "lora_norm_eps=0.01"),
    ],
)
def test_other_settings(tiny: MakeCheckpoint, variant: str, override: str) -> None:
    path = tiny(variant, override, "num_layers=2")
    tokens = some_tokens(90, seed=6)
    tokens[40] = 700
    single = SingleProcess(path, block_size=16)
    logits = single.step((single.admit(tokens), len(tokens)))[0]
    assert distance(logits, Oracle(*read_checkpoint(path)).logits(tokens)) < LIMIT


@pytest.mark.parametrize("setting", ["indexer_rope_interleave=false", "cli_factor=1", "index_local_tokens=44"])
def test_indexer_settings(tiny: MakeCheckpoint, setting: str) -> None:
    path = tiny("2.0", setting)
    tokens = some_tokens(130, seed=7)
    single = SingleProcess(path)
    state = single.admit(tokens)
    logits = torch.cat([single.step((state, cut))[0] for cut in (64, 66)])
    assert distance(logits, Oracle(*read_checkpoint(path)).logits(tokens)) < LIMIT


def test_chat_equals_transformers(tiny: MakeCheckpoint) -> None:
    path = tiny("chat", "lora_norm_eps=1e-6")
    tokens = some_tokens(100, seed=8)
    single = SingleProcess(path)
    state = single.admit(tokens)
    logits = torch.cat([single.step((state, cut))[0] for cut in (64, 36)])
    theirs = transformers_model(path)
    with torch.no_grad():
        assert distance(logits, theirs(torch.tensor([tokens])).logits[0]) < LIMIT
        written = theirs.generate(torch.tensor([tokens]), max_new_tokens=16, do_sample=False, eos_token_id=None)
    assert single.greedy(tokens, 16) == written[0, 100:].tolist()
