"""The page of figures: only what is between the markers changes."""

from __future__ import annotations

from pathlib import Path

import pytest

from longcat_pd.bench.ahead import exposed
from longcat_pd.bench.report import BEGIN, END, Row, compared, table, write
from longcat_pd.metrics import Metrics

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def test_figures_replace_figures_and_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"method\n{BEGIN}\nold\n{END}\nend\n")
    write(page, "new")
    write(
        page,
        table(
            "a machine",
            [Row(what="first token", ours="2 ms", other="1 ms", ratio=2.0, goal="≤ 1.25"), Row(what="x", ours="y")],
        ),
    )
    text = page.read_text()
    assert text.startswith(f"method\n{BEGIN}\n\na machine\n")
    assert text.endswith(f"| x | y |  |  |  |\n\n{END}\nend\n")
    assert "| first token | 2 ms | 1 ms | 2.00 | ≤ 1.25 |" in text
    assert "old" not in text
    assert "new" not in text


def test_a_ratio_is_that_of_the_turns_not_of_the_medians() -> None:
    row = compared("x", [0.001, 0.020, 0.300], [0.002, 0.010, 0.100], unit="ms", them="other")
    assert (row.ours, row.other, row.ratio) == ("20.0 ms", "other 10.0 ms", pytest.approx(2.0))
    row = compared("x", [1.0, 9.0, 9.0], [1.0, 3.0, 9.0], unit="")
    assert (row.ours, row.other, row.ratio) == ("9", "one engine 3", 1.0)


def test_values_have_their_unit_and_digits_that_tell_them_apart() -> None:
    assert compared("x", [0.00412], [0.0104], unit="ms", them="y").ours == "4.12 ms"
    assert compared("x", [4.12], [61.04], unit="s", them="y").other == "y 61.0 s"
    assert compared("x", [411.6], [1.0], unit="").ours == "412"


def test_the_exposed_share_comes_from_the_waits_of_decode_steps() -> None:
    metrics = Metrics(role="decode", instance="d0")
    for waited, computed in ((0.0, 0.030), (0.002, 0.008)):
        metrics.engine.step_wait_seconds.observe(waited)
        metrics.engine.step_compute_seconds.observe(computed)
        metrics.engine.driver_step_seconds("decode").observe(0.001)
    metrics.engine.driver_step_seconds("prefill").observe(7.0)
    assert exposed(metrics.render().decode()) == (pytest.approx(0.001), pytest.approx(0.05))


def test_a_page_without_markers_is_left_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(AssertionError, match="lacks the markers"):
        write(page, "new")
    assert page.read_text() == "nothing here"


def test_our_page_has_them() -> None:
    text = PAGE.read_text()
    assert text.index(BEGIN) < text.index(END)
