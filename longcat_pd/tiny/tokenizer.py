"""A small byte-level BPE with LongCat's special tokens, trained on the package's own text.

Owns ``tokenizer.json``, ``tokenizer_config.json`` and the choice of chat template. The alphabet has all 256 bytes, so any
text can be encoded; the merges come from ``corpus.txt`` and are the same on every machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from longcat_pd.errors import ConfigError

SPECIAL_TOKENS = (
    "<longcat_unk>",
    "<longcat_s>",
    "</longcat_s>",
    "<longcat_pad>",
    "<longcat_system>",
    "<longcat_user>",
    "<longcat_assistant>",
    "<longcat_think>",
    "</longcat_think>",
    "<longcat_tool_call>",
    "</longcat_tool_call>",
    "<longcat_arg_key>",
    "</longcat_arg_key>",
    "<longcat_arg_value>",
    "</longcat_arg_value>",
    "<longcat_tool_response>",
    "</longcat_tool_response>",
    "<longcat_observation>",
    "<longcat_files>",
)  # the place is the id


def text_files(
    variant: str, *, vocab_size: int, max_length: int, texts: Iterable[str] | None = None, splits_digits: bool = False
) -> dict[str, str]:
    """The tokenizer's files of a checkpoint, file name -> text. See ``train``."""
    template = "chat_template_rounds.jinja" if variant == "chat" else "chat_template_roles.jinja"
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<longcat_s>",
        "eos_token": "</longcat_s>",
        "pad_token": "<longcat_pad>",
        "unk_token": "<longcat_unk>",
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    return {
        "tokenizer.json": train(vocab_size, texts, splits_digits=splits_digits).to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "chat_template.jinja": _read(template),
    }


def train(vocab_size: int, texts: Iterable[str] | None = None, *, splits_digits: bool = False) -> Tokenizer:
    """Special tokens, the 256 bytes, then merges up to ``vocab_size`` ids (or as many as the text has).

    ``texts``: what merges come from, instead of ``corpus.txt``. ``splits_digits``: each digit is a token of its own.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocab_size < len(SPECIAL_TOKENS) + len(alphabet):
        raise ConfigError(f"vocab_size {vocab_size} has no room for a tokenizer; use --no-tokenizer", param="vocab_size")
    tokenizer = Tokenizer(models.BPE())
    by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, by_bytes]) if splits_digits else by_bytes
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=alphabet,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
    )
    tokenizer.train_from_iterator(_read("corpus.txt").splitlines(keepends=True) if texts is None else texts, trainer)
    return tokenizer


def _read(name: str) -> str:
    return (files("longcat_pd.tiny") / name).read_text(encoding="utf-8")
