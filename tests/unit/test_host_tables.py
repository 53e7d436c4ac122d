"""N-gram tables in the memory of the host: what is looked up where, how it is counted, and where it is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from longcat_pd.config.model import ModelConfig
from longcat_pd.config.resolve import load
from longcat_pd.config.schema import InstanceSpec, ParallelConfig, Role
from longcat_pd.errors import ConfigError
from longcat_pd.models.batch import Rows
from longcat_pd.models.causal_lm import CausalLM
from longcat_pd.models.ngram import NgramEmbedding
from longcat_pd.models.rows import Shares
from longcat_pd.models.stage import Stage, stage_context
from longcat_pd.models.weights import fill_random
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.sizing.memory import instance_memory
from tests.parity.test_memory import spec_of
from tests.releases import FULL_2_0
from tests.unit.stage import FakeAxis, make_context
from tests.unit.test_layout_checks import TABLES, checkpoint
from tests.unit.test_resolve import cluster, refusal

__all__ = ["cluster"]
HOST, CARD = torch.device("cpu"), torch.device("cuda", 0)  # of which there is none: tensors have shapes only


class Exchange(FakeAxis):
    """Rank 1 of two, whose own share is what comes out of every exchange."""

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        return torch.cat((x, x), dim)

    def reduce_scatter(self, x: torch.Tensor) -> torch.Tensor:
        return x.chunk(2)[1]


def numbers(windows: torch.Tensor, **_: torch.Tensor) -> torch.Tensor:
    return torch.empty((len(windows), 16), dtype=torch.int64, device=windows.device)


def embedded(host: torch.device | None, *axes: FakeAxis) -> tuple[NgramEmbedding, torch.Tensor]:
    """The module on a card, and the vectors of two tokens. Nothing may be indexed: torch asks a driver for that."""
    context = replace(make_context("2.0", axes=axes), device=CARD, host=host)
    context = replace(context, ops=replace(context.ops, ngram_ids=numbers, linear=torch.matmul))
    as_is = dict.fromkeys(("take", "give"), lambda _, x, rows: x)
    with FakeTensorMode(), mock.patch.multiple(Shares, **as_is):
        made = NgramEmbedding(context)
        windows = torch.empty((2, 5), dtype=torch.int64, device=CARD)
        return made, made(torch.empty(2, dtype=torch.int64, device=CARD), windows, Rows.even(2, 1))


SPLIT = (Exchange("ngram_embed_tp", 2, 1),)


@pytest.mark.parametrize(("axes", "host"), [((), HOST), (SPLIT, HOST), ((), None)], ids=["whole", "split", "on the card"])
def test_numbers_go_to_the_host_and_vectors_come_back(axes: tuple[FakeAxis, ...], host: torch.device | None) -> None:
    """A look-up of numbers on one device in rows on another is an error on these tensors as it is on real ones."""
    made, vectors = embedded(host, *axes)
    assert made.rows.device == (host or CARD)
    assert {p.device for name, p in made.named_parameters() if name != "rows"} == {CARD} == {vectors.device}
    assert vectors.shape == (2, 96)


def test_rows_on_the_host_have_memory_where_all_else_has_none_and_are_filled() -> None:
    meta = torch.device("meta")
    model = CausalLM(replace(make_context("2.0"), device=meta, host=HOST))
    assert {name for name, p in model.named_parameters() if p.device == HOST} == {"ngram.rows"}
    assert model.ngram is not None
    model.ngram.rows.data.fill_(7.0)
    specs = [spec for spec in model.weight_specs() if "oe_embed_tokens" in spec.name]
    assert fill_random(specs) == model.ngram.rows.numel() * 4
    assert not bool((model.ngram.rows == 7.0).any())
    told = dict(model.memory(model_cache := make_context("2.0").cache))
    assert model_cache is not None and told["n-gram tables on host"] == model.ngram.rows.numel() * 4
    assert told["n-gram tables"] == model.ngram.projection.numel() * 4


def on_npu(role: Role, config: ModelConfig, **parallel: Any) -> InstanceSpec:
    return replace(spec_of(role, config, **parallel), device="npu")


def test_the_plan_counts_rows_on_the_host_apart() -> None:
    config = ModelConfig.from_dict(FULL_2_0)
    sizes: dict[str, Any] = {"pp_size": 2, "cp_size": 8, "ngram_embed_tp_size": 8}
    on_card = instance_memory(on_npu("prefill", config, **sizes), config)
    on_host = instance_memory(on_npu("prefill", config, **sizes, ngram_tables="host"), config)
    rows = [rank.host_parts["n-gram tables"] for rank in on_host]
    assert sum(rows) == 263_630_608 * 512 * 2 and not any(rows[8:])  # 270 GB: those of the first stage's node
    for card, host, num_bytes in zip(on_card, on_host, rows, strict=True):
        assert card.host_parts["n-gram tables"] == 0 and card.total_bytes == host.total_bytes + num_bytes
        assert host.parts["n-gram tables"] == (16 * 512 * 8192 * 2 if host.rank < 8 else 0)


def test_where_the_device_is_the_host_there_is_one_memory() -> None:
    config = ModelConfig.from_dict(FULL_2_0)
    sizes: dict[str, Any] = {"pp_size": 2, "cp_size": 8, "ngram_embed_tp_size": 8}
    there, host = (spec_of("prefill", config, **sizes, ngram_tables=tables) for tables in ("device", "host"))
    assert instance_memory(there, config) == instance_memory(host, config)
    stage, mesh, context = Stage.of(host, config, 0), Mesh.single(), make_context("2.0")
    given = {"config": context.config, "mesh": mesh, "ops": context.ops, "cache": context.cache, "int8": ()}
    hosts = [
        stage_context(stage, spec, **given).host
        for spec in (host, there, *(on_npu("prefill", config, **sizes, ngram_tables=t) for t in ("device", "host")))
    ]
    assert hosts == [None, None, None, HOST]


def test_the_host_is_refused_where_a_graph_would_look_up(cluster: Path) -> None:
    checkpoint(cluster, **TABLES)
    host = "decode.parallel.ngram_tables=host"
    config = load(cluster, [host, "prefill.parallel.ngram_tables=host"])
    assert config.decode is not None and config.decode.parallel == replace(config.decode.parallel, ngram_tables="host")
    assert refusal(cluster, host, "decode.engine.exe_mode=inductor") == [
        "decode.parallel.ngram_tables=host: rows are looked up outside of graphs, and decode.engine.exe_mode=inductor; "
        "use device, or eager"
    ]
    load(cluster, ["prefill.parallel.ngram_tables=host", "decode.engine.exe_mode=inductor"])


def test_the_host_is_refused_where_there_are_no_tables(cluster: Path) -> None:
    assert refusal(cluster, "prefill.parallel.ngram_tables=host") == [
        "prefill.parallel.ngram_tables=host: has no effect, the checkpoint has no n-gram tables; leave it out"
    ]
    with pytest.raises(ConfigError, match=r"ngram_tables"):
        load(cluster, ["prefill.parallel.ngram_tables=disk"])


def test_by_default_rows_are_on_the_device() -> None:
    assert ParallelConfig().ngram_tables == "device"
