"""`make bench-stages`: the published path of one decode step of LongCat-Flash-Lite, stage by stage, on one tiny checkpoint.

Every stage is a configuration of the same engine, with two rank processes: a split, and which operators are slow, obvious
twins (``engine.unfused``). All give the same tokens, or the bench fails. The stages take turns, so that ratios hold where
absolute times do not. Then what more sequences bring to the same split, and what int8 does.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from longcat_pd import log
from longcat_pd.bench import report
from longcat_pd.bench.client import prompt
from longcat_pd.bench.driven import Driven, driven
from longcat_pd.bench.report import Row, compared
from longcat_pd.bench.servers import BenchFailed, make_checkpoint, quantized

PORT, PORTS_EACH = 24400, 10
SLOTS, BATCH, BATCHES = 8, 2, (2, 4, 8)
ENGINE = (
    "engine.block_size=16",
    "engine.max_model_len=512",
    "engine.max_num_batched_tokens=256",
    "engine.prefix_cache=false",
)
FLOAT = ("model.dtype=float32",)
SIZES = (
    *("hidden_size=192", "num_layers=2", "ffn_hidden_size=256", "expert_ffn_hidden_size=64"),
    *("n_routed_experts=64", "zero_expert_num=32", "moe_topk=12"),
)
WIDE = ("hidden_size=1056", "num_layers=2", "ffn_hidden_size=2048", "expert_ffn_hidden_size=1024", "n_routed_experts=8")

TENSORS = (
    *("parallel.attn_tp_size=2", "parallel.dense_tp_size=2", "parallel.moe_tp_size=2"),
    *("parallel.embed_tp_size=2", "parallel.lmhead_tp_size=2"),
)
EXPERTS = (
    *("parallel.dp_size=2", "parallel.ep_size=2", "parallel.ngram_embed_tp_size=2", "parallel.lmhead_tp_size=2"),
    "parallel.moe_dispatch=gather",
)
COUNTED = (*EXPERTS[:-1], "parallel.moe_dispatch=all_to_all")
GRAPH = ("engine.exe_mode=inductor",)


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One configuration. ``published_ms``: what the same step of the path took for the whole model on eight A3 cards."""

    name: str
    settings: tuple[str, ...]
    unfused: tuple[str, ...] = ()
    slots: int = SLOTS
    published_ms: float

    @property
    def all_settings(self) -> tuple[str, ...]:
        """As in `serve --set`."""
        sizes = f"engine.buckets={sorted({1, self.slots // 2})}" if self.is_compiled else "engine.buckets=[]"
        unfused = f"engine.unfused=[{', '.join(self.unfused)}]"
        return (*ENGINE, *self.settings, f"engine.max_num_seqs={self.slots}", sizes, unfused)

    @property
    def is_compiled(self) -> bool:
        """Whether its start takes a compiler: a graph for one sequence of each group, and one for all its slots."""
        return set(GRAPH) <= {*self.settings}


STAGES = (
    Stage(
        name="TP 2, eager; attention by hand, a loop over all experts",
        settings=TENSORS,
        unfused=("attention", "experts", "norms", "prolog"),
        published_ms=273.0,
    ),
    Stage(
        name="split: attention DP 2, EP 2, n-gram tables and head TP 2",
        settings=COUNTED,
        unfused=("attention", "experts", "norms", "prolog"),
        published_ms=84.1,
    ),
    Stage(name="paged, fused attention", settings=COUNTED, unfused=("experts", "norms", "prolog"), published_ms=75.5),
    Stage(name="fused norms and activations", settings=COUNTED, unfused=("experts", "prolog"), published_ms=68.5),
    Stage(name="dispatch by gather, experts in runs", settings=EXPERTS, unfused=("prolog",), published_ms=43.2),
    Stage(name="compiled step", settings=(*EXPERTS, *GRAPH), unfused=("prolog",), slots=BATCH, published_ms=9.10),
    Stage(name="fused front of the attention", settings=(*EXPERTS, *GRAPH), published_ms=8.10),
)


@dataclass(frozen=True, kw_only=True)
class Load:
    """What every stage decodes: ``rounds`` that count, after one that warms up."""

    rounds: int = 5
    length: int = 200
    num_tokens: int = 32

    def prompts(self, seed: int, *, batch: int) -> list[list[int]]:
        """Prompts of one round."""
        return [prompt(self.length, seed=seed * 1000 + number) for number in range(batch)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the tables; with ``--write`` also put them into a page. 1: stages that differ in a token."""
    parser = argparse.ArgumentParser(prog="python -m longcat_pd.bench.stages", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="replace the figures between the page's markers")
    parser.add_argument("--rounds", type=int, default=Load.rounds, help="rounds that count, after one that warms up")
    options = parser.parse_args(arguments)
    load = Load(rounds=options.rounds)
    log.set_up(level="warning")
    with tempfile.TemporaryDirectory(prefix="longcat-stages-") as scratch:
        folder = Path(scratch)
        model = make_checkpoint(folder / "lite", "lite", dtype="float32", overrides=SIZES)
        wide = make_checkpoint(folder / "wide-lite", "lite", dtype="bfloat16", overrides=WIDE)
        try:
            figures = asyncio.run(_measured(folder, model, wide, load=load))
        except BenchFailed as failure:
            sys.stderr.write(f"{failure}\n")
            return 1
    sys.stdout.write(figures + "\n")
    if options.write:
        report.write(options.write, figures, report.BEGIN_STAGES)
    return 0


async def _measured(folder: Path, model: Path, wide: Path, *, load: Load) -> str:
    rows = list[Row]()
    async with AsyncExitStack() as stack:
        engines = await started(stack, model, STAGES, folder=folder)
        times = await replay(engines, load)
        sys.stderr.write(stage_table(STAGES, times) + "\n")
        for stage in (STAGES[4], STAGES[6]):
            rows += scaling_rows(stage.name, await scaled(engines[stage.name], load))
    rows += await int8_rows(folder, wide, load=load)
    return report.table(f"{report.machine()}\n\n{stage_table(STAGES, times)}", rows)


async def started(
    stack: AsyncExitStack, model: Path, stages: Sequence[Stage], *, folder: Path, port: int = PORT
) -> dict[str, Driven]:
    """Engines of all these stages by name, one after the other; they end with ``stack``.

    ``folder``: compiled steps are kept there; empty, they are compiled.
    """
    found = dict[str, Driven]()
    for number, stage in enumerate(stages):
        settings = (*stage.all_settings, *FLOAT, f"engine.compile_cache={folder / 'compiled'}")
        found[stage.name] = await stack.enter_async_context(driven(model, settings, port=port + PORTS_EACH * number))
    return found


async def replay(engines: Mapping[str, Driven], load: Load) -> dict[str, list[float]]:
    """Median seconds of a decode step of each stage, round by round.

    Raises:
        BenchFailed: a stage said something else than the first one.
    """
    times: dict[str, list[float]] = {name: [] for name in engines}
    for seed in range(1 + load.rounds):
        prompts, wanted = load.prompts(seed, batch=BATCH), None
        for name, engine in engines.items():
            took, texts = await _decoded(engine, prompts, load)
            times[name].append(took)
            wanted = wanted or texts
            if texts != wanted:
                raise BenchFailed(f"{name}: other tokens than the first stage:\n{texts}\n{wanted}")
    return {name: found[1:] for name, found in times.items()}


async def scaled(engine: Driven, load: Load) -> dict[int, list[float]]:
    """Tokens per second of batches, round by round."""
    rates: dict[int, list[float]] = {batch: [] for batch in BATCHES}
    for seed in range(1 + load.rounds):
        for batch, found in rates.items():
            took, _ = await _decoded(engine, load.prompts(seed, batch=batch), load)
            found.append(batch / took)
    return {batch: found[1:] for batch, found in rates.items()}


async def int8_rows(folder: Path, wide: Path, *, load: Load) -> list[Row]:
    """int8 against the same checkpoint in bfloat16, both split like the last stages."""
    stored = {"bf16": wide, "int8": quantized(wide, folder / "wide-lite-int8")}
    settings = (*ENGINE, *EXPERTS, f"engine.max_num_seqs={SLOTS}", "model.dtype=bfloat16")
    async with AsyncExitStack() as stack:
        engines = {
            name: await stack.enter_async_context(driven(path, settings, port=PORT + PORTS_EACH * number))
            for number, (name, path) in enumerate(stored.items())
        }
        rows = []
        for batch in (BATCHES[0], BATCHES[-1]):
            times: dict[str, list[float]] = {name: [] for name in engines}
            for seed in range(1 + load.rounds):
                for name, engine in engines.items():
                    times[name].append((await _decoded(engine, load.prompts(seed, batch=batch), load))[0])
            what = f"decode step, batch {batch}, Lite of hidden size 1056, W8A8"
            rows.append(compared(what, times["int8"][1:], times["bf16"][1:], unit="ms", them="bfloat16"))
    return rows


async def _decoded(engine: Driven, prompts: Sequence[Sequence[int]], load: Load) -> tuple[float, list[tuple[int, ...]]]:
    """Median seconds of the steps that decoded all of them, and their tokens."""
    engine.step_s.clear()
    texts = await engine.answers(prompts, num_tokens=load.num_tokens)
    return statistics.median(engine.step_s[len(prompts)]), texts


def scaling_rows(name: str, rates: Mapping[int, Sequence[float]]) -> Iterator[Row]:
    """Each batch against the smallest."""
    first, *others = rates
    for batch in others:
        yield compared(
            f"output tokens/s, batch {batch}, stage: {name}", rates[batch], rates[first], unit="", them=f"batch {first}"
        )


def stage_table(stages: Sequence[Stage], times: Mapping[str, Sequence[float]]) -> str:
    """Milliseconds of a step, and how many times as fast it is as the stage before and as the first one.

    Factors are medians of those of the single rounds.
    """
    lines = [
        "| stage | ms per step | factor | cumulative | published ms | factor | cumulative |",
        "|---|---|---|---|---|---|---|",
    ]
    first = before = stages[0]
    for number, stage in enumerate(stages, 1):
        ours = [f"{_factor(times[other.name], times[stage.name]):.2f}" for other in (before, first)]
        theirs = [f"{other.published_ms / stage.published_ms:.2f}" for other in (before, first)]
        took = statistics.median(times[stage.name]) * 1000
        cells = [f"{number}. {stage.name}", f"{took:.2f}", *ours, f"{stage.published_ms:g}", *theirs]
        lines.append(f"| {' | '.join(cells)} |")
        before = stage
    return "\n".join(lines)


def _factor(slow: Sequence[float], fast: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(slow, fast, strict=True))


if __name__ == "__main__":
    sys.exit(main())
