"""`longcat-pd plan --roofline` and `--advise` as a user sees them: text, YAML that is read again, refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from longcat_pd.cli import main
from longcat_pd.config.resolve import load

CLUSTERS = Path(__file__).parents[2] / "deploy" / "config" / "cluster"
TWIN = CLUSTERS / "lite-sparse-a2-twin.yaml"


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 0
    return capsys.readouterr().out


def test_a_roofline_says_what_bounds_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    out = told(capsys, str(TWIN), "--roofline", "--context", "4096", "--context", "32768", "--sequences", "8")
    assert "estimated for Atlas A2" in out
    prompts = [float(ms) for ms in re.findall(r"^ +\d+ tokens: +([\d.]+) ms", out, re.M)]
    steps = [float(ms) for ms in re.findall(r"8 sequences of +\d+ tokens: +([\d.]+) ms", out)]
    assert len(prompts) == len(steps) == 2
    assert prompts == sorted(prompts)
    assert steps == sorted(steps)
    assert re.search(r"(HBM|links|compute|operator gaps) of \w+ \d+\.\d", out)


def test_the_first_layout_is_yaml_that_is_read(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = told(capsys, str(TWIN), "--advise", "--prefill-cards", "16", "--context", "16384", "--sequences", "16")
    assert re.search(r"^1\. 16 \+ 16 cards: prompt \d+ ms, step [\d.]+ ms, \d+ tokens/s in all", out, re.M)
    assert "the file's own: 16 + 16 cards" in out
    sections: dict[str, Any] = yaml.safe_load(out[out.index("# the first as YAML") :])
    tree = yaml.safe_load(TWIN.read_text())
    tree["model"]["path"] = str((TWIN.parent / tree["model"]["path"]).resolve())
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(tree | sections))
    cluster = load(path)
    assert cluster.prefill is not None
    assert cluster.decode is not None
    first = out[out.index("1. ") : out.index("2. ")]
    assert f"pp {cluster.prefill.parallel.pp_size}" in first or cluster.prefill.parallel.pp_size == 1
    assert f"kvp {cluster.decode.parallel.kvp_size}" in first or cluster.decode.parallel.kvp_size == 1
    assert cluster.decode.engine.max_num_seqs >= 16
    assert cluster.decode.engine.max_model_len == 16384
    assert not out[: out.index("# the first")].count("does not fit")


def test_another_number_of_cards(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--advise",
        "--cards",
        "48",
        "--context",
        "8192",
        "--sequences",
        "8",
        "--target",
        "decode-ms",
        "--top",
        "1",
    ]
    out = told(capsys, str(TWIN), *arguments)
    assert re.search(r"^1\. (16 \+ 32|32 \+ 16) cards", out, re.M)
    assert "2. " not in out
    assert "the file's own:" not in out


@pytest.mark.parametrize(("target", "place"), [("prefill-ms", 0), ("decode-ms", 1)])
def test_the_target_is_what_orders(capsys: pytest.CaptureFixture[str], target: str, place: int) -> None:
    arguments = ["--advise", "--prefill-cards", "16", "--context", "16384", "--sequences", "16", "--top", "99"]
    out = told(capsys, str(TWIN), *arguments, "--target", target)
    found = re.findall(r"^\d+\. 16 \+ 16 cards: prompt (\d+) ms, step ([\d.]+) ms", out, re.M)
    times = [float(both[place]) for both in found]
    assert len(times) > 4
    assert times == sorted(times)
    assert times != [times[0]] * len(times)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--roofline", "--context", "0"], "--context 0: must be from 1 to 1073741824"),
        (["--roofline", "--context", "999999999999"], "--context 999999999999: must be from 1 to 1073741824"),
        (["--advise", "--prefill-cards", "32"], "--prefill-cards 32: must be at least 1 and less than 32"),
        (["--advise", "--context", "1"], "--context 1: must be at least 2"),
        (["--advise", "--cards", "0"], "--cards 0: must be from 1 to 16384"),
        (["--advise", "--cards", "1000000000"], "--cards 1000000000: must be from 1 to 16384"),
        (["--advise", "--top", "0"], "--top 0: must be from 1 to"),
        (["--advise", "--cards-per-node", "0"], "--cards-per-node 0: must be from 1 to"),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], arguments: list[str], line: str) -> None:
    assert main(["plan", str(TWIN), *arguments]) == 2
    assert f"error: {line}" in capsys.readouterr().err


@pytest.mark.parametrize("other", ["--json", "--ranks", "--meta", "--html=x", "--advise"])
def test_what_estimates_would_ignore_is_refused(capsys: pytest.CaptureFixture[str], other: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(TWIN), "--roofline", other])
    said = capsys.readouterr()
    assert ended.value.code == 2 and said.out == "" and "stands alone, not with " in said.err


def test_no_rates_without_a_card(capsys: pytest.CaptureFixture[str]) -> None:
    path = str((CLUSTERS / "../model/LongCat-Flash-Lite-Sparse").resolve())
    arguments = [str(CLUSTERS / "twin-cpu.yaml"), "--set", f"model.path={path}", "--roofline", "--context", "4096"]
    assert main(["plan", *arguments]) == 2
    assert "name a card with --card (A2, A3)" in capsys.readouterr().err
    assert "estimated for Atlas A3" in told(capsys, *arguments, "--card", "A3")


def test_it_starts_without_torch() -> None:
    code = "import sys, longcat_pd.plan.command; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert done.returncode == 0


def test_what_nothing_holds_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(TWIN), "--advise", "--prefill-cards", "16", "--context", "1000000000"]) == 2
    assert "no pair of layouts fits 8 sequences of 1000000000 tokens" in capsys.readouterr().err


def test_the_usual_length_is_one_that_can_be_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert "sequences of 131072 tokens" in told(capsys, str(TWIN), "--advise", "--prefill-cards", "16")
