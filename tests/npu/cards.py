"""Cards of this machine, if there are any: what runs on them in processes of their own, and what is compared.

Nothing here needs torch_npu before a card is asked for; the same tasks run on CPU, so that they are tested without one.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import multiprocessing
import os
import random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.kernels import Ops
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from tests.compiled import Crowd, Said, Work, with_engine
from tests.npu import device
from tests.npu.cases import FusedCase, fused
from tests.npu.ranks import TABLE, live
from tests.parity.gloo import rank_specs
from tests.slots import GREEDY

R = TypeVar("R")
BLOCK, SLOTS, NUM_BLOCKS, MAX_LEN = 128, 4, 24, 512
LENGTHS, NUM_NEW = (1, 20, 60, 90, 127, 128, 129, 160, 200, 240), 4
CROWD = Crowd(at_once=3, joining=2)
RULE = replace(GREEDY, num_logprobs=0)
NEAR, NEAR_ON_AVERAGE, SHARE = 0.3, 0.1, 0.5  # log-probs, and how many tokens have to agree


@functools.cache
def cards() -> tuple[int, str]:
    """How many there are, and why there are none. Imports torch_npu where it can be had."""
    if importlib.util.find_spec("torch_npu") is None:
        return 0, "torch_npu is not installed"
    held = device.installed()
    if held is not None and not held.real:
        return 0, "this process holds stand-ins of the operators, `make test-hardware` does not"
    if any(Path(folder, "stand_in.c").is_file() for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder):
        return 0, "link stand-ins are in place of CANN"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            api: Any = importlib.import_module("torch_npu").npu
            return api.device_count(), "torch_npu sees no device"
    except (ImportError, OSError, RuntimeError) as error:
        return 0, f"torch_npu does not load ({error})"


def in_processes(specs: Sequence[RankSpec], task: Callable[..., R], *arguments: object) -> list[R]:
    """``task(spec, mesh, *arguments)`` on every rank, each in a new process on its own card (or on CPU)."""
    context = multiprocessing.get_context("forkserver")  # whose server never sees a card
    context.set_forkserver_preload(["torch", "longcat_pd.engine.runner"])
    with ProcessPoolExecutor(len(specs), mp_context=context) as pool:
        futures = [pool.submit(_joined, spec, task, arguments) for spec in specs]
        return [future.result(timeout=1800) for future in futures]  # a step may have to be compiled


def _joined(spec: RankSpec, task: Callable[..., R], arguments: tuple[object, ...]) -> R:
    platform = platform_of(spec.instance.device)
    platform.prepare_rank()
    if spec.instance.device == "npu":
        platform.runtime.prepare(spec.rank)
    mesh = Mesh.join(spec)
    try:
        return task(spec, mesh, *arguments)
    finally:
        mesh.leave()


def specs_on(kind: str, path: Path, parallel: ParallelConfig | None = None, num_drafts: int = 0) -> list[RankSpec]:
    """An instance in bf16 on "cpu" or on "npu"."""
    found = []
    for made in rank_specs(path, parallel or ParallelConfig(), num_drafts=num_drafts, timeout_s=600.0):
        spec = with_engine(made, block_size=BLOCK, max_num_seqs=SLOTS, max_model_len=MAX_LEN, num_blocks=NUM_BLOCKS)
        model = replace(spec.instance.model, dtype="bfloat16")
        found.append(replace(spec, instance=replace(spec.instance, device=kind, model=model)))
    return found


def work() -> list[Work]:
    """Prompts below, at and above a block."""
    draw = random.Random(3)
    return [Work([draw.randrange(32, 1000) for _ in range(length)], RULE, num_new=NUM_NEW) for length in LENGTHS]


def load_in_16_bits(device_kind: str, **options: object) -> Ops:
    """In place of ``kernels.load``: a rank on cpu computes with the table as a card has it, over CPU kernels."""
    assert device_kind == "cpu", device_kind
    return TABLE("npu", npu=kernels.NpuSettings(is_overlapped=False, is_prefetched=False))


def answers(spec: RankSpec, mesh: Mesh, at_most: int | None = None) -> list[Said]:
    """A task: prompts and decode steps; the first ``at_most`` of them."""
    return live(spec, mesh, work()[:at_most], CROWD, False)


def answers_of_cpu_kernels(spec: RankSpec, mesh: Mesh) -> list[Said]:
    """The same in a process that keeps the NPU's table."""
    device.install()
    kernels.load = load_in_16_bits
    return answers(spec, mesh)


def check_answers(found: Sequence[Said], wanted: Sequence[Said]) -> None:
    """Most tokens are the same, and their log-probs agree.

    An answer is followed to its first token that is another one or whose log-prob is far away: where another expert or key
    is chosen because of the last bit, a 16-bit computation goes another way, and everything behind it is different.
    """
    aways = []
    assert len(found) == len(wanted), f"there is {len(found)} answer of {len(wanted)}"
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert len(one.ids) == len(other.ids) == len(one.logprobs) == len(other.logprobs), (
            f"answer {number} has {len(one.ids)} tokens"
        )
        for place, token in enumerate(other.ids):
            away = abs(one.logprobs[place] - other.logprobs[place])
            if one.ids[place] != token or not away <= NEAR:
                break
            aways.append(away)
    total = sum(len(other.ids) for other in wanted)
    assert len(aways) >= SHARE * total, f"{len(aways)} of {total} tokens agree"
    average = sum(aways) / len(aways)
    assert average <= NEAR_ON_AVERAGE, f"log-probs are {average:.3g} away on average"


def exchanged(spec: RankSpec, mesh: Mesh) -> dict[str, Tensor]:
    """A task for two ranks: every collective, and a message each way."""
    axis = mesh.axis("kvp")
    x = numbers(axis.rank).to(spec.instance.device)
    parts = {
        "all_gather": axis.all_gather(x),
        "all_gather of columns": axis.all_gather(x, 1),
        "all_to_all": axis.all_to_all(x),
        "reduce_scatter": axis.reduce_scatter(x),
        "all_reduce": axis.all_reduce(x),
    }
    if axis.rank == 0:
        axis.send(x, 1)
        parts["message"] = axis.recv(x.shape, x.dtype, 1)
    else:
        parts["message"] = axis.recv(x.shape, x.dtype, 0)
        axis.send(x, 0)
    return {name: tensor.cpu() for name, tensor in parts.items()}


def numbers(rank: int) -> Tensor:
    """bf16 [4, 8], whose sums are exact."""
    return (torch.arange(32).view(4, 8) + 100 * rank).to(torch.bfloat16)


def expected_exchange(rank: int) -> dict[str, Tensor]:
    mine, other = numbers(rank), numbers(1 - rank)
    both, half = (numbers(0), numbers(1)), slice(2 * rank, 2 * rank + 2)
    return {
        "all_gather": torch.cat(both),
        "all_gather of columns": torch.cat(both, 1),
        "all_to_all": torch.cat([part[half] for part in both]),
        "reduce_scatter": (mine + other)[half],
        "all_reduce": mine + other,
        "message": other,
    }


def check_exchange(found: Sequence[dict[str, Tensor]]) -> None:
    for rank, parts in enumerate(found):
        expected = expected_exchange(rank)
        assert parts.keys() == expected.keys()
        for name, wanted in expected.items():
            assert torch.equal(parts[name], wanted), f"{name} on rank {rank}"


def fused_on_cards(spec: RankSpec, mesh: Mesh, case: FusedCase) -> dict[str, Tensor]:
    """A task: the fused pair over the communicator that the product makes for it."""
    mesh.warm_up()
    return fused(case, spec.rank, mesh.axis("ep").communicator, f"npu:{spec.rank}")
