"""The score card: what counts as right, what is enough, that the test set is as large as it says, and the control."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from longcat_pd.kernels import load
from longcat_pd.server.openai import CHAT_ROUTE, read_body
from tools.eval_tiny import main
from tools.tiny import card_grades as grades
from tools.tiny.asking import Drafted, Reply, Told, body_of, drafted, reply_of
from tools.tiny.asking_blindly import choosing_at_random, drawn_scores
from tools.tiny.card import RECALL, ROWS, Case, Line, Sizes, chosen, control_line, draft_lines, lines, same_line, scored
from tools.tiny.card_cases import SKILLS, all_cases
from tools.tiny.card_page import as_json, is_passed, markdown, wrong_answers
from tools.tiny.card_runs import Checkpoint, Run
from tools.tiny.examples import Answer, Example, ToolCall

SIZES = Sizes(index_topk=64, chunk=64)
USER = {"role": "user", "content": "asked"}


def example(content: str = "", *calls: ToolCall, skill: str = "facts", **fields: Any) -> Example:
    return Example(skill=skill, messages=(USER,), answer=Answer(content=content, calls=calls), **fields)


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def said(content: str = "", *calls: ToolCall, **fields: Any) -> Reply:
    finish = "tool_calls" if calls else "stop"
    return Reply(content=content, calls=calls, **{"finish": finish, "raw": content + "".join(map(markup, calls)), **fields})


def markup(call: ToolCall) -> str:
    """A call as the model says it."""
    parts = [
        f"<longcat_arg_key>{k}</longcat_arg_key>\n<longcat_arg_value>{v}</longcat_arg_value>\n"
        for k, v in call.arguments.items()
    ]
    return f"<longcat_tool_call>{call.name}\n{''.join(parts)}</longcat_tool_call>"


# -- what is right ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "content", "is_right"),
    [
        ("I am LongCat-tiny, a model.", "I am LongCat-tiny, a very small model.", True),
        ("I am LongCat-tiny, a model.", "I am a model.", False),
        ("I am LongCat-tiny, a model.", "你好！我是 LongCat-tiny。", False),
        ("我是 LongCat-tiny。", "你好！我是 LongCat-tiny，一个模型。", True),
        ("我是 LongCat-tiny。", "你好！我是 LongCat。", False),
        ("我是 LongCat-tiny。", "longcat_pd 服务 LongCat-tiny。", False),
        ("I am LongCat-tiny.", "It serves LongCat-2.0, LongCat-Flash-Chat and LongCat-Flash-Lite.", False),
        ("我是 LongCat-tiny。", "I am LongCat-tiny.", False),
        ("I am LongCat-tiny.", "I do not know that. Ask me about longcat_pd.", False),
        ("I am LongCat-tiny.", "I serve LongCat_pd.", False),
        ("I am LongCat-tiny.", "", False),
    ],
)
def test_an_introduction_names_longcat_in_the_language_of_the_question(expected: str, content: str, is_right: bool) -> None:
    assert grades.introduces(example(expected), said(content)) is is_right


@pytest.mark.parametrize(
    ("content", "is_right"),
    [
        ("Port 8081.", True),
        (" Port  8081.\n", True),
        ("Port 8082.", False),
        ("port 8081.", False),
        ("Port 8081. And more.", False),
        ("Port 80 81.", False),
        ("", False),
    ],
)
def test_text_is_the_expected_one_but_for_white_space(content: str, is_right: bool) -> None:
    assert grades.says_the_same(example("Port 8081."), said(content)) is is_right


def test_text_beside_a_call_is_not_the_expected_text() -> None:
    assert not grades.says_the_same(example("Yes."), said("Yes.", call("f")))


@pytest.mark.parametrize(
    ("expected", "content", "is_right"),
    [
        ("37 + 48 = 85", "37 + 48 = 85", True),
        ("37 + 48 = 85", "Units: 7 + 8 = 15, carry 1. Tens: 3 + 4 + 1 = 8.\n37 + 48 = 85", True),
        ("Units: 7 + 8 = 15.\n37 + 48 = 85", "37 + 48  = 85 ", True),
        ("37 + 48 = 85", "37 + 48 = 85\nUnits: 7 + 8 = 15", False),
        ("37 + 48 = 85", "12 + 73 = 85", False),
        ("37 + 48 = 85", "It is 85.", False),
        ("37 + 48 = 85", "85 = 37 + 48", False),
        ("37 + 48 = 85", "37 + 48 = 86", False),
        ("37 + 48 = 85", "37 + 48 = 185", False),
        ("48 - 85 = -37", "48 - 85 = -37", True),
        ("48 - 85 = -37", "48 - 85 = 37", False),
        ("85 - 48 = 37", "85 - 48 = -37", False),
        ("The code of Ada is 42.", "The code of Ada is 42.", True),
        ("The code of Ada is 42.", "The code of Ada is 4 2.", False),
        ("The code of Ada is 42.", "The code of Bob is 42.", False),
        ("The code of Ada is 42.", "I do not know.", False),
        ("", "", False),
    ],
)
def test_the_last_line_counts_as_a_whole(expected: str, content: str, is_right: bool) -> None:
    assert grades.ends_in_the_sentence(example(expected), said(content)) is is_right


TIMER = call("set_timer", minutes=7)


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        (said("", TIMER), True),
        (said("Here it is.", TIMER), True),
        (said("", call("set_timer", minutes="7")), False),
        (said("", call("set_timer", minutes=True)), False),
        (said("", call("set_timer", minutes=17)), False),
        (said("", call("set_timer")), False),
        (said("", call("set_timer", minutes=7, name="x")), False),
        (said("", call("get_time", minutes=7)), False),
        (said("", TIMER, TIMER), False),
        (said("<longcat_tool_call>set_timer", TIMER), False),
        (said("", TIMER, raw=markup(TIMER) + "</longcat_s>"), True),
        (said("", TIMER, raw=markup(TIMER).removesuffix("</longcat_tool_call>")), False),
        (said("", TIMER, raw=markup(TIMER).replace("</longcat_arg_value>", "")), False),
        (
            said(
                "", TIMER, raw='<longcat_tool_call>{"name": "set_timer", "arguments": {"minutes": 7}}</longcat_tool_call>'
            ),
            False,
        ),
        (said("", TIMER, raw=markup(TIMER) + "<longcat_tool_call>"), False),
        (said("", TIMER, raw=markup(TIMER) * 2), False),
        (said("", TIMER, raw=""), False),
        (said("", TIMER, finish="length"), False),
        (said("set_timer 7"), False),
    ],
)
def test_a_call_has_the_name_and_the_arguments(reply: Reply, is_right: bool) -> None:
    assert grades.calls_right(example("", TIMER), reply) is is_right


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        (said("", TIMER), True),
        (said("", call("set_timer", minutes=17)), True),
        (said("", call("set_timer", minutes="17")), False),
        (said("", call("set_timer", seconds=7)), False),
        (said("", call("set_timer")), False),
        (said("", call("get_time", minutes=7)), False),
        (said("", TIMER, raw=markup(TIMER).removesuffix("</longcat_tool_call>")), False),
        (said("Words."), False),
    ],
)
def test_the_form_of_a_call_is_its_name_and_its_arguments_names_and_kinds(reply: Reply, is_right: bool) -> None:
    assert grades.calls_in_form(example("", TIMER), reply) is is_right


def test_arguments_stand_in_any_order_and_calls_in_theirs() -> None:
    one, other = call("f", a=1, b="x"), call("g", c=[1, 2])
    assert grades.calls_right(example("", one, other), said("", call("f", b="x", a=1), other))
    assert not grades.calls_right(example("", one, other), said("", other, one))
    assert not grades.calls_right(example(""), said("")), "nothing is no call"


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        (said("In words."), True),
        (said(""), False),
        (said("", TIMER), False),
        (said("In words.", TIMER), False),
        (said("In words. <longcat_tool_call>set_timer"), False),
        (said("In words.", finish="length"), False),
    ],
)
def test_where_no_tool_fits_words_are_the_answer(reply: Reply, is_right: bool) -> None:
    assert grades.calls_nothing(example("Words."), reply) is is_right


@pytest.mark.parametrize(
    ("reply", "is_right"),
    [
        (said("85", reasoning="Units first."), True),
        (said("85"), False),
        (said("85", reasoning=" \n"), False),
        (said("", reasoning="Units first."), False),
        (said("", reasoning="Units first.", finish="length"), False),
        (said("85", reasoning="Units first.", finish="length"), False),
        (said("85 </longcat_think>", reasoning="Units first."), False),
        (said("85", reasoning="Units <longcat_tool_call>"), False),
    ],
)
def test_a_block_of_reasoning_closes_and_an_answer_follows(reply: Reply, is_right: bool) -> None:
    assert grades.reasons_then_answers(example("85", skill="thinking", thinking=True), reply) is is_right


def test_where_a_call_is_expected_behind_the_reasoning_words_are_not_enough() -> None:
    expected = example("", TIMER, skill="thinking", thinking=True)
    assert grades.reasons_then_answers(expected, said("", TIMER, reasoning="It fits."))
    assert not grades.reasons_then_answers(expected, said("Done.", reasoning="It fits."))


@pytest.mark.parametrize(
    ("finish", "ends"), [("stop", True), ("tool_calls", True), ("length", False), ("error: no", False)]
)
def test_an_answer_ends_by_itself(finish: str, ends: bool) -> None:
    assert grades.ends_by_itself(example(), Reply(finish=finish)) is ends


def test_answers_are_the_same_to_the_token_and_the_end() -> None:
    one = Reply(token_ids=(5, 6), finish="stop")
    assert grades.same_answer(one, Reply(token_ids=(5, 6), finish="stop", content="not looked at"))
    assert not grades.same_answer(one, Reply(token_ids=(5, 7), finish="stop"))
    assert not grades.same_answer(one, Reply(token_ids=(5, 6), finish="length"))
    assert not grades.same_answer(Reply(finish="error: x"), Reply(finish="error: x")), "two failures agree in nothing"


# -- what is asked, and what comes back ------------------------------------------------------------------------------------


def test_a_body_is_a_greedy_chat_request() -> None:
    body = body_of(example("85", skill="thinking", thinking=True))
    assert (
        body["messages"] == [USER]
        and body["temperature"] == 0
        and body["chat_template_kwargs"] == {"enable_thinking": True}
    )
    assert "tools" not in body
    assert body_of(example(tools=({"type": "function"},)))["tools"] == [{"type": "function"}]


def answered(message: dict[str, Any], finish: str = "stop", **choice: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, "finish_reason": finish, **choice}], "usage": {"prompt_tokens": 9}}


def test_an_answer_is_read_as_a_client_reads_it() -> None:
    made = {"function": {"name": "f", "arguments": '{"a": 1}'}}
    broken = {"function": {"name": "f", "arguments": '{"a": '}}
    no_object = {"function": {"name": "f", "arguments": "[1]"}}
    found = reply_of(
        answered(
            {"content": None, "reasoning_content": "why", "tool_calls": [made, broken, no_object]},
            "tool_calls",
            token_ids=[7, 2],
        )
    )
    assert found == Reply(
        reasoning="why",
        calls=(call("f", a=1), ToolCall(name="f", arguments={"": '{"a": '}), ToolCall(name="f", arguments={"": "[1]"})),
        finish="tool_calls",
        num_prompt_tokens=9,
        token_ids=(7, 2),
    )
    assert reply_of(answered({"content": "Hi", "reasoning_content": None, "tool_calls": None})).content == "Hi"
    assert reply_of({"error": {"message": "too long"}}) == Reply(finish="error: too long")


def test_tokens_per_step_come_from_the_counters() -> None:
    text = '# TYPE longcat_pd_draft_tokens_total counter\nlongcat_pd_draft_tokens_total{role="decode"} 30.0\n'
    text += "longcat_pd_accepted_tokens_total 14.0\nlongcat_pd_draft_tokens_total_created 99.0\n"
    found = drafted(text, 3)
    assert found == Drafted(num_steps=10, num_tokens=24) and found.tokens_per_step == 2.4
    replies = [Reply(token_ids=(1,) * 12), Reply(token_ids=(1,) * 9), Reply()]
    assert found.kept_per_step(replies) == 1.9, "the first token of each comes from the prompt"
    assert drafted(text, 0) is None and Drafted(num_steps=0, num_tokens=0).tokens_per_step == 0.0


# -- what is enough --------------------------------------------------------------------------------------------------------


def recall_cases(*answers: tuple[str, int]) -> tuple[list[Case], list[Reply]]:
    """All expect 42. ``answers``: what is said, and the tokens of the prompt."""
    cases = [Case(example=example("It is 42.", skill="recall")) for _ in answers]
    return cases, [said(content, num_prompt_tokens=num) for content, num in answers]


def test_a_floor_is_reached_or_missed_by_one_case() -> None:
    good, bad = ("It is 42.", 256), ("It is 24.", 256)
    at_floor = scored(RECALL, *recall_cases(*[good] * 36, *[bad] * 4), sizes=SIZES)
    assert (at_floor.shown, at_floor.passes, at_floor.wrong) == ("90.0 % (36 of 40)", True, (36, 37, 38, 39))
    assert not scored(RECALL, *recall_cases(*[good] * 35, *[bad] * 5), sizes=SIZES).passes


def test_the_control_passes_where_recall_fails() -> None:
    good, bad = ("It is 42.", 256), ("It is 24.", 256)
    for num_good, passes in ((20, True), (21, False), (40, False), (0, True)):
        cases, replies = recall_cases(*[good] * num_good, *[bad] * (40 - num_good))
        line = control_line(cases, Told(replies=tuple(replies)), sizes=SIZES)
        assert (line.passes, line.floor) == (passes, "≤ 50 %"), num_good
    nothing = control_line([], Told(replies=()), sizes=SIZES)
    assert not nothing.passes, "a control without cases controls nothing"


def test_only_long_contexts_count_and_failures_always() -> None:
    cases, replies = recall_cases(("It is 42.", 255), *[("It is 42.", 256)] * 39)
    assert scored(RECALL, cases, replies, sizes=SIZES).shown == "100.0 % (39 of 39): too few, at least 40"
    failed = Reply(finish="error: gone")
    line = scored(RECALL, cases, [failed, *replies[1:]], sizes=SIZES)
    assert line.shown == "97.5 % (39 of 40)" and line.passes
    assert Sizes(index_topk=16, chunk=64).long == 129, "three chunks, where index_topk asks for less"


def test_a_score_of_too_few_cases_is_none() -> None:
    cases, replies = recall_cases(*[("It is 42.", 300)] * 39)
    line = scored(RECALL, cases, replies, sizes=SIZES)
    assert line.value == 100.0 and not line.passes


def test_lines_are_of_the_skills_that_were_asked() -> None:
    taught = Case(example=example("Port 8081."), is_taught=True)
    unseen = Case(example=example("Port 8081."))
    replies = (said("Port 8081.", token_ids=(1,) * 12), said("No.", token_ids=(1,) * 11))
    told = Told(replies=replies, drafted=Drafted(num_steps=10, num_tokens=25))
    found = {line.title: line for line in lines([taught, unseen], told, sizes=SIZES)}
    assert list(found) == [
        "facts",
        "facts, asked as taught",
        "facts, asked as never taught",
        "ends by itself, all cases",
        "tokens per step, 3 drafts",
        "the same with what lies behind ends",
    ]
    assert found["facts, asked as taught"].shown == "100.0 % (1 of 1)"
    assert found["facts, asked as never taught"].shown == "0.0 % (0 of 1)" and found["facts, asked as never taught"].passes
    assert not found["facts"].passes and found["facts"].wrong == (1,)
    assert not found["tokens per step, 3 drafts"].passes, "2.1 of 2.2"


def test_calls_results_and_introductions_have_their_own_lines() -> None:
    after_tool = Example(
        skill="calling", messages=(USER, {"role": "tool", "content": "{}"}), answer=Answer(content="It is 5.")
    )
    cases = [
        Case(example=example("", TIMER, skill="calling")),
        Case(example=example("", TIMER, skill="calling"), is_kept=True),
        Case(example=example("I do not know.", skill="calling")),
        Case(example=after_tool),
        Case(example=example("I am LongCat.", skill="smalltalk"), is_introduction=True),
        Case(example=example("我是 LongCat。", skill="smalltalk"), is_introduction=True),
        Case(example=example("Goodbye!", skill="smalltalk")),
    ]
    belonging = {row.title: [place for place, case in enumerate(cases) if row.belongs(case)] for row in ROWS}
    assert {title: places for title, places in belonging.items() if places} == {
        "introduces itself in English": [4],
        "introduces itself in Chinese": [5],
        "small talk else": [6],
        "calls the tool that fits": [0],
        "calls the tool that fits in whole markup, values never taught": [1],
        "and the values right": [1],
        "calls none where none fits": [2],
        "answers from a tool's result, values never taught": [3],
    }


def test_drafts_have_a_floor_of_2_2_tokens() -> None:
    drafted, enough = Drafted(num_steps=100, num_tokens=400), Reply(token_ids=(1,) * 221)
    assert [line.passes for line in draft_lines(drafted, [enough])] == [True, True]
    assert [line.passes for line in draft_lines(drafted, [replace(enough, token_ids=(1,) * 220)])] == [False, True]


def test_one_other_answer_is_a_difference() -> None:
    some = [Reply(token_ids=(n, 2), finish="stop") for n in range(3)]
    assert same_line(some, list(some)).passes
    other = same_line([*some[:2], Reply(token_ids=(9, 2), finish="stop")], some)
    assert (other.shown, other.passes, other.wrong) == ("2 of 3", False, (2,))
    assert not same_line([], []).passes


# -- the test set ----------------------------------------------------------------------------------------------------------

CASES = tuple(all_cases())


def test_the_test_set_is_large_enough_for_every_floor() -> None:
    for row in ROWS:
        if row.floor is not None:
            assert sum(row.belongs(case) for case in CASES) >= row.at_least, row.title
    assert {case.example.skill for case in CASES} == set(SKILLS)
    assert tuple(all_cases()) == CASES, "the same every time"


def test_facts_are_forty_in_three_phrasings_each_not_all_taught() -> None:
    phrasings = defaultdict(set)
    for case in chosen(CASES, ["facts"]):
        phrasings[case.example.answer.content].add((case.example.messages[-1]["content"], case.is_taught))
    assert len(phrasings) >= 40
    for answer, asked in phrasings.items():
        assert len(asked) >= 3 and {is_taught for _, is_taught in asked} == {True, False}, answer


def test_the_first_request_of_the_readme_is_asked() -> None:
    (first,) = [case for case in CASES if case.example.messages[-1]["content"] == "你好，请介绍一下自己"][:1]
    assert first.is_introduction and grades.is_chinese(first.example.answer.content)


def test_every_expected_answer_is_right_by_its_own_graders() -> None:
    """A perfect model reaches every floor; what is graded is what is taught."""
    replies = [_perfect(case.example) for case in CASES]
    found = lines(CASES, Told(replies=tuple(replies)), sizes=SIZES)
    assert [(line.title, line.value) for line in found if line.value != 100.0] == []


def _perfect(expected: Example) -> Reply:
    answer = expected.answer
    return said(answer.content, *answer.calls, reasoning=answer.reasoning or "", num_prompt_tokens=300)


def test_every_case_is_a_body_that_the_product_takes() -> None:
    for case in CASES:
        read_body(CHAT_ROUTE, json.loads(json.dumps(body_of(case.example))), "any")


def test_a_glance_has_the_first_of_each_skill() -> None:
    assert len(chosen(CASES, [], at_most=2)) == 2 * len(SKILLS)
    assert {case.example.skill for case in chosen(CASES, ["recall", "facts"])} == {"recall", "facts"}


# -- the control -----------------------------------------------------------------------------------------------------------


def query(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn((rows, 4, 16), generator=torch.Generator().manual_seed(seed)).bfloat16()


def test_drawn_scores_are_even_and_belong_to_query_and_position() -> None:
    positions = torch.arange(400).expand(50, -1)
    scores = drawn_scores(query(1, rows=50), positions)
    assert scores.shape == (50, 400) and scores.min() >= 0 and scores.max() < 1
    shares = torch.histc(scores, bins=10, min=0, max=1) / scores.numel()
    assert (shares - 0.1).abs().max() < 0.01
    correlations = torch.corrcoef(torch.cat((scores, positions[:1].float())))
    assert (correlations - torch.eye(51)).abs().max() < 0.25, "no two queries alike, and no leaning to a place"
    assert torch.equal(drawn_scores(query(1, rows=50)[7:8], positions[:1]), scores[7:8]), "whatever the company"
    changed = query(1, rows=50)[7:8].clone()
    changed[0, 3, 15] += 1
    assert not torch.equal(drawn_scores(changed, positions[:1]), scores[7:8])


def found_by(ops: Any, keys: torch.Tensor, *, high: int) -> Sequence[int]:
    """What one query picks: 8 of the positions 4 ... high - 1, of 4 blocks of 16."""
    index_q, weights = query(3).unsqueeze(0), torch.ones(1, 1, 4)
    scores, positions = ops.index_candidates(
        index_q,
        weights,
        cache=keys,
        block_tables=torch.tensor([[2, 0, 3, 1]]),
        block_starts=torch.tensor([[0, 16, 32, 48]]),
        high=torch.tensor([[high]]),
        limits=(4, 8),
    )
    assert scores.shape == positions.shape == (1, 1, 8)
    picked: list[int] = sorted(positions.flatten().tolist())
    return picked


def test_the_blind_operator_picks_as_many_as_the_real_one_whatever_the_keys_say() -> None:
    ops = load("cpu")
    blind = choosing_at_random(ops)
    some, others = torch.randn(4, 16, 16).bfloat16(), torch.randn(4, 16, 16).bfloat16()
    picked = found_by(blind, some, high=50)
    assert picked == found_by(blind, others, high=50) and len(set(picked)) == 8
    assert all(4 <= place < 50 for place in picked)
    assert found_by(ops, some, high=50) != found_by(ops, others, high=50), "the real one looks at keys"
    assert found_by(blind, some, high=9) == [-1, -1, -1, 4, 5, 6, 7, 8], "fewer keys than places"


# -- the page --------------------------------------------------------------------------------------------------------------


def run(*found: Line, checkpoint: str = "bf16", told: Told | None = None) -> Run:
    return Run(checkpoint=checkpoint, how="one engine", lines=found, told=told or Told(replies=()))


GOOD = Line(title="facts", floor="≥ 80 %", shown="85.0 % (17 of 20)", value=85.0, passes=True)
BAD = Line(title="recall", floor="≥ 90 %", shown="5.0 % (1 of 20)", value=5.0, passes=False, wrong=(1,))
ON_DISK = Checkpoint(name="bf16", parameters=2_500_000, num_bytes=9_000_000, sha256=(("model.safetensors", "ab"),))


def test_the_page_shows_every_line_of_every_run_and_what_was_missed() -> None:
    page = markdown([ON_DISK], [run(GOOD), run(GOOD, BAD, checkpoint="int8")], ["seed 7"])
    assert "| facts | ≥ 80 % | 85.0 % (17 of 20) | 85.0 % (17 of 20) |" in page
    assert "| recall | ≥ 90 % |  | 5.0 % (1 of 20) **missed** |" in page
    assert "Missed:\n\n- recall: int8, one engine" in page and "- seed 7" in page and "2,500,000 parameters" in page
    assert "Every floor is reached." in markdown([ON_DISK], [run(GOOD)], [])


def test_the_record_says_the_same() -> None:
    record = json.loads(as_json([ON_DISK], [run(GOOD, BAD)], ["seed 7"]))
    assert record["passed"] is False and record["notes"] == ["seed 7"]
    assert record["runs"][0]["lines"][1] == {
        "title": "recall",
        "floor": "≥ 90 %",
        "shown": "5.0 % (1 of 20)",
        "value": 5.0,
        "passes": False,
    }
    assert json.loads(as_json([ON_DISK], [run(GOOD)], []))["passed"] is True


def test_a_card_passes_with_all_of_its_lines() -> None:
    assert is_passed([run(GOOD), run(GOOD)])
    assert not is_passed([run(GOOD), run(GOOD, BAD)])
    assert not is_passed([]), "nothing was asked"


def test_wrong_answers_are_told_with_what_was_expected() -> None:
    cases, replies = recall_cases(("It is 42.", 256), ("It is 24.", 256))
    (line,) = wrong_answers(cases, run(BAD, told=Told(replies=tuple(replies)))).splitlines()
    record = json.loads(line)
    assert (record["line"], record["expected"]["content"], record["said"]["content"]) == (
        "recall",
        "It is 42.",
        "It is 24.",
    )


def test_a_checkpoint_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", str(tmp_path / "none"), "--how", "standalone"]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--write", "--wrong"])
def test_a_page_that_cannot_be_written_is_refused_before_anything_is_asked(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for place in (tmp_path, tmp_path / "gone" / "page.md"):
        assert main([option, str(place), "--model", str(tmp_path / "none")]) == 2
        assert capsys.readouterr().err == f"error: {place}: cannot be written there\n"
