"""``longcat-pd plan``: text, JSON and page say the same, all findings come at once, and a refusal still shows the plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from longcat_pd.cli import main as cli
from longcat_pd.plan.drawing import PART_COLOURS
from longcat_pd.plan.record import record
from longcat_pd.plan.survey import survey
from longcat_pd.plan.units import size
from longcat_pd.sizing import meta_instance
from longcat_pd.sizing.memory import instance_memory
from longcat_pd.tiny.configs import make_config

CLUSTER = Path(__file__).parents[2] / "deploy" / "config" / "cluster"
LARGE = CLUSTER / "longcat2-a2-192.yaml"
SVG = "{http://www.w3.org/2000/svg}"

Run = Callable[..., tuple[int, str, list[str]]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit status, stdout, lines of stderr."""

    def call(*arguments: object) -> tuple[int, str, list[str]]:
        status = cli(["plan", *map(str, arguments)])
        said = capsys.readouterr()
        return status, said.out, said.err.splitlines()

    return call


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(make_config("2.0", (), dtype="float32")))
    return tmp_path / "tiny"


def test_equal_ranks_are_one_line(run: Run) -> None:
    status, out, err = run(LARGE)
    assert (status, err) == (0, [])
    assert "longcat-2.0: 192 ranks on 12 machines, Atlas A2 (910B), 60.9 GiB of each for ranks" in out
    assert sum(line.startswith("  8-15 stage 1, layers 4-8") for line in out.splitlines()) == 1
    assert "  0-126 " in out and "  127 " in out, "the last rank has fewer rows of the tables"
    assert "num_blocks 2048, 2495 would fit: 33538048 tokens in all groups; 64 sequences at most" in out
    assert "hand-over: 96.4 KiB a token, 1.5 GiB a full chunk" in out
    assert "communicators: kvp = attn_tp = dense_tp (8), ep (128), lmhead_tp (16), ngram_embed_tp (128)" in out
    assert sum("HCCL of d0, d0.1, " in line and "HCCL_IF_BASE_PORT=8282" in line for line in out.splitlines()) == 1


def test_every_rank_on_demand(run: Run) -> None:
    _, out, _ = run(LARGE, "--ranks")
    lines = [line for line in out.splitlines() if " card " in line]
    assert len(lines) == 192
    assert any(line.startswith("  d0 77: 10.0.1.5 card 13: 55.6 GiB; sends ") and "dp 9 kvp 5" in line for line in lines)


def test_json_holds_every_rank_and_adds_up(run: Run) -> None:
    status, out, _ = run(LARGE, "--json")
    said = json.loads(out)
    assert status == 0 and said == json.loads(json.dumps(record(survey(str(LARGE), []))))
    ranks = {instance["name"]: instance["ranks"] for instance in said["instances"]}
    assert {name: len(found) for name, found in ranks.items()} == {"p0": 64, "d0": 128}
    everyone = [rank for found in ranks.values() for rank in found]
    assert said["totals"]["device_bytes"] == sum(rank["device_bytes"] for rank in everyone)
    assert all(rank["device_bytes"] == sum(rank["parts"].values()) for rank in everyone)
    assert said["totals"]["device_bytes"] == sum(said["totals"]["parts"].values())
    assert ranks["d0"][77]["groups"]["lmhead_tp"] == list(range(64, 80))
    assert ["kvp", "attn_tp", "dense_tp"] in ranks["d0"][77]["communicators"]
    assert said["card"]["hbm_gb_s"].keys() == {"value", "source"}
    nodes = {node["node"]: node for node in said["nodes"]}
    assert nodes["10.0.2.1"]["host_bytes"] == sum(
        sum(rank["host_parts"].values()) for rank in ranks["p0"] if rank["node"] == "10.0.2.1"
    )
    assert [service["name"] for service in nodes["10.0.2.4"]["services"]] == ["p0.3", "balancer"]


def test_the_busiest_rank_of_an_uneven_chunk_counts_everywhere() -> None:
    """129 blocks over 8 ranks: one has 17 of them, in what it sends to others and in what it asks its host for."""
    links = survey(str(LARGE), ["prefill.engine.max_num_batched_tokens=16512"]).instances[0].travel.first_links[0]
    assert links.by_part["stages"] == 17 * 128 * 8192 * 2 and links.to_host == 8 * 17 * 128 * 16 * 8


def test_keys_of_the_json_stay() -> None:
    said: dict[str, Any] = record(survey(str(LARGE), []))
    top = "model device card findings advice totals handover instances nodes"
    assert list(said) == top.split()
    assert list(said["instances"][0]) == ["name", "role", "nodes", "parallel", "capacity", "between_nodes", "ranks"]
    rank = "rank node node_rank device stage layers coordinates groups communicators device_bytes parts host_parts links"
    assert list(said["instances"][0]["ranks"][0]) == [*rank.split(), "first_links"]
    assert list(said["instances"][0]["ranks"][0]["links"]) == ["inside", "between", "to_host", "from_host", "by_part"]


@pytest.mark.parametrize("file", ["longcat2-a2-192", "lite-sparse-a2-twin", "chat-a2-64"])
def test_the_page_is_well_formed_and_has_every_rank(run: Run, tmp_path: Path, file: str) -> None:
    status, _, _ = run(CLUSTER / f"{file}.yaml", "--html", tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert status == 0 and text.startswith("<!DOCTYPE html>\n") and "<script" not in text and "prefers-color-scheme" in text
    assert "http" not in text.replace("http://www.w3.org/", "").replace("HTTP", ""), "nothing comes from elsewhere"
    root = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))
    cards = {shape.get("data-rank") for shape in root.iter(f"{SVG}rect") if "card" in (shape.get("class") or "").split()}
    plan = survey(str(CLUSTER / f"{file}.yaml"), [])
    assert cards == {f"{i.spec.name}/{rank.rank}" for i in plan.instances for rank in i.ranks}
    nodes = [shape for shape in root.iter(f"{SVG}rect") if shape.get("class") == "node"]
    assert len(nodes) == sum(len(i.spec.nodes) for i in plan.instances)
    texts = [element.text or "" for element in root.iter(f"{SVG}text")]
    for instance in plan.instances:
        for num_bytes in instance.travel.pairs.values():
            assert any(size(num_bytes) in text for text in texts)
    assert plan.parts.keys() <= PART_COLOURS.keys()


def test_bars_of_a_page_stay_inside_their_cards(run: Run, tmp_path: Path) -> None:
    """Also where a card is too small."""
    status, _, _ = run(LARGE, "--set", "device_memory_gib=20", "--html", tmp_path / "plan.html")
    root = ElementTree.fromstring((tmp_path / "plan.html").read_text().removeprefix("<!DOCTYPE html>\n"))
    assert status == 2
    for group in root.iter(f"{SVG}g"):
        card, _, *bars = group.iter(f"{SVG}rect")
        top, bottom = float(card.get("y", 0)), float(card.get("y", 0)) + float(card.get("height", 0))
        assert "over" in (card.get("class") or "")
        assert all(top < float(bar.get("y", 0)) for bar in bars)
        assert all(float(bar.get("y", 0)) + float(bar.get("height", 0)) <= bottom for bar in bars)


def test_every_rank_is_built_on_demand(run: Run, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was seen comes behind the plan; what is other than planned is a finding beside those of the plan."""
    arguments = (CLUSTER / "twin-cpu.yaml", "--set", f"model.path={checkpoint}", "--meta")
    status, out, err = run(*arguments)
    assert (status, err) == (0, [])
    assert out.startswith("longcat-tiny: 8 ranks on 1 machines") and "prefill p0: 4 ranks built at full size" in out
    assert (
        len(re.findall(r"without memory in \d+ s$", out, re.MULTILINE))
        == out.count("every rank allocates what the plan says")
        == 2
    )
    status, out, _ = run(*arguments, "--json")
    built = json.loads(out)["built"]
    assert status == 0 and [(one["name"], one["num_ranks"], one["findings"]) for one in built] == [
        ("prefill p0", 4, []),
        ("decode d0", 4, []),
    ]
    monkeypatch.setattr(meta_instance, "instance_memory", lambda spec, model: instance_memory(spec, model)[::-1])
    status, out, err = run(*arguments, "--html", tmp_path / "missing" / "plan.html")
    assert status == 2 and "every rank allocates what the plan says" not in out.partition("decode d0: 4 ranks built")[0]
    assert len(json.loads(run(*arguments, "--json")[1])["findings"]) == len(err) - 1
    assert "parts of ranks have other bytes than planned: rank 0: " in err[0] and "--html" in err[-1]
    (checkpoint / "model.safetensors.index.json").write_text("{}")
    status, out, err = run(*arguments)
    assert status == 2 and "weight_map" in err[0] and len(err) == 1 and "prefill p0: 4 ranks on" in out
    status, out, err = run(LARGE, "--set", "model.path=/nonexistent", "--meta")
    assert status == 2 and len(err) == 1 and "built" not in out


def test_all_findings_at_once_and_the_plan_is_still_there(run: Run) -> None:
    status, out, err = run(LARGE, "--set", "device_memory_gib=30", "--set", "decode.engine.num_blocks=0")
    assert status == 2 and "num_blocks 978" in out and "prefill p0: 64 ranks" in out
    assert [line.partition(":")[2].split()[0] for line in err] == ["decode.engine.num_blocks:", "prefill", "decode"]
    assert all(line.startswith("error: ") for line in err)
    assert "decode d0 needs 43.1 GiB a card, 30.0 available: weights 21.7, n-gram tables 2.1, cache 10.2" in err[2]


def test_the_largest_number_of_blocks_is_said_where_none_is_given(run: Run) -> None:
    _, out, _ = run(LARGE, "--set", "decode.engine.num_blocks=0", "--set", "prefill.engine.num_blocks=3")
    assert ", 2495 would fit: " in out and ", 9663 would fit: " in out
    status, _, _ = run(LARGE, "--set", "decode.engine.num_blocks=2495", "--set", "prefill.engine.num_blocks=9663")
    assert status == 0
    status, _, err = run(LARGE, "--set", "decode.engine.num_blocks=2496")
    assert status == 2 and len(err) == 1


def test_a_layout_that_is_wrong_leaves_the_machines(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    status, out, err = run(LARGE, "--set", "model.path=/nonexistent", "--html", page)
    assert status == 2 and len(err) == 1 and "10.0.1.8: d0.7" in out
    ElementTree.fromstring(page.read_text().removeprefix("<!DOCTYPE html>\n"))
    status, out, err = run(LARGE, "--set", "decode.parallel.dp_size=3", "--set", "prefill.parallel.ep_size=5", "--json")
    said = json.loads(out)
    assert status == 2 and len(err) >= 2 and len(said["findings"]) == len(err)
    assert said["instances"] == [] and said["totals"]["ranks"] == 0


def test_a_page_that_cannot_be_written_is_a_finding(run: Run, tmp_path: Path) -> None:
    status, out, err = run(LARGE, "--html", tmp_path / "missing" / "plan.html")
    assert status == 2 and out and err[0].startswith(f"error: --html {tmp_path}/missing/plan.html: cannot be written")


@pytest.mark.parametrize("file", ["local-cpu", "twin-cpu", "hosts4-cpu"])
def test_ranks_on_a_processor_share_their_machine(run: Run, checkpoint: Path, tmp_path: Path, file: str) -> None:
    status, out, err = run(CLUSTER / f"{file}.yaml", "--set", f"model.path={checkpoint}", "--html", tmp_path / "plan.html")
    assert (status, err) == (0, [])
    assert "would fit" not in out and "MiB of a rank" in out and "HCCL" not in out
    root = ElementTree.fromstring((tmp_path / "plan.html").read_text().removeprefix("<!DOCTYPE html>\n"))
    assert any(shape.get("class") == "card" for shape in root.iter(f"{SVG}rect"))


def test_a_node_whose_memory_is_too_small_for_its_tables_is_advised(run: Run) -> None:
    overrides = ["--set", "prefill.parallel.ngram_embed_tp_size=1"]
    status, out, _ = run(LARGE, *overrides)
    assert status == 0
    assert "advice: 10.0.2.1 holds 2059.3 GiB" in out and "a node has 1024 GiB by sizing/cards.py (assumed" in out


def test_a_standalone_engine_has_no_balancer_and_hands_nothing_over(run: Run, tmp_path: Path) -> None:
    file, model = tmp_path / "one.yaml", CLUSTER.parent / "model" / "LongCat-Flash-Lite-Sparse"
    file.write_text(f"""
model: {{path: {model}}}
device: npu
devices_per_node: 8
standalone:
  parallel: {{dp_size: 2, attn_tp_size: 4, ep_size: 8, lmhead_tp_size: 8, ngram_embed_tp_size: 8}}
  engine: {{num_blocks: 1100, max_model_len: 32768, max_num_seqs: 32, max_num_batched_tokens: 4096}}
  instances: [{{name: s0, http_port: 30000, nodes: [10.0.0.1]}}]
""")
    status, out, err = run(file, "--html", tmp_path / "plan.html")
    assert (status, err) == (0, [])
    assert "8 ranks on 1 machines" in out and "balancer" not in out and "hand-over" not in out
    assert "hand-over" not in (tmp_path / "plan.html").read_text()
