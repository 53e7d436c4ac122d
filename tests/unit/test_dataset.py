"""Prompts of an offline run: how many, how they are cut, and which files are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from longcat_pd.config.offline_file import DataPart
from longcat_pd.errors import ConfigError
from longcat_pd.server.text import TextProcessor
from longcat_pd.standalone.dataset import BUILT_IN, prompts, truncated
from longcat_pd.tiny.make import write_tiny


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextProcessor:
    path = tmp_path_factory.mktemp("tiny") / "chat"
    write_tiny(path, "chat", overrides=("num_layers=1",))
    return TextProcessor.load(str(path))


def chat(text: TextProcessor, content: str) -> tuple[int, ...]:
    return tuple(text.encode_chat([{"role": "user", "content": content}], (), {}))


@pytest.mark.parametrize("count", [1, len(BUILT_IN), len(BUILT_IN) + 2])
def test_of_our_own_there_are_as_many_as_a_batch_has(text: TextProcessor, count: int) -> None:
    made = prompts(DataPart(input_truncated_len=4096), count, text)
    assert made == [chat(text, BUILT_IN[place % len(BUILT_IN)]) for place in range(count)]


def test_a_file_is_read_whole_and_repeated_to_fill_a_batch(text: TextProcessor, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text('{"context": "long", "input": "what?", "answers": ["x"]}\n\n{"input": "who?"}\n{"context": "only"}\n')
    data = DataPart(dataset=str(file), input_truncated_len=4096)
    all_three = [chat(text, item) for item in ("long\n\nwhat?", "who?", "only")]
    assert prompts(data, 2, text) == all_three
    assert prompts(data, 5, text) == [*all_three, *all_three[:2]]


def test_a_text_may_hold_other_ends_of_lines_and_a_file_a_mark_of_its_order(text: TextProcessor, tmp_path: Path) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_bytes('\ufeff{"input": "a\u2028b\u0085c"}\r\n{"input": "d"}'.encode())
    made = prompts(DataPart(dataset=str(file), input_truncated_len=4096), 1, text)
    assert made == [chat(text, item) for item in ("a\u2028b\u0085c", "d")]


def test_the_middle_is_cut() -> None:
    assert truncated(range(7), 7) == tuple(range(7))
    assert truncated(range(10), 7) == (0, 1, 2, 6, 7, 8, 9)
    assert truncated(range(10), 2) == (0, 9)


def test_every_prompt_is_cut(text: TextProcessor) -> None:
    made = prompts(DataPart(input_truncated_len=9), 2, text)
    assert [len(ids) for ids in made] == [9, 9]
    assert made[0][-5:] == chat(text, BUILT_IN[0])[-5:], "the template's last words open the answer"


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ("", "holds no prompt"),
        ('{"input": "a"}\nnonsense', "line 2: is not JSON"),
        ('{"question": "a"}', "line 1: must be an object with one of the texts context and input"),
        ('{"input": 5}', "line 1: must be an object"),
        ("[1]", "line 1: must be an object"),
        ("[" * 100_000, "line 1: is not JSON"),
        ('{"input": "a \\ud800"}', "line 1: has half of a surrogate pair"),
    ],
)
def test_other_files_are_refused(text: TextProcessor, tmp_path: Path, content: str, told: str) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError) as caught:
        prompts(DataPart(dataset=str(file)), 1, text)
    assert caught.value.message.startswith(f"data_config.dataset={file}")
    assert told in caught.value.message


def test_a_checkpoint_without_a_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        prompts(DataPart(), 1, TextProcessor(100))
