"""Following a grammar token by token: against a language that is written out, and where the library gives up."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable

import numpy as np
import pytest

from longcat_pd.engine import grammar
from longcat_pd.engine.grammar import Mask, Vocabulary, is_allowed
from longcat_pd.errors import ConfigError
from longcat_pd.tiny.tokenizer import train
from tests.language import EOS, Language

TOKENIZER = train(400)
VOCAB = 430
PLACES = ("north", "nort", "n", "", "\u00e4\u4f60", 'a"b\\', "</longcat_think>", "{}")
LANGUAGE = Language(TOKENIZER, [json.dumps({"to": place, "n": n}) for place in PLACES for n in (0, 10, 107, -7)], VOCAB)
WINDOW = 4


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER.to_str(), VOCAB, [EOS])


def ids_of(mask: Mask) -> set[int]:
    return {token for token in range(VOCAB) if is_allowed(mask, token)}


def anything(rows: int) -> Mask:
    return np.full((rows, -(-VOCAB // 32)), 0x0F0F0F0F, dtype=np.int32)


def walked(vocabulary: Vocabulary, draw: random.Random) -> tuple[list[int], list[set[int]]]:
    """An answer, token by token, and what could come at each place."""
    matcher, answer, places = vocabulary.begin(LANGUAGE.grammar), list[int](), list[set[int]]()
    while len(answer) < 60:
        masks = anything(1)
        matcher.fill(masks, [])
        places.append(ids_of(masks[0]))
        answer.append(draw.choice(sorted(places[-1])))
        matcher.advance(answer[-1:])
    assert not matcher.fault
    return answer, places


@pytest.mark.parametrize("seed", range(20))
def test_masks_are_those_of_the_language(vocabulary: Vocabulary, seed: int) -> None:
    """Of bytes that have to come, the tokenizer's own cut may be all that is allowed."""
    answer, places = walked(vocabulary, random.Random(seed))
    for place, found in enumerate(places):
        allowed = LANGUAGE.allowed(answer[:place])
        assert found and found <= allowed
        assert found == allowed or LANGUAGE.is_forced(answer[:place])
    assert EOS in answer and LANGUAGE.is_open(answer)


@pytest.mark.parametrize("seed", range(20))
def test_drafts_change_no_mask(vocabulary: Vocabulary, seed: int) -> None:
    """Drafts that are right for a while or all the time, and runs of every length accepted."""
    draw = random.Random(seed)
    answer, places = walked(vocabulary, random.Random(seed))
    matcher, done = vocabulary.begin(LANGUAGE.grammar), 0
    while done < len(answer) - WINDOW:
        num_right = draw.randint(0, WINDOW - 1)
        drafts = [*answer[done : done + num_right], *(draw.randrange(VOCAB) for _ in range(WINDOW - 1 - num_right))]
        masks = anything(WINDOW)
        matcher.fill(masks, drafts)
        assert [ids_of(mask) for mask in masks[: num_right + 1]] == places[done : done + num_right + 1]
        is_over = EOS in answer[: done + num_right]
        if num_right < WINDOW - 1 and not is_over and drafts[num_right] not in places[done + num_right]:
            assert (masks[num_right + 1 :] == -1).all(), "nobody gets there, so nothing may fail there"
        run = draw.randint(1, WINDOW)
        matcher.advance(answer[done : done + run])
        done += run
    assert not matcher.fault


def test_the_end_stays_the_end(vocabulary: Vocabulary) -> None:
    matcher, masks = vocabulary.begin('start: "a"*'), anything(2)
    matcher.advance([EOS])
    matcher.advance(TOKENIZER.encode("zz").ids)
    matcher.fill(masks, [3])
    assert ids_of(masks[0]) == ids_of(masks[1]) == {EOS} and not matcher.fault


def test_a_token_beyond_the_grammar_is_a_fault(vocabulary: Vocabulary) -> None:
    matcher, masks = vocabulary.begin('start: "ab"'), anything(2)
    matcher.advance(TOKENIZER.encode("ax").ids)
    assert matcher.fault
    matcher.fill(masks, [3])
    assert ids_of(masks[0]) == ids_of(masks[1]) == {EOS}


def test_answers_of_one_grammar_do_not_meet(vocabulary: Vocabulary) -> None:
    one, other = (vocabulary.begin(LANGUAGE.grammar) for _ in range(2))
    one.advance(walked(vocabulary, random.Random(0))[0])
    masks = anything(1)
    other.fill(masks, [])
    assert ids_of(masks[0]) == LANGUAGE.allowed([])


def some(grammar: str, texts: Iterable[str], vocabulary: Vocabulary) -> list[bool]:
    found = []
    for text in texts:
        matcher, masks = vocabulary.begin(grammar), anything(1)
        matcher.advance(TOKENIZER.encode(text).ids)
        matcher.fill(masks, [])
        found.append(not matcher.fault and EOS in ids_of(masks[0]))
    return found


def test_a_schema_is_a_grammar(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 12}}, "required": ["n"]}
    texts = ['{"n": 12}', '{"n": 13}', "{}", '{"n": 1', '{"n": "1"}']
    assert some(f"start: %json {json.dumps(schema)}", texts, vocabulary) == [True, False, False, False, False]


@pytest.mark.parametrize(
    ("grammar", "word"),
    [
        ("start: nowhere", "nowhere"),
        ('start: %json {"type": "array", "items": {"type": "integer"}, "uniqueItems": true}', "uniqueItems"),
        ('start: %json {"not": {"type": "string"}}', "not"),
        ('start: %json {"type": "string", "pattern": "("}', "regex"),
        ('start: %json {"allOf": [{"type": "string"}, {"type": "integer"}]}', "nsatisfiable"),
    ],
)
def test_what_cannot_be_kept_is_named(vocabulary: Vocabulary, grammar: str, word: str) -> None:
    refusal = vocabulary.refusal(grammar)
    assert refusal and word in refusal
    assert "Parser: {" not in refusal
    assert vocabulary.begin(grammar).fault == refusal


def test_a_grammar_that_grows_too_large_is_a_fault(vocabulary: Vocabulary) -> None:
    """And no time is lost over it."""
    matcher, masks = vocabulary.begin("start: /((a{1,1000}){1,1000}){1,1000}/"), anything(WINDOW)
    for _ in range(100):
        matcher.fill(masks, [0, 0, 0])
        matcher.advance([TOKENIZER.encode("a").ids[0]] * WINDOW)
    assert "too many" in matcher.fault
    matcher.fill(masks, [0, 0, 0])
    assert all(ids_of(mask) == {EOS} for mask in masks)


BOMB = '"a" /((a?){50}){50}a{2500}/'


def test_what_only_drafts_meet_is_no_fault_of_the_answer(vocabulary: Vocabulary) -> None:
    """Unless they stand. Nor is it one of other answers of the same grammar."""
    a, b = (TOKENIZER.encode(letter).ids[0] for letter in "ab")
    text, masks = f'start: "b"+ | {BOMB}', anything(WINDOW)
    rejected, stands, other = (vocabulary.begin(text) for _ in range(3))
    for matcher, run in ((rejected, [b]), (stands, [a, a])):
        matcher.fill(masks, [a, a, a])
        assert not matcher.fault and {a, b} <= ids_of(masks[0])
        matcher.advance(run)
    assert not rejected.fault and "too many" in stands.fault
    for matcher in (rejected, other):
        matcher.fill(masks, [b, b, b])
        assert not matcher.fault and all(ids_of(mask) >= {b} for mask in masks)
    assert EOS in ids_of(masks[1])
    stands.fill(masks, [b, b, b])
    assert all(ids_of(mask) == {EOS} for mask in masks)


def test_a_grammar_that_was_prepared_is_read_once(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()
    monkeypatch.setattr(
        vocabulary, "_matcher_of", lambda text: read.append(text) or Vocabulary._matcher_of(vocabulary, text)
    )
    text = 'start: "once" | "twice"'
    vocabulary.prepare(text)
    vocabulary.prepare(text)
    assert not vocabulary.begin(text).fault and not vocabulary.begin(text).fault
    assert read == [text]


def test_large_objects_are_kept_beyond_their_first_token(vocabulary: Vocabulary) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(500)}}
    matcher, masks = vocabulary.begin(f"start: %json {json.dumps(schema)}"), anything(1)
    for token in TOKENIZER.encode('{"p7": 1').ids:
        matcher.fill(masks, [])
        assert token in ids_of(masks[0])
        matcher.advance([token])
    assert not matcher.fault


def test_what_can_be_kept_is_not_refused(vocabulary: Vocabulary) -> None:
    assert vocabulary.refusal(LANGUAGE.grammar) == ""


def test_tokenizers_that_are_not_there(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    assert Vocabulary.load(str(folder), VOCAB, [EOS]) is None
    (folder / "tokenizer.json").write_text("{}")
    assert Vocabulary.load(str(folder), VOCAB, []) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        Vocabulary.load(str(folder), VOCAB, [EOS])


def test_what_is_kept_for_the_next_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the characters of all grammars too: what the library makes of a long one is many times as large."""
    made: list[str] = []
    library = grammar.LLMatcher

    def counted(tokens: object, text: str, **options: object) -> object:
        made.append(text)
        return library(tokens, text, **options)

    monkeypatch.setattr(grammar, "LLMatcher", counted)
    monkeypatch.setattr(grammar, "_MAX_KEPT_TEXT", 1000)
    vocabulary = Vocabulary(TOKENIZER.to_str(), VOCAB, [EOS])
    small, large = [f'start: "{letter}"' for letter in "abc"], f'start: "{"x" * 980}"'
    for text in (*small, *small, large, small[2], small[0], large):
        assert not vocabulary.refusal(text)
    assert made == [*small, large, small[0], large]
