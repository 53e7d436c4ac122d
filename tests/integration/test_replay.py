"""What a running engine recorded comes out the same on other layouts, and what was changed is told of where it is."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.cli import main
from longcat_pd.config import resolve
from longcat_pd.server.bundle import ids_digest
from tests.forks import start_server
from tests.parity.conftest import MakeCheckpoint
from tests.topology import cluster_file, pools

DRAWN = {
    "temperature": 0.9,
    "top_p": 0.95,
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": -0.2,
    "logit_bias": {"30": 1.5},
    "max_tokens": 24,
    "n": 2,
}
PROMPT = [*range(100, 137), 2, *range(300, 340)]
NARROW = {str(token): 30 for token in range(30, 36)}  # few ids, so that it counts how often each was said
OTHER_LAYOUT = (
    "prefill.parallel.pp_size=2",
    "prefill.parallel.cp_size=2",
    "decode.parallel.kvp_size=2",
    "decode.parallel.attn_tp_size=2",
    "engine.block_size=4",
)

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "sizes": {"type": "array", "items": {"type": "integer"}}},
    "required": ["name", "sizes"],
}
BOUND = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}

Altered = Callable[[dict[str, Any]], None]


async def _record(model: Path, folder: Path, dir: Path) -> list[int]:
    """Ask P(cp 2) -> D(kvp 1), with drafts; what the client was told of choice 1."""
    settings: dict[str, Any] = {"prefill": {"cp_size": 2}, "record": {"dir": str(dir), "texts": True}}
    drafts = {"num_draft_tokens": 2}
    path = cluster_file(folder, model, prefill_engine=drafts, decode_engine=drafts, **settings)
    async with pools(resolve.load(path, ["model.dtype=float32"])) as topology:
        body = {"prompt": PROMPT, "return_token_ids": True, "ignore_eos": True, **DRAWN}
        headers = {"X-Request-Id": "told"}
        answer = await topology.client.post("/v1/completions", json=body, headers=headers, timeout=300.0)
        assert answer.status_code == 200, answer.text
        one = {**body, "n": 1, "logit_bias": {}}
        for name, fields in (
            ("bound", {"response_format": BOUND, "ignore_eos": False}),
            ("narrow", {"logit_bias": NARROW, "frequency_penalty": 1.5}),
        ):
            other = await topology.client.post("/v1/completions", json={**one, **fields}, headers={"X-Request-Id": name})
            assert other.status_code == 200, other.text
        await topology.idle_within()
    ids: list[int] = answer.json()["choices"][1]["token_ids"]
    return ids


@pytest.fixture(scope="module")
def recorded(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of a choice that was drawn with a seed of the server's."""
    folder = tmp_path_factory.mktemp("cluster")
    told = asyncio.run(_record(tiny("2.0", with_tokenizer=True), folder, folder / "bundles"))
    files = sorted(file for file in (folder / "bundles").iterdir() if "told" in file.name)
    assert len(files) == 2, "one for each choice, of the instance that decodes"
    file = next(file for file in files if "told-1-" in file.name)
    tree = json.loads(file.read_bytes())
    assert tree["answer_token_ids"] == told
    assert tree["prompt_token_ids"] == PROMPT
    assert [(one["name"], one["num_draft_tokens"]) for one in tree["instances"]] == [("p0", 2), ("d0", 2)]
    assert tree["instances"][0]["parallel"] == {"cp_size": 2}
    return file


@pytest.fixture
def replayed(recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*words: str, change: Altered = lambda tree: None, file: Path = recorded) -> tuple[int, str]:
        start_server()
        tree = json.loads(file.read_bytes())
        change(tree)
        path = tmp_path / "bundle.json"
        path.write_text(json.dumps(tree))
        status = main(["replay", str(path), *(("--layout", *words) if words else ())])
        return status, capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    "words", [(), OTHER_LAYOUT, ("engine.num_draft_tokens=0",)], ids=["one rank", "pools", "no drafts"]
)
def test_another_layout_says_the_same(replayed: Callable[..., tuple[int, str]], words: tuple[str, ...]) -> None:
    status, out = replayed(*words)
    assert (status, out.splitlines()[-1]) == (0, "identical: 24 ids"), out
    assert "changed" not in out


def test_a_layout_is_a_file(replayed: Callable[..., tuple[int, str]], recorded: Path, tmp_path: Path) -> None:
    """With a checkpoint, ports, sizes and drafts of its own, of which those of the bundle are taken."""
    file = cluster_file(tmp_path, Path("/nowhere"), prefill={"pp_size": 2}, decode={"kvp_size": 2, "attn_tp_size": 2})
    status, out = replayed(str(file), "engine.block_size=8")
    assert (status, out.splitlines()[-1]) == (0, "identical: 24 ids"), out
    assert f"replayed  prefill and decode: {file} engine.block_size=8" in out


@pytest.mark.parametrize("words", [(), OTHER_LAYOUT], ids=["one rank", "pools"])
def test_an_answer_that_another_instance_began(
    replayed: Callable[..., tuple[int, str]], recorded: Path, words: tuple[str, ...]
) -> None:
    """What the instance keeps that an answer was handed to: ids that were said before stand at the end of its prompt."""

    def change(tree: dict[str, Any]) -> None:
        said, answer = tree["answer_token_ids"][:9], tree["answer_token_ids"][9:]
        tree["prompt_token_ids"] += said
        tree["answer_token_ids"] = answer
        tree["sampling"] |= {"num_said": 9, "max_tokens": 24 - 9}
        tree["ids_digest"] = ids_digest(tree["prompt_token_ids"], answer)

    (file,) = recorded.parent.glob("*narrow*")
    status, out = replayed(*words, change=change, file=file)
    assert (status, out.splitlines()[-1]) == (0, "identical: 15 ids"), out
    assert "9 of them said before" in out


@pytest.mark.parametrize("words", [(), OTHER_LAYOUT], ids=["one rank", "pools"])
def test_an_answer_bound_to_a_grammar(
    replayed: Callable[..., tuple[int, str]], recorded: Path, words: tuple[str, ...]
) -> None:
    (file,) = recorded.parent.glob("*bound*")
    tree = json.loads(file.read_bytes())
    assert tree["has_grammar"] and tree["texts"]["grammar"]
    status, out = replayed(*words, file=file)
    assert (status, out.splitlines()[-1]) == (0, f"identical: {len(tree['answer_token_ids'])} ids"), out


def test_a_changed_id_of_the_answer_is_found_where_it_is(replayed: Callable[..., tuple[int, str]], recorded: Path) -> None:
    right = json.loads(recorded.read_bytes())["answer_token_ids"][13]

    def change(tree: dict[str, Any]) -> None:
        tree["answer_token_ids"][13] = right ^ 1

    status, out = replayed(change=change)
    assert status == 1
    assert "different at position 13 of 24" in out
    assert re.search(rf"recorded  {right ^ 1}\b.*\n  replayed  {right}\b.*, log-prob -", out), out
    assert "note      ids of this file have been changed since it was recorded" in out


def test_a_changed_prompt_is_told_of(replayed: Callable[..., tuple[int, str]]) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["prompt_token_ids"][-1] ^= 1

    status, out = replayed(change=change)
    assert status == 1
    assert "different at position " in out
    assert "ids of this file have been changed" in out
