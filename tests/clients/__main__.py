"""`make test-clients`: public clients and load generators, unmodified, against a pair behind its balancer and one engine.

Starts the servers with a checkpoint whose answers are known (``scripted.py``), runs each client in its own environment,
and prints one line for each check. Exit status 1 if any failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from longcat_pd.bench import report
from longcat_pd.bench.servers import cluster, engine
from longcat_pd.cluster.processes import Children, kill_sessions
from tests.clients import scripted
from tests.clients.load import GENERATORS, Figures, Generator
from tests.ports import free_base
from tests.processes import ready

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests" / "clients"
BEGIN = "<!-- figures: written by `make test-clients WRITE=1` -->"
KEY, ADMIN_KEY, MODEL = "sk-client", "sk-admin", "longcat-scripted"
PAIR, ALONE = "P + D", "one engine"
SUITE_LIMIT_S = 300.0
NODE = "node/node_modules/.bin/node"
# script, environment, faces
SUITES = (
    ("openai_python.py", "sdk", (PAIR, ALONE)),
    ("openai_python.py", "oldest", (PAIR, ALONE)),
    ("node/openai_node.mjs", "node", (PAIR, ALONE)),
    ("langchain_client.py", "sdk", (PAIR,)),
    ("litellm_client.py", "sdk", (PAIR,)),
)
CLUSTER = """
model: {{path: {model}, served_name: {name}, default_max_tokens: 256}}
load_balancer:
  port: {port}
  max_inflight: {max_inflight}
  api_key_file: {folder}/keys
  admin_key_file: {folder}/admin-keys
prefill:
  engine: {{block_size: 16, max_num_batched_tokens: 256, max_num_seqs: 16}}
  instances: [{{name: p0, http_port: {prefill_port}}}]
decode:
  engine: {{block_size: 16, max_num_seqs: 16}}
  instances: [{{name: d0, http_port: {decode_port}}}]
"""
MAX_INFLIGHT = 4096
OK = "ok"


@dataclass(kw_only=True)
class Results:
    """All that was found, in the order in which it came."""

    checks: dict[tuple[str, str, str], dict[str, str]] = field(default_factory=dict)  # client, version, check -> by face
    loads: list[tuple[Generator, str, Figures | str]] = field(default_factory=list)
    failed: int = 0

    def add(self, face: str, line: dict[str, Any]) -> None:
        """One check of a client."""
        note = f" ({line['note']})" if line["note"] else ""
        result = f"{OK if line['ok'] else '**failed**'}{note}"
        self.failed += not line["ok"]
        self.checks.setdefault((line["client"], line["version"], line["check"]), {})[face] = result
        _say(f"{face:<10}  {line['client']} {line['version']}: {line['check']}: {result}")

    def add_load(self, generator: Generator, version: str, figures: Figures | str) -> None:
        """One run of a load generator; a text is why there are no figures."""
        self.failed += isinstance(figures, str) or not figures.ok
        self.loads.append((generator, version, figures))
        _say(f"{PAIR:<10}  {generator.name} {version}: {figures}")

    def page(self) -> str:
        """Both tables as Markdown."""
        rows = ["| client | version | P + D | one engine | checks |", "|---|---|---|---|---|"]
        for client, version in dict.fromkeys(key[:2] for key in self.checks):
            checks = {key[2]: by_face for key, by_face in self.checks.items() if key[:2] == (client, version)}
            cells = [_summary([by_face[face] for by_face in checks.values() if face in by_face]) for face in (PAIR, ALONE)]
            rows.append("| " + " | ".join(_cell(text) for text in (client, version, *cells, " · ".join(checks))) + " |")
        rows += ["", "| load generator | version | route | answered | failed | output tokens/s | first token | per token |"]
        rows.append("|---|---|---|---|---|---|---|---|")
        for generator, version, figures in self.loads:
            head = f"| {generator.name} | {version} | {generator.route} |"
            if isinstance(figures, str):
                rows.append(f"{head} **failed**: {_cell(figures[:200])} | | | | |")
                continue
            times = f"{figures.first_token_ms:.0f} ms | {figures.per_token_ms:.1f} ms |"
            rows.append(f"{head} {figures.completed} | {figures.failed} | {figures.tokens_per_s:.0f} | {times}")
        return "\n".join(rows)


def _summary(results: Sequence[str]) -> str:
    """How many are good, and what the others say."""
    failed = [result for result in results if not result.startswith(OK)]
    return "; ".join([f"{len(results) - len(failed)} of {len(results)} ok", *failed]) if results else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run everything; exit status 1 if anything failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.clients", description=__doc__)
    parser.add_argument("--environments", type=Path, required=True, help="the folder with one environment for each client")
    parser.add_argument("--write", type=Path, metavar="PAGE.md", help="replace the tables between the page's markers")
    parser.add_argument("--only", default="", help="suites and generators whose name has this text")
    parser.add_argument("--check", default="", help="checks whose name has this text")
    options = parser.parse_args(arguments)
    results = Results()
    with tempfile.TemporaryDirectory(prefix="longcat-clients-") as scratch, contextlib.ExitStack() as stack:
        faces = _servers(Path(scratch), stack)
        environments = options.environments.resolve()
        for script, environment, wanted in SUITES:
            if options.only not in f"{environment} {script}":
                continue
            for face in wanted:
                program = HERE / NODE if environment == "node" else environments / environment / "bin" / "python"
                for line in _suite([str(program), str(HERE / script), str(faces[face]), options.check]):
                    results.add(face, line)
        for generator in GENERATORS:
            if options.only in generator.name and not options.check:
                _load(generator, environments / generator.name, faces[PAIR], results)
    if options.write:
        report.write(options.write, f"{report.machine()}\n\n{results.page()}", BEGIN)
    _say(f"{len(results.checks)} checks, {len(results.loads)} load generators, {results.failed} failed")
    return int(results.failed > 0)


def _servers(folder: Path, stack: contextlib.ExitStack) -> dict[str, Path]:
    """Start both faces; the file with the settings of each (``checks.py``)."""
    checkpoint = scripted.write_scripted(folder / "scripted")
    (folder / "keys").write_text(f"{KEY}\n", encoding="utf-8")
    (folder / "admin-keys").write_text(f"{ADMIN_KEY}\n", encoding="utf-8")
    base = free_base(400)
    narrow_port, alone_port, narrow_alone_port, dead_port = base + 1, base + 300, base + 340, base + 390
    values = {"model": checkpoint, "name": MODEL, "folder": folder, "prefill_port": base + 100, "decode_port": base + 200}
    config, narrow = folder / "clients.yaml", folder / "narrow.yaml"
    config.write_text(CLUSTER.format(**values, port=base, max_inflight=MAX_INFLIGHT), encoding="utf-8")
    narrow.write_text(CLUSTER.format(**values, port=narrow_port, max_inflight=1), encoding="utf-8")
    common = {
        "key": KEY,
        "admin_key": ADMIN_KEY,
        "model": MODEL,
        "checkpoint": str(checkpoint),
        "dead_url": f"http://127.0.0.1:{dead_port}/v1",
        "content": scripted.CONTENT,
        "call_name": scripted.CALL_NAME,
        "call_arguments": scripted.CALL_ARGUMENTS,
    }
    pair = stack.enter_context(cluster(config, root=folder))
    narrow_url = f"http://127.0.0.1:{narrow_port}"
    stack.enter_context(_narrow_balancer(narrow, narrow_url))
    keys = ("--api-key-file", str(folder / "keys"), "--admin-key-file", str(folder / "admin-keys"))
    settings = (
        f"model.served_name={MODEL}",
        "model.default_max_tokens=256",
        "engine.block_size=16",
        "engine.max_num_seqs=16",
    )
    alone = stack.enter_context(engine(checkpoint, alone_port, folder=folder, settings=settings, more=keys))
    settings = (*settings, "load_balancer.max_inflight=1")
    narrow_alone = stack.enter_context(engine(checkpoint, narrow_alone_port, folder=folder, settings=settings, more=keys))
    files = {}
    for face, url, narrow_one in ((PAIR, pair.url, narrow_url), (ALONE, alone.url, narrow_alone.url)):
        files[face] = folder / f"{len(files)}.json"
        files[face].write_text(json.dumps({**common, "url": url, "narrow_url": narrow_one}), encoding="utf-8")
    return files


@contextlib.contextmanager
def _narrow_balancer(config: Path, url: str) -> Iterator[None]:
    """A second balancer of the same pair, which lets one request in at a time."""
    children = Children()
    command = [sys.executable, "-m", "longcat_pd.load_balancer", "--config", str(config)]
    launched = children.launch("narrow", command, log=config.with_suffix(".log"), ready_url="")
    try:
        asyncio.run(_ready(url))
        yield
    finally:
        kill_sessions([launched])


async def _ready(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await ready(url, client)


def _suite(command: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of one script, as they come; one more if it ended before its time."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=_variables(), text=True)
    assert process.stdout is not None
    num_lines, failed = 0, False
    watchdog = threading.Timer(SUITE_LIMIT_S, process.kill)
    watchdog.start()
    with process:
        for text in process.stdout:
            if text.startswith('{"client"'):  # some clients write to standard output themselves
                line = json.loads(text)
                num_lines, failed = num_lines + 1, failed or not line["ok"]
                yield line
    watchdog.cancel()
    status = process.wait()
    is_whole = not command[-1]
    if (is_whole and not num_lines) or status != int(failed):
        name = Path(command[1]).name
        yield {"client": name, "version": "", "check": "the script", "ok": False, "note": f"exit status {status}"}


def _load(generator: Generator, environment: Path, settings: Path, results: Results) -> None:
    version = _version(environment, generator.name)
    values = json.loads(settings.read_text(encoding="utf-8"))
    try:
        figures: Figures | str = generator.run(environment, values, settings.parent, _variables())
    except (AssertionError, OSError, KeyError, ValueError, subprocess.TimeoutExpired) as error:
        figures = f"{type(error).__name__}: {error}"
    results.add_load(generator, version, figures)


def _version(environment: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    told = subprocess.run([environment / "bin" / "python", "-c", code], capture_output=True, text=True, check=False)
    return told.stdout.strip()


def _variables() -> dict[str, str]:
    """The environment of a client: no proxy, no key of another service, nobody else to talk to."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith(("OPENAI_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_"))
    }
    return kept | {"NO_PROXY": "127.0.0.1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"}


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
