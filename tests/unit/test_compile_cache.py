"""engine/compile_cache.py: which stored graphs may be used, what is said of the others, and nothing half-written."""

from __future__ import annotations

import io
import tempfile
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
from longcat_pd.errors import ConfigError

FACTS = {"code": "c0", "dtype": "float32", "layout": "one", "torch": "2.13", "tensors": "int64(1,)(1,)"}


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    out = io.StringIO()
    log.set_up(stream=out)
    yield out
    structlog.reset_defaults()


def entry_of(folder: Path, **facts: str) -> CacheEntry:
    return CacheEntry(folder, "m-rank0-seqs8", {**FACTS, **facts})


def put(entry: CacheEntry, content: bytes = b"graph") -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "kernels").mkdir()
        (Path(name) / "kernels" / "k.so").write_bytes(content[::-1])
        (Path(name) / "graph").write_bytes(content)
        entry.pack(Path(name))


def got(entry: CacheEntry) -> bytes | None:
    """The graph, where there is one that may be used; its other part has come too."""
    with tempfile.TemporaryDirectory() as name:
        if not entry.unpack(Path(name)):
            return None
        graph = (Path(name) / "graph").read_bytes()
        assert (Path(name) / "kernels" / "k.so").read_bytes() == graph[::-1]
        return graph


def said(lines: io.StringIO) -> list[str]:
    return [line.split(" ", 2)[2] for line in lines.getvalue().splitlines()]


def test_what_was_packed_under_these_facts_may_be_used(tmp_path: Path, lines: io.StringIO) -> None:
    entry = entry_of(tmp_path)
    assert got(entry) is None
    put(entry)
    assert got(entry) == got(entry_of(tmp_path)) == b"graph"
    assert said(lines) == [], "nothing is stale in an empty folder"
    assert [f.name for f in tmp_path.iterdir()] == ["m-rank0-seqs8.graph"]


@pytest.mark.parametrize("name", sorted(FACTS))
def test_every_fact_counts_and_is_named_in_one_line(tmp_path: Path, lines: io.StringIO, name: str) -> None:
    put(entry_of(tmp_path))
    assert got(entry_of(tmp_path, **{name: "another"})) is None
    assert said(lines) == [f'compile_cache_stale graph=m-rank0-seqs8 reason="changed: {name}"']


def test_facts_that_come_and_go_count_too(tmp_path: Path, lines: io.StringIO) -> None:
    put(entry_of(tmp_path))
    assert got(entry_of(tmp_path, options="new")) is None
    entry = entry_of(tmp_path)
    fewer = replace(entry, facts={name: value for name, value in FACTS.items() if name not in ("dtype", "torch")})
    assert got(fewer) is None
    reasons = [line.split("reason=")[1] for line in said(lines)]
    assert reasons == ['"changed: options"', '"changed: dtype, torch"']


def test_a_stale_graph_is_replaced(tmp_path: Path, lines: io.StringIO) -> None:
    put(entry_of(tmp_path))
    put(entry_of(tmp_path, code="c1"), b"another")
    assert got(entry_of(tmp_path, code="c1")) == b"another"
    assert got(entry_of(tmp_path)) is None


def test_damaged_bytes(tmp_path: Path, lines: io.StringIO) -> None:
    """Wherever one byte is wrong or the file ends."""
    put(entry_of(tmp_path))
    whole = entry_of(tmp_path).path.read_bytes()
    for place in range(0, len(whole), 3):
        entry_of(tmp_path).path.write_bytes(whole[:place] + bytes([whole[place] ^ 0x5A]) + whole[place + 1 :])
        assert got(entry_of(tmp_path)) is None, place
        entry_of(tmp_path).path.write_bytes(whole[:place])
        assert got(entry_of(tmp_path)) is None, place
    (reason,) = {line.split("reason=")[1] for line in said(lines)}
    assert reason == '"its bytes are not those that were written"'


class Killed(BaseException):
    pass


def test_a_writer_that_dies_leaves_nothing_that_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(entry_of(tmp_path, code="old"), b"old")

    def dying(_self: Path, _target: Path) -> Path:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", dying)
        with pytest.raises(Killed):
            put(entry_of(tmp_path), b"new")
    assert got(entry_of(tmp_path, code="old")) == b"old"
    put(entry_of(tmp_path), b"new")
    assert got(entry_of(tmp_path)) == b"new"


def test_a_full_disk_is_a_refusal_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_self: Path, _target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(ConfigError, match=r"engine\.compile_cache=.*: No space left on device"):
        put(entry_of(tmp_path))
    assert not list(tmp_path.iterdir())


def test_two_writers_at_once_leave_one_whole_graph(tmp_path: Path, lines: io.StringIO) -> None:
    """Whoever is last counts, and a reader never takes a part of one with a part of the other."""
    contents = [bytes([number]) * 20000 for number in range(2)]
    start = threading.Barrier(3)

    def write(number: int) -> None:
        start.wait()
        for _ in range(30):
            put(entry_of(tmp_path), contents[number])

    writers = [threading.Thread(target=write, args=(number,)) for number in range(2)]
    for writer in writers:
        writer.start()
    start.wait()
    while any(writer.is_alive() for writer in writers):
        assert got(entry_of(tmp_path)) in (None, *contents)
    for writer in writers:
        writer.join()
    assert got(entry_of(tmp_path)) in contents and said(lines) == []
    assert [f.name for f in tmp_path.iterdir()] == ["m-rank0-seqs8.graph"]


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


def test_what_is_stale_is_what_has_the_very_name(tmp_path: Path, lines: io.StringIO) -> None:
    """Whatever characters a name has: folders of other graphs stay."""
    own = CacheEntry(tmp_path, "m[0-9]*-rank0", FACTS)
    others = [CacheEntry(tmp_path, name, FACTS).own_folder() for name in ("m5-rank0", "m55-rank0", "m[0-9]*-rank00")]
    first = own.own_folder()
    second = replace(own, facts={**FACTS, "code": "c1"}).own_folder()
    assert sorted(tmp_path.iterdir()) == sorted([*others, second]) and first != second
