"""Where two answers part, what a replay is refused for, and what it asks of an engine; with an engine on a script."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.clock import MonotonicClock
from longcat_pd.engine.request import Delta, FinishReason, Request, SamplingParams, TokenOutput
from longcat_pd.errors import ConfigError
from longcat_pd.replay.command import main
from longcat_pd.replay.compare import Comparison, Difference, Replayed
from longcat_pd.replay.layouts import Layout
from longcat_pd.server.bundle import Bundle, Ending, Texts
from longcat_pd.tiny.make import write_tiny
from tests.unit.test_bundle import ANSWER, PROMPT, bundle

SAMPLING = SamplingParams(temperature=0.5, seed=7, max_tokens=8, min_tokens=6, num_said=1)
STOPPED_BY_TEXT = Ending(outcome="finished", hop="decoding", finish="stop")
BROKEN = Ending(outcome="failed", hop="decoding", code="rank_lost")


class Scripted:
    """Says these ids, two at a time. ``asked``: the requests; ``num_said``: ids that were taken from it."""

    def __init__(self, ids: tuple[int, ...], finish: FinishReason = FinishReason.LENGTH) -> None:
        self.ids, self.finish = ids, finish
        self.asked: list[Request] = []
        self.num_said = 0

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        for start in range(0, len(self.ids), 2):
            part = self.ids[start : start + 2]
            self.num_said += len(part)
            is_last = start + 2 >= len(self.ids)
            tokens = tuple(TokenOutput(i, -0.25, ((i, -0.25), (i + 1, -0.5))) for i in part)
            yield Delta(tokens, self.finish if is_last else None)


async def compared(recorded: Bundle, ids: tuple[int, ...]) -> tuple[Difference | None, Replayed, Scripted]:
    engine = Scripted(ids)
    comparison = Comparison(recorded, engine, MonotonicClock())
    replayed = await comparison.replay()
    return comparison.difference(replayed), replayed, engine


@pytest.mark.parametrize(
    ("ids", "parts"),
    [
        (ANSWER, None),
        ((*ANSWER[:2], 1), (2, ANSWER[2], 1)),
        ((1, *ANSWER[1:]), (0, ANSWER[0], 1)),
        (ANSWER[:2], (2, ANSWER[2], None)),
        ((*ANSWER, 1, 3), (3, None, 1)),
    ],
)
async def test_the_first_difference_is_found(
    ids: tuple[int, ...], parts: tuple[int, int | None, int | None] | None
) -> None:
    found, _, engine = await compared(bundle(sampling=SAMPLING), ids)
    assert found == (None if parts is None else Difference(position=parts[0], recorded=parts[1], replayed=parts[2]))
    (asked,) = engine.asked
    assert (asked.prompt_token_ids, asked.sampling) == (PROMPT, SAMPLING)


async def test_nobody_waits_for_what_cannot_matter() -> None:
    """Behind a difference, and behind an answer that a stop string ended."""
    long = (*ANSWER, *range(100))
    found, _, engine = await compared(bundle(), (1, *long))
    assert (found and found.position, engine.num_said) == (0, 2)
    found, _, engine = await compared(bundle(ending=STOPPED_BY_TEXT), long)
    assert (found, engine.num_said) == (None, 4)
    found, replayed, engine = await compared(bundle(ending=BROKEN), long)
    assert (found, len(replayed.token_ids), replayed.finish) == (None, len(long), "length"), "perhaps it fails again"


async def test_both_ids_are_judged_behind_what_both_have_said() -> None:
    engine = Scripted((41,))
    comparison = Comparison(bundle(sampling=SAMPLING), engine, MonotonicClock())
    judged = await comparison.judged(Difference(position=2, recorded=42, replayed=41))
    assert judged.logprobs == {41: -0.25, 42: -0.5}
    (asked,) = engine.asked
    assert asked.prompt_token_ids == PROMPT + ANSWER[:2]
    assert asked.sampling == replace(SAMPLING, max_tokens=1, min_tokens=1, num_said=3, num_logprobs=20)


async def test_the_grammar_is_that_of_the_texts() -> None:
    _, _, engine = await compared(bundle(has_grammar=True, texts=Texts(prompt="", answer="", grammar="g")), ANSWER)
    assert engine.asked[0].sampling.grammar == "g"


@pytest.mark.parametrize(
    ("words", "has_pools"),
    [
        ([], False),
        (["parallel.attn_tp_size=2", "engine.block_size=4"], False),
        (["prefill.parallel.cp_size=2"], True),
        (["decode.parallel.kvp_size=2"], True),
        (["deploy/config/cluster/local-cpu.yaml"], True),
    ],
)
def test_words_say_which_layout(words: list[str], has_pools: bool) -> None:
    assert Layout(bundle(), "/m", words).has_pools == has_pools


@pytest.mark.parametrize("words", [["pp2"], ["a.yaml", "b.yaml"], ["a.json"]])
def test_other_words_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="--layout"):
        Layout(bundle(), "/m", words)


def test_replays_are_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "model")
    write_tiny(Path(model), "chat", dtype="float32", with_tokenizer=False, overrides=("num_layers=1",))
    path = tmp_path / "b.json"

    def refused(*arguments: str, **changes: Any) -> str:
        path.write_bytes(bundle(**changes).encoded())
        assert main([str(path), *arguments]) == 2
        said = capsys.readouterr()
        assert said.out == ""
        return said.err

    assert refused().startswith("error: model.path=/m: no such folder here; --model names another one")
    other = refused("--model", model)
    assert other.startswith("error: model.digest=d was recorded, ") and f"{model} has " in other
    assert "has_grammar=true" in refused("--model", model, has_grammar=True)
    path.write_text("{}")
    assert main([str(path)]) == 2
    assert "missing required field `schema`" in capsys.readouterr().err
