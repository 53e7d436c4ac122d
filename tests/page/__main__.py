"""`make test-page`: the status page in a real browser, against a small cluster of real processes that loses a rank.

Prints one line for each check, leaves pictures in ``--pictures``; exit status 1 if a check failed. Needs Chromium and Node.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

from longcat_pd.tiny.make import write_tiny
from tests.processes import all_linked, ranks_of, running
from tests.topology import cluster_file

HERE = Path(__file__).parent
KEY = "key-of-a-client"
LOST = "rank 1 (stage 1) on 127.0.0.1"  # of p0
START_S = 240.0
LIMIT_S = 400.0


async def check(folder: Path, browser: str, pictures: Path) -> int:
    """Exit status of the checks."""
    model = folder / "tiny"
    write_tiny(model, "2.0", dtype="float32")
    (folder / "keys").write_text(f"{KEY}\n")
    config = cluster_file(
        folder,
        model,
        prefill={"pp_size": 2},
        decode={"attn_tp_size": 2, "kvp_size": 2},
        load_balancer_settings={"api_key_file": str(folder / "keys")},
    )
    async with running(config, seconds=START_S) as (processes, topology):
        await all_linked(processes, topology)
        await load(topology.client)
        victim = ranks_of(processes.running["p0"])[1]
        arguments = [topology.url, KEY, str(pictures), LOST, str(victim), browser]
        process = await asyncio.create_subprocess_exec("node", str(HERE / "page.mjs"), *arguments)
        try:
            return await asyncio.wait_for(process.wait(), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()


async def load(client: httpx.AsyncClient) -> None:
    """A few requests, so that the page has something to show; one is refused."""
    client.headers["Authorization"] = f"Bearer {KEY}"
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
    prompts = [[5 + i] * 40 * (1 + i) for i in range(4)]
    answers = await asyncio.gather(*(client.post("/v1/completions", json={"prompt": p, **body}) for p in prompts))
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    await client.post("/v1/completions", json={"prompt": [5] * 600, **body})


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all."""
    parser = argparse.ArgumentParser(prog="python -m tests.page")
    parser.add_argument("--pictures", type=Path, default=HERE / "pictures")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    options = parser.parse_args(arguments)
    if options.browser is None or shutil.which("node") is None:
        print("the page's checks need chromium and node")
        return 1
    options.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(check(Path(folder), options.browser, options.pictures.resolve()))


if __name__ == "__main__":
    sys.exit(main())
