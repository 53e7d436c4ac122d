"""The skill `arithmetic`: sums and differences of numbers from 0 to 99, asked in several forms.

Owns which pairs of two-digit numbers are kept for the test: one in ten, by a digest of the unordered pair, for sums and
differences alike. Other skills that calculate draw their problems here.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass

from tools.tiny.examples import Answer, Example
from tools.tiny.wording import user_says

FORMS = (
    "What is {a} {sign} {b}?",
    "{a} {sign} {b}",
    "{a} {sign} {b} = ?",
    "{a}{sign}{b}",
    "{a} {word} {b}?",
    "What is {a} {word} {b}?",
    "Calculate {a} {sign} {b}.",
    "How much is {a} {sign} {b}?",
    "Compute {a} {word} {b}.",
    "计算 {a} {chinese} {b}",
    "{a} {chinese} {b} 等于多少？",
    "{a} {sign} {b} 是多少？",
)
WORDS = {"+": "plus", "-": "minus"}
CHINESE = {"+": "加", "-": "减"}
CASES_OF_A_SIGN = 100
SHARE_SMALL = 0.15


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Two numbers of 0 to 99 and the sign between them."""

    left: int
    sign: str
    right: int

    @property
    def result(self) -> int:
        """The sum or the difference, which may be negative."""
        return self.left + self.right if self.sign == "+" else self.left - self.right

    @property
    def solution(self) -> str:
        """The problem and its result, always in this form: 37 + 48 = 85."""
        return f"{self.left} {self.sign} {self.right} = {self.result}"

    @property
    def is_held_out(self) -> bool:
        """Whether no training example may have these two numbers."""
        low, high = sorted((self.left, self.right))
        return low >= 10 and hashlib.sha256(f"{low} {high}".encode()).digest()[0] % 10 == 0


def draw(rng: random.Random, *, size: int) -> Example:
    """A problem that is not kept for the test, in any form."""
    return example(drawn_problem(rng), rng.choice(FORMS))


def drawn_problem(rng: random.Random) -> Problem:
    """A problem that is not kept for the test; most have two digits on both sides."""
    while True:
        left, right = rng.randrange(10, 100), rng.randrange(10, 100)
        if rng.random() < SHARE_SMALL:
            left, right = rng.choice(((rng.randrange(10), right), (left, rng.randrange(10)), (left % 10, right % 10)))
        problem = Problem(left=left, sign=rng.choice("+-"), right=right)
        if not problem.is_held_out:
            return problem


def example(problem: Problem, form: str, *, shows_work: bool = True) -> Example:
    """The problem asked in one of the forms; the answer is the solution, behind the work unless that is thought before."""
    content = f"{digit_by_digit(problem)}\n{problem.solution}" if shows_work else problem.solution
    return Example(skill="arithmetic", messages=(user_says(asked(problem, form)),), answer=Answer(content=content))


def digit_by_digit(problem: Problem) -> str:
    """How the problem is calculated on paper."""
    left, right = problem.left, problem.right
    if problem.sign == "+":
        return added(left, right)
    if left < right:
        return f"{left} is less than {right}, so the result is negative. {right} - {left}: {subtracted(right, left)}"
    return subtracted(left, right)


def added(left: int, right: int) -> str:
    """The sum by units and tens, with the carry."""
    units = left % 10 + right % 10
    carry = units // 10
    tens = left // 10 + right // 10 + carry
    return (
        f"Units: {left % 10} + {right % 10} = {units}, write {units % 10}, carry {carry}. "
        f"Tens: {left // 10} + {right // 10} + {carry} = {tens}."
    )


def subtracted(left: int, right: int) -> str:
    """The difference by units and tens, with what is borrowed; left is not less than right."""
    borrowed = int(left % 10 < right % 10)
    units = left % 10 + 10 * borrowed - right % 10
    tens = left // 10 - right // 10 - borrowed
    return (
        f"Units: {left % 10 + 10 * borrowed} - {right % 10} = {units}, borrow {borrowed}. "
        f"Tens: {left // 10} - {right // 10} - {borrowed} = {tens}."
    )


def asked(problem: Problem, form: str) -> str:
    """The question's text."""
    sign = problem.sign
    return form.format(a=problem.left, b=problem.right, sign=sign, word=WORDS[sign], chinese=CHINESE[sign])


def held_out_problems(rng: random.Random, *, sign: str, count: int) -> tuple[Problem, ...]:
    """So many different problems that are kept from the training."""
    numbers = range(10, 100)
    every = (Problem(left=left, sign=sign, right=right) for left in numbers for right in numbers)
    return tuple(rng.sample([problem for problem in every if problem.is_held_out], count))


def cases() -> tuple[Example, ...]:
    """A hundred sums and a hundred differences of held-out pairs, the forms in turn."""
    rng = random.Random(9)
    problems = [problem for sign in "+-" for problem in held_out_problems(rng, sign=sign, count=CASES_OF_A_SIGN)]
    return tuple(example(problem, FORMS[place % len(FORMS)]) for place, problem in enumerate(problems))
