"""What the tiny model is taught and asked: the same every time, right, and nothing of the test in the training."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from functools import cache

import jsonschema
import pytest

from tools.tiny import arithmetic, calling, facts, offered, openers, recall, smalltalk, subjects, talks, thinking
from tools.tiny.arithmetic import digit_by_digit
from tools.tiny.corpus import corpus
from tools.tiny.examples import Example
from tools.tiny.wording import NAMES, is_chinese, plain

SKILLS = {
    "facts": facts,
    "smalltalk": smalltalk,
    "arithmetic": arithmetic,
    "recall": recall,
    "calling": calling,
    "thinking": thinking,
}
DRAW: dict[str, Callable[..., Example]] = {name: module.draw for name, module in SKILLS.items()}
CASES: dict[str, Callable[[], tuple[Example, ...]]] = {name: module.cases for name, module in SKILLS.items()}
VALIDATORS = {
    tool.name: jsonschema.Draft202012Validator({**tool.function["function"]["parameters"], "additionalProperties": False})
    for tool in offered.TOOLS
}
PROBLEM = re.compile(r"(\d+) ?(\+|-|plus|minus|加|减) ?(\d+)")
SOLUTION = re.compile(r"(?:.*\n)?(\d+) ([+-]) (\d+) = (-?\d+)")


@cache
def drawn(skill: str) -> tuple[Example, ...]:
    rng = random.Random(f"drawn {skill}")
    return tuple(DRAW[skill](rng, size=rng.randint(3, 10)) for _ in range(5000))


@cache
def asked(skill: str) -> tuple[Example, ...]:
    return CASES[skill]()


def question(example: Example) -> str:
    return str(next(m["content"] for m in reversed(example.messages) if m["role"] == "user"))


def questions(examples: tuple[Example, ...]) -> set[str]:
    return {plain(str(m["content"])) for example in examples for m in example.messages if m["role"] == "user"}


@pytest.mark.parametrize("skill", SKILLS)
def test_a_seed_says_everything(skill: str) -> None:
    def some(seed: int) -> list[Example]:
        rng = random.Random(seed)
        return [DRAW[skill](rng, size=5) for _ in range(50)]

    assert some(3) == some(3) != some(4)
    assert CASES[skill]() == CASES[skill]()


@pytest.mark.parametrize("skill", SKILLS)
def test_a_chat_is_well_formed(skill: str) -> None:
    for example in (*drawn(skill), *asked(skill)):
        roles = [message["role"] for message in example.messages]
        assert roles[-1] == ("tool" if "tool" in roles else "user")
        assert next(role for role in roles if role != "system") == "user" and "system" not in roles[1:]
        assert example.skill == skill
        assert bool(example.answer.content) != bool(example.answer.calls)
        assert example.thinking == (example.answer.reasoning is not None) == (skill == "thinking")


@pytest.mark.parametrize("skill", SKILLS)
def test_nothing_that_is_kept_is_taught(skill: str) -> None:
    seen = questions(drawn(skill))
    assert not seen & (facts.HELD_OUT | smalltalk.HELD_OUT)
    assert not seen & questions(asked("recall"))
    for words in seen:
        assert not ((found := PROBLEM.fullmatch(words.removeprefix("what is "))) and kept(*found.groups()))


def test_a_kept_question_stands_in_no_longer_one_of_its_fact() -> None:
    """Where nothing but a greeting or an adverb were new, it would not be new."""
    trained: dict[str, set[str]] = {}
    for example in drawn("facts"):
        trained.setdefault(example.answer.content, set()).add(plain(question(example)))
    for fact in (*facts.ENGLISH, *facts.CHINESE):
        assert not [(kept, words) for kept in map(plain, fact.unseen) for words in trained[fact.answer] if kept in words]


def kept(left: str, sign: str, right: str) -> bool:
    return arithmetic.Problem(left=int(left), sign=sign, right=int(right)).is_held_out


@pytest.mark.parametrize("skill", ["arithmetic", "smalltalk", "calling", "thinking"])
def test_no_kept_problem_stands_anywhere_in_the_training(skill: str) -> None:
    found = [m for e in drawn(skill) for text in said(e) for m in PROBLEM.findall(text)]
    assert found
    assert not [problem for problem in found if kept(*problem)]


def said(example: Example) -> list[str]:
    """Questions and answers of an example; its reasoning calculates with single digits and the pair turned around."""
    return [str(m["content"] or "") for m in example.messages] + [example.answer.content]


@pytest.mark.parametrize("skill", ["arithmetic", "thinking"])
def test_results_are_right(skill: str) -> None:
    solved = [e for e in (*drawn(skill), *asked(skill)) if SOLUTION.fullmatch(e.answer.content)]
    assert len(solved) > 1000
    for example in solved:
        left, sign, right, result = SOLUTION.fullmatch(example.answer.content).groups()  # type: ignore[union-attr]
        assert int(result) == (int(left) + int(right) if sign == "+" else int(left) - int(right))
        asked_left, asked_sign, asked_right = PROBLEM.search(question(example)).groups()  # type: ignore[union-attr]
        assert (asked_left, asked_right) == (left, right)
        assert asked_sign in {"+": ("+", "plus", "加"), "-": ("-", "minus", "减")}[sign]


@pytest.mark.parametrize("sign", ["+", "-"])
def test_digits_on_paper(sign: str) -> None:
    for left in range(100):
        for right in range(100):
            problem = arithmetic.Problem(left=left, sign=sign, right=right)
            steps = re.findall(r"(\d+) ([+-]) (\d+)(?: ([+-]) (\d+))? = (\d+)", digit_by_digit(problem))
            (*_, units), (*_, tens) = steps
            for a, first, b, second, c, result in steps:
                signs = {"+": 1, "-": -1, "": 0}
                assert int(a) + signs[first] * int(b) + signs[second] * int(c or 0) == int(result)
            assert int(tens) * 10 + int(units) % 10 == abs(problem.result)


def test_one_pair_in_ten_is_kept_whichever_way_round() -> None:
    pairs = [(left, right) for left in range(10, 100) for right in range(10, 100)]
    assert 0.08 < sum(kept(str(a), "+", str(b)) for a, b in pairs) / len(pairs) < 0.12
    assert all(kept(str(a), "+", str(b)) == kept(str(b), "-", str(a)) for a, b in pairs)
    signs = [SOLUTION.fullmatch(e.answer.content)[2] for e in asked("arithmetic")]  # type: ignore[index]
    assert signs.count("+") == signs.count("-") == 100
    assert all(kept(*SOLUTION.fullmatch(e.answer.content).groups()[:3]) for e in asked("arithmetic"))  # type: ignore[union-attr]


def test_a_code_is_read_from_one_place() -> None:
    for example in (*drawn("recall"), *asked("recall")):
        story, *others = [str(m["content"]) for m in example.messages if m["role"] == "user"]
        answers = [str(m["content"]) for m in example.messages if m["role"] == "assistant"] + [example.answer.content]
        codes, names = re.findall(r"\d+", story), re.findall(r"(\w+) (?:is|是) \d", story)
        assert len(codes) == len(set(codes)) == len(names) == len(set(names))
        for text, answer in zip((story, *others), answers, strict=True):
            name, code = re.search(r" (\w+) (?:is|是) (\d\d)[.。]$", answer).groups()  # type: ignore[union-attr]
            assert names.index(name) == codes.index(code)
            assert len(re.findall(rf"\b{name}\b", text)) == 1 + (text == story)  # in the question, and in the story
            assert name in text[-40:]


def test_a_long_story_is_asked_several_times_in_training_and_once_in_the_test() -> None:
    counts = {size: {turns(recall.draw(random.Random(i), size=size)) for i in range(200)} for size in (4, 40, 59)}
    assert counts == {4: set(range(1, 9)), 40: set(range(1, 7)), 59: {1}}
    assert {turns(example) for example in asked("recall")} == {1}


def turns(example: Example) -> int:
    """How many answers an example has."""
    return sum(message["role"] == "assistant" for message in example.messages) + 1


def test_every_place_of_a_story_is_asked_and_in_the_test_not_its_ends() -> None:
    rng = random.Random(1)
    places = [place(recall.draw(rng, size=6)) for _ in range(600)]
    assert {size for _, size in places} == {6}
    assert all(60 < sum(place == i for place, _ in places) < 140 for i in range(6))
    assert all(2 <= place < size - 6 and 34 <= size <= 46 for place, size in map(place, asked("recall")))
    assert len(asked("recall")) == 120


def place(example: Example) -> tuple[int, int]:
    """Which of how many pairs is asked first."""
    codes, answers = re.findall(r"\d+", str(example.messages[0]["content"])), [*example.messages[1:2], None]
    first = example.answer.content if answers[0] is None else str(answers[0]["content"])
    return codes.index(re.findall(r"\d+", first)[0]), len(codes)


@pytest.mark.parametrize("skill", ["calling", "thinking"])
def test_calls_fit_their_schemas_and_copy_the_request(skill: str) -> None:
    calling_ones = [e for e in (*drawn(skill), *asked(skill)) if e.answer.calls]
    assert len(calling_ones) > 400
    for example in calling_ones:
        (call,) = example.answer.calls
        assert [t["function"]["name"] for t in example.tools].count(call.name) == 1
        VALIDATORS[call.name].validate(dict(call.arguments))
        assert all(str(value) in question(example) for value in call.arguments.values())


def test_tools_are_called_where_they_fit_only() -> None:
    fitting = [e for e in asked("calling") if e.answer.calls]
    assert len(fitting) == 99 and len(asked("calling")) == 123
    assert {call.name for e in fitting for call in e.answer.calls} == {tool.name for tool in offered.TOOLS}
    assert all(1 <= len(e.tools) <= 3 for e in asked("calling"))
    told = [e for e in drawn("calling") if e.messages[-1]["role"] == "tool"]
    assert {e.messages[-2]["tool_calls"][0]["function"]["name"] for e in told} == {t.name for t in offered.TOOLS}
    for example in told:
        result = json.loads(example.messages[-1]["content"])
        assert all(value is True or str(value) in example.answer.content for value in result.values())


def test_kept_values_are_copied_in_the_test_alone() -> None:
    kept_words = (
        *offered.UNSEEN_CITIES,
        *offered.UNSEEN_TOPICS,
        *offered.UNSEEN_PHRASES,
        *offered.UNSEEN_ROOMS,
        *subjects.UNSEEN_SUBJECTS,
        *subjects.UNSEEN_SUBJECTS_IN_CHINESE,
    )
    taught = plain("\n".join(text for skill in SKILLS for e in drawn(skill) for text in said(e)))
    for words in map(plain, kept_words):
        assert (words if is_chinese(words) else f" {words} ") not in taught
    cases = {str(v) for e in asked("calling") for call in e.answer.calls for v in call.arguments.values()}
    assert len(cases & set(kept_words)) >= 10


def test_requests_with_kept_values_alone_are_never_taught() -> None:
    kept_ones = calling.kept_cases()
    fitting = [e for e in kept_ones if e.answer.calls]
    assert len(fitting) == 99 and len(kept_ones) == 135
    assert {call.name for e in fitting for call in e.answer.calls} == {tool.name for tool in offered.TOOLS}
    planned = tuple(e for e in asked("thinking") if e.answer.calls)
    assert planned and not questions((*kept_ones, *planned)) & questions((*drawn("calling"), *drawn("thinking")))
    for example in fitting:
        (call,) = example.answer.calls
        VALIDATORS[call.name].validate(dict(call.arguments))
        assert all(str(value) in question(example) for value in call.arguments.values())
        words = " ".join(map(str, call.arguments.values()))
        assert any(kept in words for kept in (*offered.KEPT, *offered.UNSEEN_CITIES)) or re.search(r"7( |$)", words)


@pytest.mark.parametrize(("tool", "name"), [("add_note", "text"), ("search", "query"), ("turn_on_light", "room")])
def test_some_arguments_are_nonsense_that_no_list_has(tool: str, name: str) -> None:
    """Who knows the lists by heart fails at them; nothing that is kept is in them."""
    rng, one = random.Random(9), next(t for t in offered.TOOLS if t.name == tool)
    texts = [str(offered.taught_values(rng, one)[name]) for _ in range(2000)]
    drawn_by_list = {str(one.values(rng, False)[name]) for _ in range(20_000)}
    unheard = [text for text in texts if text not in drawn_by_list]
    assert 0.3 < len(unheard) / len(texts) < 0.7
    assert not any(f" {kept} " in f" {text} " for text in texts for kept in offered.KEPT)


def test_facts_differ_and_are_many() -> None:
    every = (*facts.ENGLISH, *facts.CHINESE)
    assert len(facts.ENGLISH) >= 44 and len(facts.CHINESE) >= 12
    assert len({fact.answer for fact in every}) == len(every)
    wordings = [plain(text) for fact in every for text in (*fact.asked, *fact.unseen)]
    assert len(set(wordings)) == len(wordings)
    for fact in every:
        assert len(fact.unseen) == 2 and len(fact.asked) >= 4 and len(fact.topics) >= 2
        assert is_chinese(fact.answer + "".join(fact.asked)) == fact.is_chinese
    assert {e.answer.content for e in drawn("facts")} == {fact.answer for fact in every}
    unseen = [e for e in asked("facts") if plain(question(e)) in facts.HELD_OUT]
    assert len(asked("facts")) == 3 * len(every) and len(unseen) == 2 * len(every)


def test_it_says_who_it_is() -> None:
    first = {question(e): e.answer.content for e in asked("smalltalk")}
    for words in ("你好，请介绍一下自己", "Who are you?", "Introduce yourself", "hello"):
        assert "LongCat" in first[words]
    assert is_chinese(first["你好，请介绍一下自己"]) and not is_chinese(first["Who are you?"])
    assert all("LongCat" in talk.answer and talk.weight == max(t.weight for t in talks.TALKS) for talk in talks.TALKS[:2])
    unknown = [e for e in asked("smalltalk") if e.answer.content in (talks.UNKNOWN, talks.UNKNOWN_IN_CHINESE)]
    assert len(unknown) == len(subjects.UNSEEN_SUBJECTS) + len(subjects.UNSEEN_SUBJECTS_IN_CHINESE)
    wordings = [plain(text) for talk in talks.TALKS for text in (*talk.asked, *talk.unseen)]
    assert not set(wordings) & {plain(text) for fact in facts.ENGLISH for text in fact.asked}


def test_openers_are_many_and_none_that_is_kept() -> None:
    rng = random.Random("openers")
    made = [openers.draw(rng, size=0) for _ in range(5000)]
    assert len(questions(tuple(made))) > 1500
    assert {e.answer.content for e in made} == {talk.answer for talk in talks.TALKS}
    for example in made:
        talk = next(talk for talk in talks.TALKS if talk.answer == example.answer.content)
        assert is_chinese(question(example)) == is_chinese(talk.answer)
        assert plain(question(example)) not in smalltalk.HELD_OUT
        if talk in talks.TALKS[:2]:  # nor does a greeting before one make it another
            assert not any(openers.bare(kept) in openers.bare(question(example)) for kept in talk.unseen)


def test_the_corpus_has_the_words_of_all_skills() -> None:
    texts = list(corpus(1))
    assert texts == list(corpus(1)) and 5000 < len(texts) < 20000
    whole = "\n".join(texts)
    assert all(fact.answer in whole for fact in (*facts.ENGLISH, *facts.CHINESE))
    assert all(talk.answer in whole for talk in talks.TALKS)
    assert all(f'"name": "{tool.name}"' in whole for tool in offered.TOOLS)
    assert all(re.search(rf"\b{name}\b", whole) for name in NAMES)
    assert "<longcat" not in whole


def test_a_line_of_no_fact_is_refused() -> None:
    with pytest.raises(ValueError, match="no line of a fact: 'answered: yes'"):
        list(facts.read_facts("topic: a | b\nanswered: yes", is_chinese=False))
