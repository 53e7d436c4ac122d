"""A small byte-level BPE with LongCat's special tokens, trained on the package's own text.

Owns ``tokenizer.json``, ``tokenizer_config.json`` and the choice of chat template. The alphabet has all 256 bytes, so any
text can be encoded; the merges come from ``corpus.txt``, or from given texts, and are the same on every machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
SPACE = "Ġ"  # the character by which a byte-level vocabulary writes the space


def text_files(variant: str, *, vocab_size: int, max_length: int, texts: Iterable[str] | None = None) -> dict[str, str]:
    """The tokenizer's files of a checkpoint, file name -> text. ``texts``: see ``train_for_copies``; without, ``train``."""
    template = "chat_template_rounds.jinja" if variant == "chat" else "chat_template_roles.jinja"
    tokenizer = train(vocab_size) if texts is None else train_for_copies(vocab_size, list(texts))
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
        "tokenizer.json": tokenizer.to_str(pretty=True) + "\n",
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2) + "\n",
        "chat_template.jinja": _read(template),
    }


def train(vocab_size: int) -> Tokenizer:
    """Special tokens, the 256 bytes, then merges of ``corpus.txt`` up to ``vocab_size`` ids (or as many as it has)."""
    _check_room(vocab_size)
    return _trained(_read("corpus.txt").splitlines(keepends=True), vocab_size, _by_bytes())


def train_for_copies(vocab_size: int, texts: Sequence[str], *, share_behind_space: float = 0.28) -> Tokenizer:
    """A tokenizer of these texts for a model that has to say again what it read, digits and words.

    Each digit is a token of its own, and a word is cut alike with a space before it and without, but for the first piece,
    which may have the space in it: such pieces are this share of the ids. A BPE that learns spaces like letters has
    " dining" as " d", "in", "ing" and "dining" as "d", "ining", and who copies has to know each word.
    """
    num_behind_space = int(vocab_size * share_behind_space)
    _check_room(vocab_size, num_behind_space)
    digits, by_bytes = pre_tokenizers.Digits(individual_digits=True), _by_bytes()
    apart = pre_tokenizers.Sequence([digits, pre_tokenizers.Split(" ", "isolated"), by_bytes])
    tokenizer = _trained(texts, vocab_size - num_behind_space, apart)
    in_use = pre_tokenizers.Sequence([digits, by_bytes])
    firsts = Counter[str]()
    for text in texts:
        for word, _ in in_use.pre_tokenize_str(text):
            if len(word) > 1 and word.startswith(SPACE) and not word.startswith(SPACE * 2):
                firsts[tokenizer.model.tokenize(word[1:])[0].value] += 1
    grown = json.loads(tokenizer.to_str())
    for piece, _ in firsts.most_common(num_behind_space):
        grown["model"]["vocab"][SPACE + piece] = len(grown["model"]["vocab"])
        grown["model"]["merges"].append([SPACE, piece])  # the last: all within the word comes before
    tokenizer = Tokenizer.from_str(json.dumps(grown))
    tokenizer.pre_tokenizer = in_use
    return tokenizer


def spaced_pieces(tokenizer: Tokenizer) -> Mapping[int, int]:
    """Of each piece with a space before it: its id -> the id of the same piece without."""
    ids = tokenizer.get_vocab()
    return {ids[piece]: ids[piece[1:]] for piece in sorted(ids) if piece.startswith(SPACE) and piece[1:] in ids}


def _by_bytes() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _check_room(vocab_size: int, num_more: int = 0) -> None:
    if vocab_size - num_more < len(SPECIAL_TOKENS) + 256:
        raise ConfigError(f"vocab_size {vocab_size} has no room for a tokenizer; use --no-tokenizer", param="vocab_size")


def _trained(texts: Iterable[str], vocab_size: int, pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _read(name: str) -> str:
    return (files("longcat_pd.tiny") / name).read_text(encoding="utf-8")
