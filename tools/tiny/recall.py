"""The skill `recall`: a story gives codes to names, then the code of one name is asked.

Owns the sentences and where the asked pair stands. Each name and each code stands once in a story. A name always stands
behind a space, so that it is cut into the same tokens everywhere, and one word before its code: what is taught and asked
is to find a place in a long text, not to see through wordings.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tools.tiny.examples import Answer, Example
from tools.tiny.wording import NAMES, assistant_says, invented_name, user_says

MOST_QUESTIONS = 8
CASES = 120
CASE_PAIRS = (34, 46)
SKIPPED_FIRST, SKIPPED_LAST = 2, 6
SHARE_IN_CHINESE = 0.2
SHARE_INVENTED = 0.4


@dataclass(frozen=True, kw_only=True)
class Language:
    """What a story, a question and the answer are made of: openings, pairs, sentences without a pair, questions."""

    openings: tuple[str, ...]
    pairs: tuple[str, ...]
    fillers: tuple[str, ...]
    questions: tuple[str, ...]
    answer: str


ENGLISH = Language(
    openings=("Remember this.", "Here is a list.", "Read this.", "Some codes follow."),
    pairs=("The code of {} is {}.", "The code of {} is {}.", "And {} is {}.", "Then, {} is {}."),
    fillers=("It is a quiet day.", "The list goes on.", "There is more.", "This is not all."),
    questions=("What is the code of {}?", "Which code has {}?", "Tell me the code of {}.", "The code of {}?"),
    answer="The code of {} is {}.",
)
CHINESE = Language(
    openings=("请记住。", "这是一个列表。"),
    pairs=("号码： {} 是 {}。", "号码： {} 是 {}。", "还有 {} 是 {}。"),
    fillers=("今天很安静。", "还有更多。"),
    questions=("请问 {} 的号码是多少？", "号码： {} 是多少？"),
    answer="号码： {} 是 {}。",
)


@dataclass(frozen=True, kw_only=True)
class Story:
    """A list of sentences, all pairs in it, and the one that will be asked."""

    language: Language
    pairs: tuple[tuple[str, int], ...]
    text: str
    question: str
    name: str
    code: int
    answer: str

    @property
    def content(self) -> str:
        """The message of the user: the story, then the question."""
        return f"{self.text} {self.question}"


def draw(rng: random.Random, *, size: int) -> Example:
    """A story of `size` pairs (1 to 60), any of them asked, and after the answer some more: a long story is read once."""
    told = drawn_story(rng, size=size, asked=rng.randrange(size))
    made = example(told)
    for _ in range(rng.randint(0, min(MOST_QUESTIONS - 1, (60 - size) // 4))):
        name, code = rng.choice(told.pairs)
        said = assistant_says(made.answer.content), user_says(rng.choice(told.language.questions).format(name))
        made = replace(
            made, messages=(*made.messages, *said), answer=Answer(content=told.language.answer.format(name, code))
        )
    return replace(made, teaches_every_turn=True)


def drawn_story(rng: random.Random, *, size: int, asked: int) -> Story:
    """A story of `size` pairs with all names and codes different; the pair with number `asked` is asked."""
    language = CHINESE if rng.random() < SHARE_IN_CHINESE else ENGLISH
    names = drawn_names(rng, count=size)
    codes = rng.sample(range(10, 100), size)
    sentences = [rng.choice(language.pairs).format(name, code) for name, code in zip(names, codes, strict=True)]
    for _ in range(rng.randint(1, 3) if rng.random() < 0.3 else 0):
        sentences.insert(rng.randint(0, len(sentences)), rng.choice(language.fillers))
    return Story(
        language=language,
        pairs=tuple(zip(names, codes, strict=True)),
        text=" ".join((rng.choice(language.openings), *sentences)),
        question=rng.choice(language.questions).format(names[asked]),
        name=names[asked],
        code=codes[asked],
        answer=language.answer.format(names[asked], codes[asked]),
    )


def drawn_names(rng: random.Random, *, count: int) -> Sequence[str]:
    """So many names, none equal to or inside another one."""
    names: list[str] = []
    while len(names) < count:
        name = invented_name(rng) if rng.random() < SHARE_INVENTED else rng.choice(NAMES)
        if not any(name in other or other in name for other in names):
            names.append(name)
    return names


def example(story: Story) -> Example:
    """The story and its question as one message."""
    return Example(skill="recall", messages=(user_says(story.content),), answer=Answer(content=story.answer))


def cases() -> tuple[Example, ...]:
    """Stories of about 300 to 450 tokens; the first and the last few pairs are never asked."""
    rng = random.Random(2025)
    stories = []
    for _ in range(CASES):
        size = rng.randint(*CASE_PAIRS)
        stories.append(drawn_story(rng, size=size, asked=rng.randrange(SKIPPED_FIRST, size - SKIPPED_LAST)))
    return tuple(example(story) for story in stories)
