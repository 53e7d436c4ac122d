"""Public load generators, as they come: each runs against a server, and what it reports is read from its own files."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REQUESTS, AT_ONCE, PROMPT, OUTPUT = 60, 4, 48, 24
LIMIT_S = 240.0


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a generator said of one run. Times are means, in ms."""

    completed: int
    failed: int
    tokens_per_s: float
    first_token_ms: float
    per_token_ms: float

    @property
    def ok(self) -> bool:
        """Whether every request was answered."""
        return (self.completed, self.failed) == (REQUESTS, 0)


@dataclass(frozen=True, kw_only=True)
class Generator:
    """How to call one, and how to read what it leaves in ``out``. Its environment has its name."""

    name: str
    route: str
    command: Callable[[dict[str, Any], Path, Path], list[str]]
    figures: Callable[[Path], Figures]

    def run(self, environment: Path, settings: dict[str, Any], folder: Path, variables: Mapping[str, str]) -> Figures:
        """Run it once. Raises AssertionError with the end of its log."""
        out, log = folder / f"{self.name}-out", folder / f"{self.name}.log"
        command = self.command(settings, environment / "bin" / self.name, out)
        with log.open("wb") as output:
            done = subprocess.run(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=dict(variables),
                cwd=folder,
                timeout=LIMIT_S,
                check=False,
            )
        assert done.returncode == 0, f"exit status {done.returncode}: {log.read_text(errors='replace')[-2000:]}"
        return self.figures(out)


def _evalscope(s: dict[str, Any], program: Path, out: Path) -> list[str]:
    return [
        str(program), "perf", "--model", s["model"], "--url", f"{s['url']}/v1/chat/completions", "--api", "openai",
        "--api-key", s["key"], "--tokenizer-path", s["checkpoint"], "--dataset", "random",
        "--min-prompt-length", str(PROMPT - 16), "--max-prompt-length", str(PROMPT + 16),
        "--min-tokens", str(OUTPUT), "--max-tokens", str(OUTPUT), "--extra-args", '{"ignore_eos": true}',
        "--number", str(REQUESTS), "--parallel", str(AT_ONCE), "--stream", "--seed", "1",
        "--outputs-dir", str(out), "--no-timestamp",
    ]  # fmt: skip


def _evalscope_figures(out: Path) -> Figures:
    (summary,) = out.glob("*/*/benchmark_summary.json")
    told = json.loads(summary.read_text(encoding="utf-8"))
    return Figures(
        completed=told["Success Requests"],
        failed=told["Failed Requests"],
        tokens_per_s=told["Output Throughput (tok/s)"],
        first_token_ms=told["Avg TTFT (ms)"],
        per_token_ms=told["Avg TPOT (ms)"],
    )


def _aiperf(s: dict[str, Any], program: Path, out: Path) -> list[str]:
    return [
        str(program), "profile", "--model", s["model"], "--url", s["url"], "--endpoint-type", "chat", "--streaming",
        "--api-key", s["key"], "--tokenizer", s["checkpoint"], "--use-server-token-count",
        "--synthetic-input-tokens-mean", str(PROMPT), "--synthetic-input-tokens-stddev", "8",
        "--output-tokens-mean", str(OUTPUT), "--extra-inputs", "ignore_eos:true",
        "--request-count", str(REQUESTS), "--concurrency", str(AT_ONCE), "--random-seed", "1",
        "--ui", "simple", "--no-gpu-telemetry", "--no-server-metrics", "--artifact-dir", str(out),
    ]  # fmt: skip


def _aiperf_figures(out: Path) -> Figures:
    told = json.loads((out / "profile_export_aiperf.json").read_text(encoding="utf-8"))
    failed = told.get("error_request_count", {"avg": 0})
    return Figures(
        completed=int(told["request_count"]["avg"]),
        failed=int(failed["avg"]) + len(told.get("error_summary") or ()),
        tokens_per_s=told["output_token_throughput"]["avg"],
        first_token_ms=told["time_to_first_token"]["avg"],
        per_token_ms=told["inter_token_latency"]["avg"],
    )


def _guidellm(s: dict[str, Any], program: Path, out: Path) -> list[str]:
    backend = f"kind=openai_http,target={s['url']},model={s['model']},api_key={s['key']},request_format=/v1/completions"
    return [
        str(program), "run", "--backend", backend, "--profile", f"kind=concurrent,streams={AT_ONCE}",
        "--constraint", f"kind=max_requests,count={REQUESTS}",
        "--tokenizer", f"kind=huggingface_auto,model={s['checkpoint']}",
        "--data", f"kind=synthetic_text,prompt_tokens={PROMPT},output_tokens={OUTPUT}",
        "--output", "kind=console", "--output", f"kind=json,path={out}.json", "--disable-progress",
    ]  # fmt: skip


def _guidellm_figures(out: Path) -> Figures:
    (benchmark,) = json.loads(Path(f"{out}.json").read_text(encoding="utf-8"))["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    return Figures(
        completed=totals["successful"],
        failed=totals["errored"] + totals["incomplete"],
        tokens_per_s=metrics["output_tokens_per_second"]["successful"]["mean"],
        first_token_ms=metrics["time_to_first_token_ms"]["successful"]["mean"],
        per_token_ms=metrics["inter_token_latency_ms"]["successful"]["mean"],
    )


GENERATORS = (
    Generator(name="evalscope", route="/v1/chat/completions", command=_evalscope, figures=_evalscope_figures),
    Generator(name="aiperf", route="/v1/chat/completions", command=_aiperf, figures=_aiperf_figures),
    Generator(name="guidellm", route="/v1/completions", command=_guidellm, figures=_guidellm_figures),
)
