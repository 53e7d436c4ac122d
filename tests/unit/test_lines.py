"""The file of ``longcat-pd infer --input``."""

from __future__ import annotations

from pathlib import Path

from longcat_pd.standalone.lines import read_lines


def test_lines_are_numbered_as_in_the_file_and_a_mark_of_its_encoding_is_none_of_it(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n{"b": 2}')
    assert read_lines(str(file)) == [(1, b'{"a": 1}'), (3, b'{"b": 2}')]
