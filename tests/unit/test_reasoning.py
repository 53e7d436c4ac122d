import pytest

from longcat_pd.server.reasoning import ReasoningSplitter

OPEN, CLOSE = "<longcat_think>", "</longcat_think>"


def run(prompt_end, pieces, **options):
    splitter = ReasoningSplitter(prompt_end, **options)
    spans = [span for piece in pieces for span in splitter.push(piece)] + splitter.finish()
    reasoning = "".join(s.text for s in spans if s.is_reasoning)
    content = "".join(s.text for s in spans if not s.is_reasoning)
    return reasoning, content, splitter.closed_at


CASES = [
    # prompt end, text, reasoning, content
    (f"x{OPEN}\n", f"why\n{CLOSE}\nanswer", "why", "answer"),
    (f"x{OPEN}\n", f"why{CLOSE}answer", "why", "answer"),
    (f"x{OPEN}", f"\nwhy\n\n{CLOSE}\n\nanswer", "why\n", "\nanswer"),
    (f"x{OPEN}\n", "never closed\n", "never closed\n", ""),
    (f"x{OPEN}\n", f"half {CLOSE[:-1]}", f"half {CLOSE[:-1]}", ""),
    (f"x{OPEN}\n", f"a <longcat_tool_call>f{CLOSE}b", "a <longcat_tool_call>f", "b"),
    (f"x{OPEN}\n", CLOSE, "", ""),
    (f"x{OPEN}\n\n{CLOSE}\n", "answer", "", "answer"),
    (f"x{OPEN}\n\n{CLOSE}\n", f"{OPEN}\nwhy\n{CLOSE}\nanswer", "why", "answer"),
    ("ASSISTANT:", f"{OPEN}\nwhy\n{CLOSE}\nanswer {OPEN} x {CLOSE}", "why", f"answer {OPEN} x {CLOSE}"),
    ("ASSISTANT:", f"no {OPEN}tag{CLOSE}", "", f"no {OPEN}tag{CLOSE}"),
    ("ASSISTANT:", "<longcat", "", "<longcat"),
    ("ASSISTANT:", f"{OPEN}a{CLOSE}", "a", ""),
]


@pytest.mark.parametrize("prompt_end,text,reasoning,content", CASES)
def test_every_cut_gives_the_same(prompt_end, text, reasoning, content):
    whole = run(prompt_end, [text])
    assert whole[:2] == (reasoning, content)
    for cut in range(len(text) + 1):
        assert run(prompt_end, [text[:cut], text[cut:]]) == whole, cut
    assert run(prompt_end, list(text)) == whole


@pytest.mark.parametrize("prompt_end,text,reasoning,content", CASES)
def test_kept_markup_joins_to_the_raw_text(prompt_end, text, reasoning, content):
    kept = run(prompt_end, list(text), keeps_markup=True)
    assert kept[0] + kept[1] == text
    assert kept[1] == content


def test_where_the_block_closes_is_counted_in_raw_text():
    text = f"ab\n{CLOSE}\nrest"
    assert run(f"{OPEN}\n", list(text))[2] == len(f"ab\n{CLOSE}")
    assert run("", list(text))[2] is None


def test_reasoning_leaves_at_once_and_what_may_be_a_marker_waits():
    splitter = ReasoningSplitter(f"{OPEN}\n")
    assert [s.text for s in splitter.push("think\n</long")] == ["think"]
    assert [s.text for s in splitter.push("er")] == ["\n</longer"]
