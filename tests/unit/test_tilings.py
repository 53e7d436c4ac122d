"""Who is to read what, and what is said where ranks read something else."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.quantization import int8_section
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.models.stage import Stage
from longcat_pd.sizing.readers import Use, int8_of, tensors_of, uses_of
from longcat_pd.sizing.tilings import Complaints, Part, StageReads
from longcat_pd.tiny.configs import make_config
from tests.releases import CHAT, FULL_2_0, LITE

LITE_SPARSE = LITE | {name: value for name, value in FULL_2_0.items() if name.startswith(("index_", "mtp_", "cli_"))}
FOUR = ParallelConfig(dp_size=2, kvp_size=2, attn_tp_size=2, dense_tp_size=2, ep_size=4)
WHOLE = Use("norm", (8,), None)
ROWS = Use("rows", (8, 4), "attn_tp")
EXPERT = Use("expert", (8, 4), "ep", 2)


def told(use: Use, parts: dict[int, Part], parallel: ParallelConfig = FOUR) -> list[str]:
    """What is said of one tensor that ranks read in parts."""
    reads, complaints = StageReads(parallel, 0), Complaints()
    for rank in reads.ranks:
        reads.add(rank, [(use.name, parts[rank])] if rank in parts else [])
    list(reads.against([use], complaints))
    return [line.removeprefix("x: 1 ") for line in complaints.lines("x")]


def rows(*ends: int) -> list[Part]:
    return [((first, end), (0, 4)) for first, end in itertools.pairwise(ends)]


def test_what_the_layout_says_is_not_complained_of() -> None:
    assert told(WHOLE, dict.fromkeys(range(4), ((0, 8),))) == []
    assert told(ROWS, dict(enumerate(rows(0, 4, 8) * 2))) == []
    assert told(Use("columns", (8, 4), "attn_tp"), dict(enumerate([((0, 8), (0, 2)), ((0, 8), (2, 4))] * 2))) == []
    assert told(EXPERT, {2: ((0, 8), (0, 4))}) == []
    assert told(Use("table", (8, 4), "ep"), {1: ((0, 3), (0, 4)), 2: ((3, 8), (0, 4))}) == [], "of some ranks only"


NOT = "tensors are not read as the layout says: "


@pytest.mark.parametrize(
    ("use", "parts", "line"),
    [
        (WHOLE, {0: ((0, 8),), 1: ((0, 8),), 3: ((0, 8),)}, "norm by rank 2: not at all"),
        (
            WHOLE,
            dict.fromkeys(range(3), ((0, 8),)) | {3: ((0, 4),)},
            "norm by rank 3: 4..8 of 8 in dimension 0 read by none",
        ),
        (ROWS, dict(enumerate([*rows(0, 4, 8), *rows(0, 3), *rows(4, 8)])), "rows by ranks 2..3 of attn_tp: 3..4 of 8 in"),
        (ROWS, dict(enumerate([*rows(0, 4, 8), *rows(0, 5), *rows(4, 8)])), "rows by ranks 2..3 of attn_tp: 4..5 of 8 in"),
        (
            ROWS,
            dict(enumerate([*rows(0, 4, 8), *rows(0, 4, 7)])),
            "rows by ranks 2..3 of attn_tp: 7..8 of 8 in dimension 0",
        ),
        (ROWS, dict(enumerate([*rows(4, 8), *rows(0, 4), *rows(0, 4, 8)])), "rows by ranks 0..1 of attn_tp: 0..4 of 8 in"),
        (
            ROWS,
            dict(enumerate([*rows(0, 4, 8), ((0, 4), (0, 2)), ((4, 8), (2, 4))])),
            "rows by ranks 2..3 of attn_tp: cut in",
        ),
        (EXPERT, {1: ((0, 8), (0, 4))}, "expert by ranks 0..3 of ep: by places [1], not by place 2"),
        (EXPERT, dict.fromkeys((1, 2), ((0, 8), (0, 4))), "expert by ranks 0..3 of ep: by places [1, 2], not by place 2"),
        (EXPERT, {2: ((0, 7), (0, 4))}, "expert by ranks 0..3 of ep: 7..8 of 8 in dimension 0 read by none"),
        (EXPERT, {}, "expert by ranks 0..3 of ep: by places [], not by place 2"),
    ],
)
def test_what_is_read_otherwise_is_named(use: Use, parts: dict[int, Part], line: str) -> None:
    (found,) = told(use, parts)
    assert found.startswith(NOT + line)


def test_what_is_read_twice_by_one_rank_or_by_ranks_of_another_stage_is_named() -> None:
    reads, complaints = StageReads(FOUR, 0), Complaints()
    whole: Part = ((0, 8),)
    for rank in reads.ranks:
        reads.add(rank, [("norm", whole)] * (2 if rank == 3 else 1) + [("other", whole)] * (rank < 2))
    assert list(reads.against([WHOLE], complaints)) == [("norm", 4)]
    (line,) = complaints.lines("decode d0")
    assert line == ("decode d0: 2 tensors are read where the layout does not say it: other by ranks 0..1; norm by rank 3")


def test_of_many_the_first_are_named() -> None:
    complaints = Complaints()
    complaints.add("things are wrong", map(str, range(9)))
    assert list(complaints.lines("x")) == ["x: 9 things are wrong: 0; 1; 2; 6 more"]


def model(fields: dict[str, Any], **more: Any) -> ModelConfig:
    return ModelConfig.from_dict(fields | {"torch_dtype": "bfloat16"} | more)


@pytest.mark.parametrize(("fields", "count"), [(FULL_2_0, 88_748), (LITE_SPARSE, 11_220), (CHAT, 43_756)])
def test_tensors_of_the_releases(fields: dict[str, Any], count: int) -> None:
    """Published: 88,780 for the large one, which carries 2 x 16 tensors of tables for its draft layer that nobody reads."""
    assert len(tensors_of(model(fields), ())) == count


def test_scales_lie_beside_what_is_int8() -> None:
    config = model(FULL_2_0, quantization_config=int8_section(["lm_head"]))
    int8 = int8_of(config)
    assert len(int8) == 38 * (2 * 3 + 768 * 3) + 3 == 87_783
    assert len(tensors_of(config, int8)) == 88_748 + 87_783
    assert int8_of(model(FULL_2_0)) == frozenset()


@pytest.mark.parametrize("variant", ["2.0", "lite-sparse", "lite", "chat"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_the_stages_of_a_pipeline_use_every_tensor_once(variant: str, is_tied: bool) -> None:
    config = ModelConfig.from_dict(make_config(variant, ["tie_word_embeddings=true"] if is_tied else [], dtype="float32"))
    tensors = tensors_of(config, ())
    stages = [
        Stage(layers=range(2), is_first=True, is_last=False, has_draft=False),
        Stage(layers=range(2, 3), is_first=False, is_last=True, has_draft=True),
    ]
    uses = Counter(use.name for stage in stages for use in uses_of(stage, tensors, config, ep_size=2))
    assert uses == Counter(tensors.keys()) + Counter({"model.embed_tokens.weight": is_tied})
