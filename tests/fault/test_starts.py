"""Starts that fail, starts that cannot work, and pools that do not match: failures of the kinds 16, 17 and 18.

Real processes: every one of the instance ends, none is left, the cause is told once, and the same command works afterwards.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fault.bad_ranks import BadRanks, tell
from tests.fault.test_killed import call
from tests.parity.conftest import MakeCheckpoint
from tests.processes import Processes, instance_answer, ready, running
from tests.topology import cluster_file

ENDS_WITHIN_S = 30.0  # the start's own limits, and what a busy machine takes
START_S = 150.0  # until ranks are there on a machine that does many things at once, and then the rendezvous has its limit
LAST_RANK = 3
INDEX = "model.safetensors.index.json"

Mend = Callable[[], None]


def make_file(folder: Path, checkpoint: Path) -> Path:
    return cluster_file(
        folder,
        checkpoint,
        prefill={"pp_size": 2, "cp_size": 2},
        prefill_engine={"compile_cache": str(folder)},
        model={"path": str(checkpoint), "dtype": "float32"},
    )


@contextlib.contextmanager
def ended(processes: Processes) -> Iterator[None]:
    try:
        yield
    finally:
        processes.end()


async def fails_then_works(processes: Processes, mend: Mend, *, status: int, said: str, num_traces: int) -> None:
    """A start of p0 that ends as a whole; what was wrong is mended, and the same command serves."""
    with ended(processes):
        processes.start("p0")
        assert processes.wait("p0", START_S) == status
        assert processes.left_of("p0", grace_s=20.0) == []
        log = processes.log("p0")
        told = [line for line in log.splitlines() if re.search(" (rank_fault|rank_lost|start_refused|stopped) ", line)]
        began, over = (datetime.fromisoformat(line.split()[0]) for line in (told[0], told[-1]))
        print(f"{said}: over {(over - began).total_seconds():.1f} s after it was noticed")
        assert (over - began).total_seconds() < ENDS_WITHIN_S
        assert said in log, log[-2000:]
        assert log.count("Traceback (most recent call last)") == num_traces, log[-4000:]
        assert log.count("start_failed") + log.count("start_refused") == 1 and "exit_status" not in log.split("start_")[0]
        mend()
        processes.start("p0")
        async with httpx.AsyncClient(trust_env=False) as client:
            await ready(processes.http_urls["p0"], client, START_S)


BAD_RANKS = {
    "raise": ("ValueError: a defect of the start", 1),
    "memory": ("MemoryError: no more of it", 1),
    "killed": ("rank 3 ended with status -9", 0),
    "absent": ("ranks [3] did not come up within 15 s", 0),
    "late": ("not all 4 ranks came to the rendezvous", 0),
}


@pytest.mark.parametrize("kind", [k if k == "memory" else pytest.param(k, marks=pytest.mark.slow) for k in BAD_RANKS])
async def test_a_rank_fails_in_the_start(tiny: MakeCheckpoint, tmp_path: Path, kind: str) -> None:
    said, num_traces = BAD_RANKS[kind]
    file = tell(tmp_path, "p0", LAST_RANK, kind)
    processes = BadRanks(make_file(tmp_path, tiny("2.0")))
    await fails_then_works(processes, file.unlink, status=1, said=said, num_traces=num_traces)


def without_a_shard(folder: Path) -> tuple[str, Mend]:
    shards = json.loads((folder / INDEX).read_text())["weight_map"]
    shard = folder / shards["model.layers.2.mlp.router.classifier.weight"]
    aside = shard.rename(shard.with_suffix(".aside"))
    return shard.name, lambda: (aside.rename(shard), None)[1]


def of_another_shape(folder: Path) -> tuple[str, Mend]:
    name = "model.layers.2.mlp.router.classifier.weight"
    shard = folder / json.loads((folder / INDEX).read_text())["weight_map"][name]
    good = shard.read_bytes()
    tensors = load_file(shard)
    save_file({**tensors, name: torch.zeros(3, 5)}, shard)
    return name, lambda: (shard.write_bytes(good), None)[1]


@pytest.mark.slow
@pytest.mark.parametrize("spoil", [without_a_shard, of_another_shape])
async def test_a_checkpoint_that_is_not_whole(
    tiny: MakeCheckpoint, tmp_path: Path, spoil: Callable[[Path], tuple[str, Mend]]
) -> None:
    checkpoint = tmp_path / "m"
    shutil.copytree(tiny("2.0"), checkpoint)
    path = make_file(tmp_path, checkpoint)
    said, mend = spoil(checkpoint)
    await fails_then_works(Processes(path), mend, status=2, said=said, num_traces=0)


CANNOT_WORK = {
    "memory": ("decode.engine.num_blocks=2000000000", "decode d0 needs "),
    "blocks": ("decode.engine.max_model_len=100000", "one sequence of max_model_len=100000 needs "),
    "mode": ("decode.engine.exe_mode=ge_graph", "decode.engine.exe_mode=ge_graph"),
    "operator": ("decode.parallel.moe_dispatch=fused", "moe_dispatch=fused"),
}


def test_a_start_that_cannot_work_is_refused_before_anything_is_loaded(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    processes = Processes(make_file(tmp_path, tiny("2.0")))
    config = str(processes.config)
    with ended(processes):
        for setting, said in CANNOT_WORK.values():
            told = []
            for words in ([], ["--check"]):
                arguments = ["-m", "longcat_pd.decode_worker", "--instance", "d0", "--config", config, "--set", setting]
                processes.launch("d0", [*arguments, *words])
                assert processes.wait("d0") == 2, setting
                log = processes.log("d0")
                told.append([re.sub(r", [0-9.]+ available", "", line) for line in errors(log)])
                assert "weights_loaded" not in log and "Traceback" not in log
            assert told[0] == told[1] and any(said in line for line in told[0]), told
            if setting == CANNOT_WORK["memory"][0]:
                assert all(part in told[0][0] for part in ("cache ", "index keys ")), told


def errors(log: str) -> list[str]:
    return [line for line in log.splitlines() if line.startswith("error: ")]


@pytest.mark.slow
async def test_a_peer_that_does_not_match_is_refused_and_those_that_serve_are_not_disturbed(
    tiny: MakeCheckpoint, tmp_path: Path
) -> None:
    other = tiny("2.0", seed=1)
    path = cluster_file(tmp_path, tiny("2.0"), num_prefill=2, model={"path": str(tiny("2.0")), "dtype": "float32"})
    async with running(path) as (processes, topology):
        await ready(processes.http_urls["p1"], topology.client)
        good = await call(topology, is_streamed=False)
        assert isinstance(good, list)
        lives = {name: (await instance_answer(processes, topology, name, "/ready"))["incarnation"] for name in ("p0", "d0")}
        for setting, field in (("transfer.digest=all", "digest_mode"), (f"model.path={other}", "model_digest")):
            processes.signal("p1")
            processes.wait("p1")
            processes.start("p1", setting)
            assert processes.wait("p1", 60.0) == 2
            assert processes.left_of("p1", grace_s=20.0) == []
            (line,) = errors(processes.log("p1"))
            values = line.partition(f"error: peer d0: {field} differs: ")[2]
            assert values.startswith("prefill ") and ", decode " in values, line
            (told,) = re.findall(f"peer_mismatch .*field={field} .*", processes.log("d0"))
            shown = values.removeprefix("prefill ").split(", decode ")
            assert f"theirs={shown[0]}" in told and f"ours={shown[1]}" in told
            assert await call(topology, is_streamed=True) == good
        for name, life in lives.items():
            said = await instance_answer(processes, topology, name, "/ready")
            assert said["ready"] and said["incarnation"] == life
        processes.start("p1")
        await ready(processes.http_urls["p1"], topology.client)
        assert await call(topology, is_streamed=False) == good
        await topology.idle_within(8.0)
