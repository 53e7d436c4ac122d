"""The skill `openers`: the many ways to begin a chat, above all to ask who is there.

Owns how wordings are put together. Those that are kept for the test are no part of any. Answers, and what else is asked,
are those of small talk, whose cases test this one.
"""

from __future__ import annotations

import random

from tools.tiny.examples import Example
from tools.tiny.smalltalk import HELD_OUT, SHARE_OF_SYSTEMS, SYSTEMS, Turn, dialogue
from tools.tiny.talks import TALKS, Talk
from tools.tiny.wording import is_chinese, plain

GREETINGS = (
    "",
    "",
    "Hello, ",
    "Hello! ",
    "Hi, ",
    "Hi! ",
    "Hey, ",
    "Good morning. ",
    "Good evening! ",
    "Excuse me, ",
    "OK. ",
)
ASKING = ("", "please ", "can you ", "could you ", "would you ", "now ", "would you please ")
REQUESTS = (
    "introduce yourself",
    "tell me who you are",
    "tell me your name",
    "say who you are",
    "say your name",
    "describe yourself",
    "tell me about yourself",
    "tell me something about yourself",
    "say something about yourself",
    "present yourself",
    "tell me what you are",
    "tell me which model you are",
    "say a few words about yourself",
)
QUESTIONS = (
    "who are you",
    "what are you",
    "what is your name",
    "what are you called",
    "who is this",
    "who is there",
    "which model are you",
    "what model are you",
    "what sort of model are you",
    "what kind of model is this",
    "which model is this",
    "who am I talking to",
    "are you LongCat",
    "what is LongCat-tiny",
)
GREETINGS_IN_CHINESE = ("", "", "你好，", "您好，", "嗨，", "早上好，", "晚上好，", "你好！", "您好！")
ASKING_IN_CHINESE = ("", "请", "请你", "请您", "麻烦你", "可以", "现在")
REQUESTS_IN_CHINESE = (
    "介绍一下自己",
    "介绍一下你自己",
    "介绍你自己",
    "介绍您自己",
    "介绍自己",
    "做一个自我介绍",
    "做个自我介绍",
    "自我介绍一下",
    "说说你自己",
    "说说你是谁",
    "说一下你是谁",
    "告诉我你是谁",
    "告诉我你的名字",
)
QUESTIONS_IN_CHINESE = (
    "你是谁",
    "您是谁",
    "请问你是谁",
    "你叫什么",
    "你叫什么名字",
    "您叫什么名字",
    "你的名字是什么",
    "你是什么模型",
    "你是哪个模型",
    "这是什么模型",
    "你是什么",
)
SHARE_OF_OTHERS, SHARE_IN_CHINESE, SHARE_OF_QUESTIONS = 0.3, 0.45, 0.5


def draw(rng: random.Random, *, size: int) -> Example:
    """A request to say who is there, or another talk behind a greeting."""
    talk = rng.choice(TALKS[2:]) if rng.random() < SHARE_OF_OTHERS else TALKS[rng.random() < SHARE_IN_CHINESE]
    while is_kept(question := worded(rng, talk=talk), talk=talk):
        pass
    turn = Turn(question=question, answer=talk.answer)
    return dialogue([turn], system=rng.choice(SYSTEMS) if rng.random() < SHARE_OF_SYSTEMS else None)


def is_kept(question: str, *, talk: Talk) -> bool:
    """Whether a wording that is kept for the test is this one, or of this talk and inside of it."""
    return plain(question) in HELD_OUT or any(bare(kept) in bare(question) for kept in talk.unseen)


def bare(question: str) -> str:
    """The question without case, spaces and marks."""
    return plain(question).replace(" ", "")


def worded(rng: random.Random, *, talk: Talk) -> str:
    """A greeting, if any, then a request or a question; of talks that are no introduction one of their own questions."""
    in_chinese = is_chinese(talk.answer)
    greeting = rng.choice(GREETINGS_IN_CHINESE if in_chinese else GREETINGS)
    if talk not in TALKS[:2]:
        asked = rng.choice(talk.asked)
        return greeting + (lowered(asked) if greeting.endswith(", ") else asked)
    questions, asking, requests = (
        (QUESTIONS_IN_CHINESE, ASKING_IN_CHINESE, REQUESTS_IN_CHINESE) if in_chinese else (QUESTIONS, ASKING, REQUESTS)
    )
    mark, stop = ("？", "。") if in_chinese else ("?", ".")
    if rng.random() < SHARE_OF_QUESTIONS:
        text, end = rng.choice(questions), mark
    else:
        how = rng.choice(asking)
        text, end = how + rng.choice(requests), mark if "you " in how else stop
    if rng.random() < 0.3:
        end = ""
    begins = not greeting or greeting[-2:] in (". ", "! ")
    return greeting + (text[0].upper() + text[1:] if begins and rng.random() < 0.9 else text) + end


def lowered(text: str) -> str:
    """With a small first letter, but for I."""
    return text if text[:2] in ("I ", "I'") else text[0].lower() + text[1:]
