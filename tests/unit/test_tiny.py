"""Small checkpoints: the real format, the same bytes for the same arguments, a usable tokenizer and template."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jinja2
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.models.tensor_names import draft_tensors, expected_tensors
from longcat_pd.tiny.__main__ import main
from longcat_pd.tiny.configs import VARIANTS, make_config
from longcat_pd.tiny.make import write_tiny
from longcat_pd.tiny.tokenizer import SPACE, SPECIAL_TOKENS, spaced_pieces, text_files, train, train_for_copies

SMALL = ("num_layers=1", "n_routed_experts=2", "moe_topk=2", "hidden_size=48")


def digest(folder: Path) -> str:
    files = sorted(folder.iterdir())
    return hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in files)).hexdigest()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


@pytest.mark.parametrize("variant", VARIANTS)
def test_checkpoint_is_complete(tmp_path: Path, variant: str) -> None:
    write_tiny(tmp_path / "c", variant, overrides=SMALL)
    config = ModelConfig.load(tmp_path / "c")
    assert (config.indexer is not None) == (variant in ("2.0", "lite-sparse"))
    assert (config.over_embedding is not None) == (variant != "chat")
    shapes = expected_tensors(config) | (draft_tensors(config) if variant != "lite" else {})
    tensors = tensors_of(tmp_path / "c")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == shapes
    for name, tensor in tensors.items():
        assert tensor.dtype == (torch.float32 if "router" in name or "weights_proj" in name else torch.bfloat16)
    generation = json.loads((tmp_path / "c" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3}


def test_same_arguments_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        write_tiny(tmp_path / name, "2.0", seed=seed, overrides=SMALL)
    assert digest(tmp_path / "a") == digest(tmp_path / "b") != digest(tmp_path / "c")


def test_one_size_leaves_other_tensors_alone(tmp_path: Path) -> None:
    write_tiny(tmp_path / "a", "2.0", overrides=SMALL, with_tokenizer=False)
    write_tiny(tmp_path / "b", "2.0", overrides=(*SMALL, "n_routed_experts=3"), with_tokenizer=False)
    a, b = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    router = {f"model.layers.0.mlp.router.{name}" for name in ("classifier.weight", "e_score_correction_bias")}
    assert all(torch.equal(a[name], b[name]) for name in a.keys() - router)


def test_dtype_and_tokenizer_are_choices(tmp_path: Path) -> None:
    write_tiny(tmp_path / "c", "chat", dtype="float32", with_tokenizer=False, overrides=SMALL)
    assert {tensor.dtype for tensor in tensors_of(tmp_path / "c").values()} == {torch.float32}
    assert ModelConfig.load(tmp_path / "c").torch_dtype == "float32"
    assert not list(tmp_path.glob("c/tokenizer*")) + list(tmp_path.glob("c/*.jinja"))


def test_overrides() -> None:
    config = make_config("2.0", ["rope_scaling.factor=8", "eos_token_id=[2,5]", "index_topk=null"], dtype="bfloat16")
    assert config["rope_scaling"]["factor"] == 8
    assert config["eos_token_id"] == [2, 5]
    assert "index_topk" not in config
    assert make_config("2.0", [], dtype="bfloat16")["index_topk"] == 48
    for override in ("hiden_size=96", "hidden_size"):
        with pytest.raises(ConfigError, match="override"):
            make_config("2.0", [override], dtype="bfloat16")


@pytest.mark.parametrize("extra", ["hiden_size=4", "hidden_size=50", "vocab_size=100"])
def test_what_does_not_fit_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str) -> None:
    assert main(["--out", str(tmp_path / "c"), extra]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert list(tmp_path.iterdir()) == []


def test_special_ids_and_round_trip() -> None:
    tokenizer = train(1024)
    assert tokenizer.get_vocab_size() == 1024
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert tokenizer.token_to_id("<longcat_s>") == 1
    assert tokenizer.token_to_id("</longcat_s>") == 2
    assert tokenizer.token_to_id("<longcat_pad>") == 3
    for text in (
        "Hello, world!\n\tx = {1: [2.5]}",
        "你好，请介绍一下自己",
        "\U0001f600 é \x00 \u200d",
        "</longcat_think>\n\n a",
    ):
        encoded = tokenizer.encode(text)
        assert tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert len(tokenizer.encode("The water is warm.").ids) < 9  # merges are used
    assert tokenizer.encode("a").ids == [tokenizer.token_to_id("a")]  # nothing is put around a text


WORDS = "the train to Naples is late, the old trains are in the dining room; 12 old chairs, dine at 7"


def test_a_word_is_cut_alike_with_and_without_a_space() -> None:
    """But for its first piece, which may have the space in it; and a digit is a token of its own."""
    tokenizer = train_for_copies(306, [WORDS] * 3, share_behind_space=0.02)
    assert tokenizer.get_vocab_size() == 306
    spaced, is_joined = spaced_pieces(tokenizer), set[bool]()
    assert len(spaced) == 6 and all(tokenizer.id_to_token(s) == SPACE + tokenizer.id_to_token(b) for s, b in spaced.items())
    for word in ("Naples", "trains", "dining", "chairs", "unheard"):
        behind, alone = (tokenizer.encode(text).ids for text in (f" {word}", word))
        joined = behind[0] in spaced
        is_joined.add(joined)
        assert (alone == [spaced[behind[0]], *behind[1:]]) if joined else (alone == behind[1:])
    assert is_joined == {True, False}
    assert len(tokenizer.encode("2026").ids) == 4
    for text in (WORDS, "  two  spaces\n and a\tlate 42", "你好 Naples"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def render(variant: str, **options: Any) -> str:
    files = text_files(variant, vocab_size=300, max_length=64)
    Tokenizer.from_str(files["tokenizer.json"])
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    return environment.from_string(files["chat_template.jinja"]).render(**options)


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1, "s": "t"}}}
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "q0"},
    {"role": "assistant", "content": "a0", "reasoning_content": "r0"},
    {"role": "user", "content": "q1"},
]
TOOL_TURN = [
    {"role": "assistant", "content": None, "reasoning_content": "r1", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "res"},
]
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def test_role_template() -> None:
    for variant in ("2.0", "lite-sparse", "lite"):
        assert render(variant, messages=TALK, add_generation_prompt=True, enable_thinking=True) == (
            "<longcat_system>Be kind.<longcat_user>q0 /think_on <longcat_assistant>a0</longcat_s>"
            "<longcat_user>q1 /think_on <longcat_assistant><longcat_think>\n"
        )
    empty = "<longcat_think>\n\n</longcat_think>\n"
    assert render("2.0", messages=TALK, add_generation_prompt=True) == (
        f"<longcat_system>Be kind.<longcat_user>q0 /think_off <longcat_assistant>{empty}a0</longcat_s>"
        f"<longcat_user>q1 /think_off <longcat_assistant>{empty}"
    )


def test_role_template_keeps_reasoning_after_the_last_user_or_on_demand() -> None:
    block = "<longcat_think>\n{}\n</longcat_think>\n"
    plain = render("2.0", messages=TALK + TOOL_TURN, enable_thinking=True)
    kept = render("2.0", messages=TALK + TOOL_TURN, enable_thinking=True, save_history_reasoning_content=True)
    assert block.format("r1") in plain and block.format("r1") in kept
    assert block.format("r0") not in plain and block.format("r0") in kept


def test_role_template_tools() -> None:
    text = render("2.0", messages=TALK + TOOL_TURN, tools=TOOLS, add_generation_prompt=True, enable_thinking=True)
    assert text.startswith("<longcat_system>Be kind.\n\n# Tools\n")
    assert '"name": "f"' in text
    assert (
        "<longcat_tool_call>f\n<longcat_arg_key>x</longcat_arg_key>\n<longcat_arg_value>1</longcat_arg_value>\n"
        "<longcat_arg_key>s</longcat_arg_key>\n<longcat_arg_value>t</longcat_arg_value>\n</longcat_tool_call></longcat_s>"
        "<longcat_tool_response>res</longcat_tool_response><longcat_assistant><longcat_think>\n"
    ) in text


def test_round_template() -> None:
    assert render("chat", messages=TALK, add_generation_prompt=True) == (
        "SYSTEM:Be kind. [Round 0] USER:q0 ASSISTANT:a0</longcat_s> [Round 1] USER:q1 ASSISTANT:"
    )
    text = render("chat", messages=TALK + TOOL_TURN, tools=TOOLS, add_generation_prompt=True)
    assert text.index("## f\nDescription: d\n") < text.index("## Messages\nSYSTEM:Be kind.")
    assert '<longcat_tool_call>\n{"name": "f", "arguments": {"s": "t", "x": 1}}\n</longcat_tool_call></longcat_s>' in text
