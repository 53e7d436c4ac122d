"""engine/compile_cache.py: which stored graphs may be used, what is said of the others, and nothing half-written."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import structlog

import longcat_pd
from longcat_pd import log
from longcat_pd.engine import compile_cache
from longcat_pd.engine.compile_cache import CacheEntry, code_digest, short_digest

FACTS = {"code": "c0", "dtype": "float32", "layout": "one", "torch": "2.13", "tensors": "int64(1,)(1,)"}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    out = io.StringIO()
    log.set_up(stream=out)
    yield out
    structlog.reset_defaults()


def entry_of(folder: Path, **facts: str) -> CacheEntry:
    return CacheEntry(folder, "m-rank0-seqs8", {**FACTS, **facts})


def put(entry: CacheEntry, content: bytes = b"graph", made: str = "x.part") -> None:
    (entry.folder / made).write_bytes(content)
    entry.commit(entry.folder / made)


def said(lines: io.StringIO) -> list[str]:
    return [line.split(" ", 2)[2] for line in lines.getvalue().splitlines()]


def test_what_was_committed_under_these_facts_is_fresh(tmp_path: Path, lines: io.StringIO) -> None:
    entry = entry_of(tmp_path)
    assert not entry.is_fresh()
    put(entry)
    assert entry.is_fresh() and entry.artifact.read_bytes() == b"graph"
    assert entry_of(tmp_path).is_fresh()
    assert said(lines) == [], "nothing is stale in an empty folder"
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m-rank0-seqs8.graph", "m-rank0-seqs8.json"]


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_fact_counts_and_is_named_in_one_line(tmp_path: Path, lines: io.StringIO, name: str) -> None:
    put(entry_of(tmp_path))
    assert not entry_of(tmp_path, **{name: "another"}).is_fresh()
    assert said(lines) == [f'compile_cache_stale graph=m-rank0-seqs8 reason="changed: {name}"']


def test_facts_that_come_and_go_count_too(tmp_path: Path, lines: io.StringIO) -> None:
    put(entry_of(tmp_path))
    assert not entry_of(tmp_path, options="new").is_fresh()
    entry = entry_of(tmp_path)
    fewer = replace(entry, facts={name: value for name, value in FACTS.items() if name not in ("dtype", "torch")})
    assert not fewer.is_fresh()
    reasons = [line.split("reason=")[1] for line in said(lines)]
    assert reasons == ['"changed: options"', '"changed: dtype, torch"']


def test_a_stale_graph_is_replaced(tmp_path: Path, lines: io.StringIO) -> None:
    put(entry_of(tmp_path))
    put(entry_of(tmp_path, code="c1"), b"another")
    assert entry_of(tmp_path, code="c1").is_fresh() and entry_of(tmp_path).artifact.read_bytes() == b"another"
    assert not entry_of(tmp_path).is_fresh()


@pytest.mark.parametrize("record", ["", "{", "[]", "7", "null", "{}", '{"facts": {}}', '{"facts": [], "sha256": ""}'])
def test_a_damaged_record(tmp_path: Path, lines: io.StringIO, record: str) -> None:
    put(entry_of(tmp_path))
    (tmp_path / "m-rank0-seqs8.json").write_text(record)
    assert not entry_of(tmp_path).is_fresh()
    (line,) = said(lines)
    assert line == 'compile_cache_stale graph=m-rank0-seqs8 reason="its record is damaged"'


def test_a_record_that_is_no_text(tmp_path: Path, lines: io.StringIO) -> None:
    put(entry_of(tmp_path))
    (tmp_path / "m-rank0-seqs8.json").write_bytes(b"\xff\xfe\x00")
    assert not entry_of(tmp_path).is_fresh()
    assert "record is damaged" in said(lines)[0]


@pytest.mark.parametrize("content", [b"", b"grap", b"grapH", b"graph!"])
def test_damaged_bytes(tmp_path: Path, lines: io.StringIO, content: bytes) -> None:
    put(entry_of(tmp_path))
    entry_of(tmp_path).artifact.write_bytes(content)
    assert not entry_of(tmp_path).is_fresh()
    assert said(lines) == ['compile_cache_stale graph=m-rank0-seqs8 reason="its bytes are not those that were written"']


@pytest.mark.parametrize("suffix", ["graph", "json"])
def test_a_missing_file_is_no_graph(tmp_path: Path, suffix: str) -> None:
    put(entry_of(tmp_path))
    (tmp_path / f"m-rank0-seqs8.{suffix}").unlink()
    assert not entry_of(tmp_path).is_fresh()
    put(entry_of(tmp_path))
    assert entry_of(tmp_path).is_fresh()


class Killed(BaseException):
    pass


@pytest.mark.parametrize("survived", [0, 1])
def test_a_writer_that_dies_leaves_nothing_that_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: io.StringIO, survived: int
) -> None:
    """It dies before one of the two renames: what is there is the old graph, whole, or none that may be used."""
    put(entry_of(tmp_path, code="old"), b"old")
    rename, done = Path.replace, list[Path]()

    def dying(self: Path, target: Path) -> Path:
        if len(done) == survived:
            raise Killed
        done.append(self)
        return rename(self, target)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dying)
        with pytest.raises(Killed):
            put(entry_of(tmp_path), b"new")
    assert not entry_of(tmp_path).is_fresh()
    assert entry_of(tmp_path, code="old").is_fresh() == (survived == 0)
    put(entry_of(tmp_path), b"new")
    assert entry_of(tmp_path).is_fresh()


def test_two_writers_at_once_leave_one_whole_graph(tmp_path: Path, lines: io.StringIO) -> None:
    """Whoever is last counts, and a reader never takes one's bytes with the other's word for them."""
    contents = [bytes([number]) * 20000 for number in range(2)]
    start, ends = threading.Barrier(3), list[bool]()

    def write(number: int) -> None:
        start.wait()
        for turn in range(60):
            put(entry_of(tmp_path), contents[number], f"{number}.{turn}.part")

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    start.wait()
    while any(writer.is_alive() for writer in writers):
        ends.append(entry_of(tmp_path).is_fresh())
        if entry_of(tmp_path).artifact.exists():
            assert entry_of(tmp_path).artifact.read_bytes() in contents, "a graph is replaced whole"
    for writer in writers:
        writer.join()
    put(entry_of(tmp_path))
    assert entry_of(tmp_path).is_fresh()
    assert sorted(f.name for f in tmp_path.iterdir()) == ["m-rank0-seqs8.graph", "m-rank0-seqs8.json"]


def test_the_record_says_under_which_facts(tmp_path: Path) -> None:
    put(entry_of(tmp_path))
    assert json.loads((tmp_path / "m-rank0-seqs8.json").read_text())["facts"] == FACTS


def test_the_digest_of_the_code_follows_every_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "package"
    (root / "sub").mkdir(parents=True)
    (root / "__init__.py").write_text("")
    (root / "sub" / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(longcat_pd, "__file__", str(root / "__init__.py"))
    seen = [code_digest()]
    (root / "notes.txt").write_text("no code")
    assert code_digest() == seen[0]
    for change in (
        lambda: (root / "sub" / "a.py").write_text("x = 2\n"),
        lambda: (root / "sub" / "b.py").write_text(""),
        lambda: (root / "sub" / "b.py").rename(root / "b.py"),
        lambda: (root / "b.py").unlink(),
    ):
        change()
        seen.append(code_digest())
    assert len({*seen}) == len(seen) - 1 and seen[-1] == seen[1], "what was undone is as before"


def test_a_short_digest_tells_facts_apart() -> None:
    assert short_digest(FACTS) == short_digest(dict(reversed(FACTS.items())))
    assert short_digest(FACTS) != short_digest({**FACTS, "code": "c1"})
    assert compile_cache.short_digest({"a": "b", "c": "d"}) != short_digest({"a": "b, c: d"})
