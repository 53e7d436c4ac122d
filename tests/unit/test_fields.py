from __future__ import annotations

from collections.abc import Callable

import pytest

from longcat_pd.config.fields import Fields
from longcat_pd.errors import ConfigError


def test_first_present_alias_wins_and_null_is_absent() -> None:
    read = Fields({"a": None, "b": 3, "c": 4})
    assert read.integer("a", "b", "c") == 3
    assert read.integer("a", default=7) == 7
    assert not read.has("a") and read.has("a", "c")


def test_a_missing_value_names_all_its_spellings() -> None:
    with pytest.raises(ConfigError, match="lacks x or y") as raised:
        Fields({}).integer("x", "y")
    assert raised.value.param == "x"


def test_a_nested_record_knows_its_path() -> None:
    inner = Fields({"outer": {"n": -1}, "empty": {}}).record("outer")
    assert inner is not None
    with pytest.raises(ConfigError) as raised:
        inner.integer("n")
    assert raised.value.param == "outer.n"
    assert Fields({"empty": {}}).record("empty") is None
    assert Fields({}).record("empty") is None


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: Fields({"x": True}).integer("x"),
        lambda: Fields({"x": 1.0}).integer("x"),
        lambda: Fields({"x": True}).number("x"),
        lambda: Fields({"x": 0}).number("x"),
        lambda: Fields({"x": -1}).number("x", minimum=0.0),
        lambda: Fields({"x": 1}).boolean("x", default=True),
        lambda: Fields({"x": 1}).text("x", default=""),
        lambda: Fields({"x": "c"}).choice("x", ("a", "b"), default="a"),
        lambda: Fields({"x": [1, "2"]}).integers("x", default=(1,)),
        lambda: Fields({"x": "1:2:3"}).ranges("x"),
    ],
)
def test_wrong_kinds_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as raised:
        wrong()
    assert raised.value.param == "x"


def test_zero_is_allowed_where_the_minimum_says_so() -> None:
    assert Fields({"x": 0}).number("x", minimum=0.0) == 0.0
    assert Fields({"x": 0}).integer("x", minimum=0) == 0


def test_ranges() -> None:
    assert Fields({"x": "1:2, 5:9"}).ranges("x") == ((1, 2), (5, 9))
    assert Fields({}).ranges("x") == ()
