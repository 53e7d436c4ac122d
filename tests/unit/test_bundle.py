"""The file of a recorded request: what is written is read again; what is damaged is refused by its field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.config.checks import MOST_BUNDLE_BYTES
from longcat_pd.engine.request import SamplingParams
from longcat_pd.errors import ConfigError
from longcat_pd.server.bundle import (
    Bundle,
    Ending,
    RecordedInstance,
    RecordedModel,
    Texts,
    Versions,
    ids_digest,
    read_bundle,
)

PROMPT, ANSWER = (5, 6, 7), (9, 8, 2)


def bundle(prompt: tuple[int, ...] = PROMPT, answer: tuple[int, ...] = ANSWER, **changes: Any) -> Bundle:
    instance = RecordedInstance(
        name="d0", role="decode", device="cpu", version="0.1.0", block_size=16, num_draft_tokens=0,
        parallel={"kvp_size": 2}, layers_per_stage=(3,),
    )  # fmt: skip
    values: dict[str, Any] = {
        "schema": 1,
        "request_id": "r",
        "recorded_at": "2026-01-01T00:00:00.000+00:00",
        "recorded_by": "d0",
        "attempt": 1,
        "transfer_id": None,
        "model": RecordedModel(path="/m", digest="d", tokenizer_digest="t", dtype="float32", weights="checkpoint"),
        "versions": Versions(package="0.1.0", torch="2", wire=4),
        "instances": (instance,),
        "sampling": SamplingParams(temperature=0.5, seed=-(2**63), logit_bias=((3, -1.5),), stop_token_ids=(4,)),
        "has_grammar": False,
        "prompt_token_ids": prompt,
        "answer_token_ids": answer,
        "ids_digest": ids_digest(prompt, answer),
        "ending": Ending(outcome="finished", hop="decoding", finish="length", engine_finish="length"),
    }
    return Bundle(**(values | changes))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    for one in (
        bundle(),
        bundle(answer=(), ending=Ending(outcome="failed", hop="queued", code="overloaded")),
        bundle(logprobs=(-0.5, None, -1.0), timings_ms={"total": 3.5}, texts=Texts(prompt="α\n", answer="", grammar="g")),
    ):
        path.write_bytes(one.encoded())
        assert read_bundle(str(path)) == one
        assert one.is_as_recorded


@pytest.mark.parametrize("changes", [{"prompt_token_ids": (5, 6, 8)}, {"answer_token_ids": (9, 8, 3)}])
def test_changed_ids_are_known(changes: dict[str, Any]) -> None:
    assert not replace(bundle(), **changes).is_as_recorded
    moved = replace(bundle(), prompt_token_ids=(5, 6), answer_token_ids=(7, 9, 8, 2))
    assert not moved.is_as_recorded, "the border between both counts"


def _set(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(tree: Any) -> None:
        for key in keys[:-1]:
            tree = tree[key]
        tree[keys[-1]] = to

    return change


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_set("schema", to=2), "schema=2: this version reads 1"),
        (_set("schema", to="1"), "Expected `int`, got `str` - at `$.schema`"),
        (lambda tree: tree.pop("schema"), "missing required field `schema`"),
        (lambda tree: tree.pop("sampling"), "missing required field `sampling`"),
        (_set("prompt_token_ids", 1, to="6"), "Expected `int`, got `str` - at `$.prompt_token_ids[1]`"),
        (_set("prompt_token_ids", to=None), "at `$.prompt_token_ids`"),
        (_set("prompt_token_ids", 1, to=-1), "prompt_token_ids[1]=-1: must be 0 ... 2147483647"),
        (_set("answer_token_ids", 2, to=2**31), "answer_token_ids[2]=2147483648: must be"),
        (_set("answer_token_ids", 2, to=10**30), "answer_token_ids[2]"),
        (_set("prompt_token_ids", to=[]), "sampling.num_said=0: 0 prompt_token_ids are too few"),
        (_set("sampling", "num_said", to=3), "sampling.num_said=3: 3 prompt_token_ids are too few"),
        (_set("sampling", "max_tokens", to=2), "answer_token_ids has 3 ids: sampling.max_tokens=2"),
        (_set("sampling", "temperature", to=9), "sampling.temperature = 9.0 is outside 0 ... 2"),
        (_set("sampling", "logit_bias", to=[[1]]), "at `$.sampling.logit_bias[0]`"),
        (_set("ending", "outcome", to="lost"), "at `$.ending.outcome`"),
        (_set("logprobs", to=[-1.0]), "logprobs has 1 numbers, answer_token_ids 3 ids"),
    ],
)
def test_a_damaged_field_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str) -> None:
    tree = json.loads(bundle().encoded())
    change(tree)
    path = tmp_path / "b.json"
    path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError) as error:
        read_bundle(str(path))
    assert error.value.message.startswith(f"{path}: ")
    assert named in error.value.message


def test_every_cut_is_refused(tmp_path: Path) -> None:
    path, whole = tmp_path / "b.json", bundle().encoded().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match="is no bundle, or a damaged one"):
            read_bundle(str(path))


def test_what_is_no_file_or_far_too_long_is_refused(tmp_path: Path) -> None:
    huge = tmp_path / "huge.json"
    with huge.open("wb") as file:
        file.truncate(MOST_BUNDLE_BYTES + 1)
    deep = tmp_path / "deep.json"
    deep.write_text('{"schema":1,"texts":' + "[" * 100_000)
    for path, reason in (
        (huge, "is longer than"),
        (deep, "damaged"),
        (tmp_path, "cannot be read"),
        (tmp_path / "no", "No such"),
    ):
        with pytest.raises(ConfigError, match=reason):
            read_bundle(str(path))
