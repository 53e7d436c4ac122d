"""`make bench`: the decode step by itself, prefill + decode against one engine, one engine against transformers, memory,
how an overload passes, and what it costs to be looked at.

Whatever is compared is measured in the same run, in turn, so that ratios hold where absolute times do not.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path

from longcat_pd.bench import ahead, client, report, steps
from longcat_pd.bench.grammars import grammar_rows
from longcat_pd.bench.prefixes import prefix_rows
from longcat_pd.bench.recovery import Course, recovery_rows
from longcat_pd.bench.report import Row, compared
from longcat_pd.bench.servers import Served, cluster, cpu_share, engine, make_checkpoint, resident_mib
from longcat_pd.bench.watching import Windows, watching_rows

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
BALANCER_PORT, PREFILL_PORT, DECODE_PORT, ENGINE_PORT = 24081, 24200, 24300, 24181
TRANSFER_COUNTERS = ("longcat_pd_transfer_bytes_total", "longcat_pd_transfer_early_bytes_total")
IDLE_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure everything and print the table; with ``--write`` also put it into a page."""
    parser = argparse.ArgumentParser(prog="python -m longcat_pd.bench", description=__doc__)
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="replace the figures between the page's markers")
    parser.add_argument("--rounds", type=int, default=20, help="requests of each first-token figure")
    parser.add_argument("--tokens", type=int, default=64, help="output tokens of each request of the rate figures")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="longcat-bench-") as scratch:
        folder = Path(scratch)
        parts = (
            steps.step_rows(folder),
            steps.int8_rows(folder),
            pair_rows(folder, rounds=options.rounds),
            rate_rows(folder, num_tokens=options.tokens),
            grammar_rows(folder, port=ENGINE_PORT),
            recovery_rows(folder, Course()),
            watching_rows(folder, Windows()),
        )
        rows = list(_told(chain.from_iterable(parts)))
    figures = report.table(report.machine(), rows)
    sys.stdout.write(figures + "\n")
    if options.write:
        report.write(options.write, figures)
    return 0


def _told(rows: Iterable[Row]) -> Iterator[Row]:
    """The same, each on standard error as soon as it is measured."""
    for row in rows:
        sys.stderr.write(report.line(row) + "\n")
        yield row


def pair_rows(folder: Path, *, rounds: int) -> Iterator[Row]:
    """Two topologies, each beside one engine with the same checkpoint."""
    model = make_checkpoint(folder / "tiny-2.0", "2.0", dtype="float32")
    for pp, cp, kvp in ((1, 1, 1), (2, 2, 2)):
        config = folder / f"pair-{pp}x{cp}-{kvp}.yaml"
        config.write_text(PAIR % (model, pp, cp, PREFILL_PORT, kvp, kvp, DECODE_PORT), encoding="utf-8")
        name = f"P(pp {pp} x cp {cp}) + D(kvp {kvp})"
        with ExitStack() as stack:
            alone = stack.enter_context(engine(model, ENGINE_PORT, folder=folder, settings=ENGINE))
            pair = stack.enter_context(cluster(config, root=folder))
            urls = {"pair": pair.url, "alone": alone.url}
            for length in (32, 256, 1024):
                times = asyncio.run(client.first_tokens_s(urls, length=length, rounds=rounds))
                yield compared(
                    f"first token, prompt {length}, {name}", times["pair"], times["alone"], unit="ms", goal="≤ 1.25"
                )
            yield from prefix_rows({name: pair.url, f"one engine beside {name}": alone.url}, block_size=16)
            yield _early_row(name)
            rates = [asyncio.run(_rates(urls, seed=seed)) for seed in range(4)][1:]
            ours, other = [rate["pair"] for rate in rates], [rate["alone"] for rate in rates]
            yield compared(f"output tokens/s, 4 at once, {name}", ours, other, unit="", goal="")
            yield ahead.exposed_row(f"D of {name}", asyncio.run(client.metrics(f"http://127.0.0.1:{DECODE_PORT}")))
            yield Row(what=f"start until ready, {name}", ours=f"{pair.start_s:.1f} s", goal="≤ 60 s")
            yield from _memory_rows(name, pair)
            yield _idle_row(name, pair)


async def _rates(urls: dict[str, str], *, seed: int) -> dict[str, float]:
    return {name: await client.output_rate(url, batch=4, length=32, num_tokens=32, seed=seed) for name, url in urls.items()}


def _early_row(name: str) -> Row:
    """Of the bytes of a prompt of four chunks, how many had left before its last layer was computed."""
    url = f"http://127.0.0.1:{PREFILL_PORT}"

    async def measure() -> float:
        sent, early = [[await client.counter(url, metric)] for metric in TRANSFER_COUNTERS]
        watch = client.Watch(f"http://127.0.0.1:{BALANCER_PORT}")
        for seed in range(5):
            await watch.first_token_s(client.prompt(1024, seed=100 + seed))
        watch.close()
        for counts, metric in zip((sent, early), TRANSFER_COUNTERS, strict=True):
            counts.append(await client.counter(url, metric))
        return (early[1] - early[0]) / (sent[1] - sent[0])

    share = asyncio.run(measure())
    return Row(what=f"cache bytes sent before prefill's last layer, 4 chunks, {name}", ours=f"{share:.0%}", goal="≥ 80 %")


def _idle_row(name: str, served: Served) -> Row:
    used = cpu_share(list(served.pids.values()), IDLE_S)
    return Row(what=f"processor time without requests, {name}", ours=f"{used:.1%} of a core", goal="< 3 %")


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
    """Output tokens per second of one engine against transformers' `generate`, same weights, one torch thread each.

    Then what it costs ranks when the driver only reacts.
    """
    model = make_checkpoint(folder / "chat", "chat", dtype="float32", overrides=CHAT_SIZES)
    command = [sys.executable, "-m", "longcat_pd.bench.judge", "--model", str(model), "--threads", "1"]
    with ExitStack() as stack:
        alone = stack.enter_context(engine(model, ENGINE_PORT, folder=folder, settings=ENGINE))
        judge = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        )
        for batch in (1, 8):
            ours, theirs = [], []
            for seed in range(6):
                rate = client.output_rate(alone.url, batch=batch, length=32, num_tokens=num_tokens, seed=seed)
                ours.append(asyncio.run(rate))
                theirs.append(_their_rate(judge, f"{batch} 32 {num_tokens} {seed}"))
            what = f"output tokens/s, chat, batch {batch}"
            yield compared(what, ours[1:], theirs[1:], unit="", goal="≥ 1", them="transformers generate")
        yield ahead.exposed_row("chat", asyncio.run(client.metrics(alone.url)))
        assert judge.stdin is not None
        judge.stdin.close()
    yield from ahead.ahead_rows(model, ENGINE, port=ENGINE_PORT)


def _their_rate(judge: subprocess.Popen[str], order: str) -> float:
    assert judge.stdin is not None
    assert judge.stdout is not None
    judge.stdin.write(order + "\n")
    judge.stdin.flush()
    return float(judge.stdout.readline())


if __name__ == "__main__":
    sys.exit(main())
