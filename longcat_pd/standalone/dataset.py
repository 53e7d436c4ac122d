"""Prompts of an offline run: a few of our own, or a file of JSON lines with ``context`` and ``input``, as token ids.

Owns how a prompt is cut. Knows no engine.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path

from longcat_pd.config.offline_file import DEFAULT_DATASET, DataPart
from longcat_pd.errors import ConfigError, InvalidRequest
from longcat_pd.server.text import TextProcessor

BUILT_IN = (
    "Explain in three sentences why the sky is blue in the daytime and red in the evening.",
    "请用三句话介绍杭州西湖，并推荐一个适合散步的季节。",
    "Write a Python function that returns the n-th Fibonacci number without recursion, with a docstring.",
    "A train leaves at 9:40 and arrives at 13:05. How long does it travel? Show the steps.",
    "List five questions that a doctor might ask a patient who sleeps badly.",
    "把下面这句话翻译成英文：路遥知马力，日久见人心。",
    "Summarise the plot of Romeo and Juliet for a ten-year-old child.",
    "What is the difference between latency and throughput? Give an everyday example of each.",
)


def prompts(data: DataPart, batch_size: int, text: TextProcessor) -> list[tuple[int, ...]]:
    """Token ids of every prompt, through the chat template and cut to ``input_truncated_len``; at least ``batch_size``.

    Of our own there are exactly so many, of a file all lines; both are repeated to fill a batch. Raises ConfigError.
    """
    texts = BUILT_IN if data.dataset == DEFAULT_DATASET else _lines(Path(data.dataset))
    count = batch_size if data.dataset == DEFAULT_DATASET else max(batch_size, len(texts))
    try:
        encoded = [text.encode_chat([{"role": "user", "content": item}], (), {}) for item in texts[:count]]
    except InvalidRequest as error:
        raise ConfigError(f"model_config.model_path: {error.message}", param="model_config.model_path") from error
    return [truncated(ids, data.input_truncated_len) for ids in islice(cycle(encoded), count)]


def truncated(ids: Sequence[int], limit: int) -> tuple[int, ...]:
    """At most ``limit`` ids: where there are more the middle goes, since a question stands at the end of its context and
    the template's last words open the answer."""
    if len(ids) <= limit:
        return tuple(ids)
    head = limit // 2
    return (*ids[:head], *ids[len(ids) - (limit - head) :])


def _lines(file: Path) -> list[str]:
    key = "data_config.dataset"
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")  # other ends of lines may stand in a text
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{key}={file}: cannot be read: {error}", param=key) from error
    texts = [_text(line, f"{key}={file}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not texts:
        raise ConfigError(f"{key}={file}: holds no prompt", param=key)
    return texts


def _text(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not JSON", param="data_config.dataset") from error
    parts = [record.get(name, "") for name in ("context", "input")] if isinstance(record, dict) else [None]
    if not all(isinstance(part, str) for part in parts) or not any(parts):
        raise ConfigError(
            f"{where}: must be an object with one of the texts context and input, or both", param="data_config.dataset"
        )
    text = "\n\n".join(part for part in parts if part)
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{where}: has half of a surrogate pair, which is no text", param="data_config.dataset")
    return text
