"""`make bench`: prefill + decode against one engine, one engine against transformers, start-up and memory.

Whatever is compared is measured in the same run, in turn, so that ratios hold where absolute times do not.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from longcat_pd.bench import client, report
from longcat_pd.bench.report import Row
from longcat_pd.bench.servers import Served, cluster, engine, make_checkpoint, resident_mib

CHAT_SIZES = ("hidden_size=256", "num_layers=4", "ffn_hidden_size=512", "expert_ffn_hidden_size=128", "n_routed_experts=24")
PAIR = """
model: {path: %s, served_name: bench}
load_balancer: {port: 24081}
prefill:
  parallel: {pp_size: %d, cp_size: %d}
  engine: {block_size: 16, max_num_batched_tokens: 256, max_num_seqs: 16}
  instances: [{name: p0, http_port: %d}]
decode:
  parallel: {kvp_size: %d, attn_tp_size: %d}
  engine: {block_size: 16, max_num_seqs: 16}
  instances: [{name: d0, http_port: %d}]
"""
ENGINE = ("engine.block_size=16", "engine.max_num_batched_tokens=256", "engine.max_num_seqs=16")
ENGINE_PORT = 24181


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything and print the table; with ``--write`` also put it into a page."""
    parser = argparse.ArgumentParser(prog="python -m longcat_pd.bench", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="replace the figures between the page's markers")
    parser.add_argument("--rounds", type=int, default=20, help="requests of each first-token figure")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request of the rate figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="longcat-bench-") as scratch:
        folder = Path(scratch)
        rows = [*pair_rows(folder, rounds=options.rounds), *rate_rows(folder, num_tokens=options.tokens)]
    figures = report.table(_machine(), rows)
    sys.stdout.write(figures + "\n")
    if options.write:
        report.write(options.write, figures)
    return 0


def pair_rows(folder: Path, *, rounds: int) -> Iterator[Row]:
    """First-token time, start-up and memory of two topologies, each beside one engine with the same checkpoint."""
    model = make_checkpoint(folder / "tiny-2.0", "2.0", dtype="float32")
    for pp, cp, kvp in ((1, 1, 1), (2, 2, 2)):
        config = folder / f"pair-{pp}x{cp}-{kvp}.yaml"
        config.write_text(PAIR % (model, pp, cp, 24200, kvp, kvp, 24300), encoding="utf-8")
        name = f"P(pp {pp} x cp {cp}) + D(kvp {kvp})"
        with ExitStack() as stack:
            alone = stack.enter_context(engine(model, ENGINE_PORT, folder=folder, settings=ENGINE))
            pair = stack.enter_context(cluster(config, root=folder))
            for length in (32, 256):
                urls = {"pair": pair.url, "alone": alone.url}
                times = asyncio.run(client.alternate(urls, length=length, rounds=rounds))
                yield Row(
                    what=f"first token, prompt {length}, {name}",
                    ours=f"{times['pair'] * 1000:.1f} ms",
                    other=f"one engine {times['alone'] * 1000:.1f} ms",
                    ratio=times["pair"] / times["alone"],
                    goal="≤ 1.25" if (pp, cp, kvp) == (1, 1, 1) else "",
                )
            yield Row(what=f"start until ready, {name}", ours=f"{pair.start_s:.1f} s", goal="≤ 60 s")
            yield from _memory_rows(name, pair)


def _memory_rows(name: str, served: Served) -> Iterator[Row]:
    for process, pid in served.pids.items():
        memory = resident_mib(pid)
        ranks = f", its {memory['processes'] - 1:.0f} rank and helper processes {memory['ranks']:.0f}"
        yield Row(
            what=f"memory of {process}, {name}",
            ours=f"{memory['driver']:.0f} MiB{ranks if memory['processes'] > 1 else ''}",
            goal="≤ 100 MiB" if process == "balancer" else "",
        )


def rate_rows(folder: Path, *, num_tokens: int) -> Iterator[Row]:
    """Output tokens per second of one engine against transformers' `generate`, same weights, one torch thread each."""
    model = make_checkpoint(folder / "chat", "chat", dtype="float32", overrides=CHAT_SIZES)
    command = [sys.executable, "-m", "longcat_pd.bench.judge", "--model", str(model), "--threads", "1"]
    with ExitStack() as stack:
        alone = stack.enter_context(engine(model, ENGINE_PORT, folder=folder, settings=ENGINE))
        judge = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
        for batch in (1, 8):
            ours, theirs = [], []
            for seed in range(4):
                ours.append(asyncio.run(_our_rate(alone.url, batch=batch, num_tokens=num_tokens, seed=seed)))
                theirs.append(_their_rate(judge, f"{batch} 32 {num_tokens} {seed}"))
            mine, other = statistics.median(ours[1:]), statistics.median(theirs[1:])
            yield Row(
                what=f"output tokens/s, chat, batch {batch}",
                ours=f"{mine:.0f}",
                other=f"transformers generate {other:.0f}",
                ratio=mine / other,
            )
        assert judge.stdin is not None
        judge.stdin.close()


async def _our_rate(url: str, *, batch: int, num_tokens: int, seed: int) -> float:
    async with client.client() as http:
        return await client.output_rate(http, url, batch=batch, length=32, num_tokens=num_tokens, seed=seed)


def _their_rate(judge: subprocess.Popen[str], order: str) -> float:
    assert judge.stdin is not None
    assert judge.stdout is not None
    judge.stdin.write(order + "\n")
    judge.stdin.flush()
    return float(judge.stdout.readline())


def _machine() -> str:
    python = f"Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({platform.machine()}), {python}, float32, one torch thread a rank."


if __name__ == "__main__":
    sys.exit(main())
