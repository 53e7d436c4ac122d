"""From the trained twin to the folders of a checkpoint: tokenizer first, tensors at the end, and the int8 twin."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from longcat_pd.config.model import ModelConfig
from longcat_pd.errors import ConfigError
from longcat_pd.models.checkpoint import lacking
from longcat_pd.models.tensor_names import draft_tensors, expected_tensors
from longcat_pd.models.weights import write_checkpoint
from longcat_pd.quantize import quantize
from longcat_pd.server.text import ChatTemplate, TextProcessor
from longcat_pd.tiny import tokenizer
from longcat_pd.tiny.configs import GENERATION_CONFIG
from tools.tiny.corpus import corpus
from tools.tiny.recipe import CONFIG
from tools.tiny.twin import Twin

TIMES_OF_TEMPLATE = 300
TEXTS = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def text_files(folder: Path, *, seed: int) -> TextProcessor:
    """Makes the tokenizer in ``folder``, unless it is there, and loads it."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {"vocab_size": CONFIG["vocab_size"], "max_length": CONFIG["max_position_embeddings"]}
        texts = [*corpus(seed), *_template_texts() * TIMES_OF_TEMPLATE]
        files = tokenizer.text_files("2.0", **sizes, texts=texts)
        for name, text in [*files.items(), ("config.json", json.dumps(CONFIG))]:
            (folder / name).write_text(text, encoding="utf-8")
    return TextProcessor.load(str(folder))


def _template_texts() -> list[str]:
    """What the template itself says before a conversation with tools, without its markers."""
    source = (resources.files("longcat_pd.tiny") / "chat_template_roles.jinja").read_text(encoding="utf-8")
    tools = [{"type": "function", "function": {"name": "get_time", "description": "", "parameters": {}}}]
    return re.split(r"</?longcat_[a-z_]+>", ChatTemplate(source, {}).render([], tools, {}))


def checkpoints(out: Path, twin: Twin, *, text: Path) -> None:
    """Writes ``out/bf16`` and ``out/int8``, unless these very ones are there. Raises ConfigError where others are."""
    bf16, int8, tensors = out / "bf16", out / "int8", in_order(twin.tensors())
    is_there = _has(bf16, tensors)
    if not is_there:
        files = {name: (text / name).read_text(encoding="utf-8") for name in TEXTS}
        files["generation_config.json"] = json.dumps(GENERATION_CONFIG, indent=2) + "\n"
        write_checkpoint(bf16, tensors, CONFIG, files=files)
    if not (is_there and _is_whole(int8)):
        quantize(bf16, int8)


def check_room(out: Path) -> None:
    """Raises ConfigError where a checkpoint is that a training from its first step on could not write."""
    for folder in (out / "bf16", out / "int8"):
        if folder.exists():
            raise ConfigError(f"{folder} exists already, and {out / 'state'} holds no training that it could be of")


def _is_whole(folder: Path) -> bool:
    return folder.is_dir() and not list(lacking(folder, has_draft=True))


def _has(folder: Path, tensors: Sequence[tuple[str, Tensor]]) -> bool:
    """Whether the folder is a checkpoint of these tensors."""
    if not _is_whole(folder):
        return False
    found = load_file(min(folder.glob("*.safetensors")))
    return found.keys() == dict(tensors).keys() and all(torch.equal(found[name], tensor) for name, tensor in tensors)


def in_order(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    """As the releases store them: bf16, the router and the indexer's ``weights_proj`` fp32."""
    config = ModelConfig.from_dict(CONFIG)
    names = [*expected_tensors(config), *draft_tensors(config)]
    return [(name, tensors[name].contiguous() if _is_fp32(name) else tensors[name].to(torch.bfloat16)) for name in names]


def _is_fp32(name: str) -> bool:
    return ".router." in name or name.endswith("weights_proj.weight")
