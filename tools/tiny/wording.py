"""Words that several skills use: messages, names, and what counts as the same question. Knows no skill."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from typing import Any

WORDS = (
    "Ada Alan Alma Amir Ana Anton Arne Asa Ben Bea Boris Bruno Cara Carl Cleo Clara Dan Dara Dina Dora Edda Ela Elias "
    "Emil Emma Enzo Erik Eva Fay Felix Finn Flora Gina Greta Gus Hana Hanna Hugo Ida Igor Ilse Ines Iris Ivan Ivo Jan "
    "Jana Jin Jonas Jul Kai Kara Karl Kim Kira Lars Lea Lena Leo Lian Lina Lisa Luca Luis Lulu Mai Malik Mara Marc "
    "Maya Mei Mia Mila Mina Mira Nadia Nils Nina Noa Nora Olaf Olga Omar Oskar Otto Pablo Paul Pia Petra Quinn Rafi "
    "Ravi Rita Rob Rosa Ruth Sami Sara Sena Simon Sofia Stan Sven Tara Theo Tim Tina Tom Udo Ulla Uma Vera Vic Viola "
    "Wei Wim Xia Yara Yuki Yun Zara Zeno Zoe "
)
NAMES = tuple(WORDS.split())
ONSETS = tuple("bdfgklmnprstvz")
VOWELS = tuple("aeiou")
ENDINGS = ("", "", "n", "r", "s", "l")


def user_says(text: str) -> Mapping[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def assistant_says(text: str) -> Mapping[str, Any]:
    """A message of the assistant."""
    return {"role": "assistant", "content": text}


def plain(question: str) -> str:
    """The question without case, spaces at its ends and marks: two questions that agree here count as the same."""
    return " ".join(re.sub(r"[^\w/.-]", " ", question.lower()).split()).rstrip(".")


def is_chinese(text: str) -> bool:
    """Whether a character of the text is Chinese."""
    return any("\u4e00" <= character <= "\u9fff" for character in text)


def invented_name(rng: random.Random) -> str:
    """A name of two syllables, such as Tovan; one of 29,400."""
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(2)]
    return "".join(syllables).capitalize() + rng.choice(ENDINGS)
