"""Reading the prompts of a completions body: one, or a list of them.

Owns their forms, how many there may be, and the path of each for error messages. Knows no tokenizer and no vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from longcat_pd.errors import InvalidRequest
from longcat_pd.server.fields import Fields, as_integer, out_of_range, wrong_type

MAX_CHOICES = 64  # of one body: prompts times n


@dataclass(frozen=True, slots=True)
class Prompt:
    """A text, or token ids that are not yet compared with a vocabulary; ``path`` leads to it in the body."""

    content: str | tuple[int, ...]
    path: str = "prompt"


def read_prompts(body: Fields, n: int) -> tuple[Prompt, ...]:
    """The prompts of a body with ``n`` choices of each: a text, a list of ids, or a list that mixes both. Never empty.

    Raises InvalidRequest.
    """
    given = body.required("prompt")
    if not (isinstance(given, list) and given and isinstance(given[0], (str, list))):
        return (_prompt(given, "prompt"),)
    if len(given) * n > MAX_CHOICES:
        raise InvalidRequest(
            f"{len(given)} prompts with n = {n} make {len(given) * n} choices, outside 1 ... {MAX_CHOICES}", param="prompt"
        )
    return tuple(_prompt(value, f"prompt[{i}]") for i, value in enumerate(given))


def _prompt(value: Any, path: str) -> Prompt:
    if isinstance(value, str):
        return Prompt(value, path)
    if not isinstance(value, list):
        raise wrong_type(path, "a string or an array of integers", value)
    if not value:
        raise InvalidRequest(f"{path} has no token", param=path)
    if all(type(token_id) is int for token_id in value) and min(value) >= 0:  # long ones: no path for each element
        return Prompt(tuple(value), path)
    return Prompt(tuple(token_id_of(token_id, f"{path}[{i}]") for i, token_id in enumerate(value)), path)


def token_id_of(value: Any, path: str) -> int:
    """An integer that some vocabulary may have."""
    token_id = as_integer(value, path)
    if token_id < 0:
        raise out_of_range(path, value, "the vocabulary")
    return token_id
