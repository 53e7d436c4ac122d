"""`make test-page`: the status page in a real browser, against a cluster of real processes under load that loses a rank.

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

from longcat_pd.config.shipped import shipped_checkpoint
from tests.page.load import Load
from tests.processes import all_linked, ranks_of, running
from tests.topology import cluster_file

HERE = Path(__file__).parent
KEY = "key-of-a-client"
LOST = "rank 1 (stage 1) on 127.0.0.1"  # of p0
START_S = 240.0
LIMIT_S = 400.0
MAX_MODEL_LEN = 1024
CHAT_TOKENS = 120  # of the chat box, which says no number


async def check(folder: Path, browser: str, pictures: Path, num_streams: int) -> int:
    """Exit status of the checks. ``num_streams``: run all the while."""
    model = shipped_checkpoint()
    (folder / "keys").write_text(f"{KEY}\n")
    sizes = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": num_streams + 8, "num_blocks": 65 * (num_streams + 8)}
    config = cluster_file(
        folder,
        model,
        model={"path": str(model), "dtype": "float32", "default_max_tokens": CHAT_TOKENS},
        prefill={"pp_size": 2},
        decode={"attn_tp_size": 2, "kvp_size": 2},
        prefill_engine=sizes,
        decode_engine=sizes,
        load_balancer_settings={"api_key_file": str(folder / "keys")},
    )
    async with running(config, seconds=START_S) as (processes, topology):
        await all_linked(processes, topology)
        await first_requests(topology.client)
        victim = ranks_of(processes.running["p0"])[1]
        load = Load(topology.client, num_streams, victim)
        running_load = asyncio.ensure_future(load.run())
        arguments = [topology.url, KEY, str(pictures), LOST, str(victim), browser, str(num_streams)]
        process = await asyncio.create_subprocess_exec("node", str(HERE / "page.mjs"), *arguments)
        try:
            status = await asyncio.wait_for(process.wait(), LIMIT_S)
        finally:
            if process.returncode is None:
                process.kill()
            running_load.cancel()
            (outcome,) = await asyncio.gather(running_load, return_exceptions=True)
        if isinstance(outcome, Exception):
            load.troubles.append(f"the load itself: {outcome!r}")
    return max(status, told(load, num_streams))


def told(load: Load, num_streams: int) -> int:
    """One line on the load, as of the other checks; 1: there was something wrong with it."""
    is_good = not load.troubles and (load.num_ended > 0 or not num_streams)
    what = f"{load.num_ended} ended well, {load.num_after_loss} failed when the rank was lost"
    print(f"{'ok    ' if is_good else 'FAILED'} {num_streams} streams at a time: {'; '.join([what, *load.troubles[:3]])}")
    return int(not is_good)


async def first_requests(client: httpx.AsyncClient) -> None:
    """A few requests, so that the page has something to show; one is refused."""
    client.headers["Authorization"] = f"Bearer {KEY}"
    body = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
    prompts = [[5 + i] * 40 * (1 + i) for i in range(4)]
    headers = {"X-Request-Id": "load-first"}  # as all that are not of the page
    calls = [client.post("/v1/completions", json={"prompt": p, **body}, headers=headers) for p in prompts]
    answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [200] * 4, [answer.text for answer in answers]
    await client.post("/v1/completions", json={"prompt": [5] * (MAX_MODEL_LEN + 1), **body}, headers=headers)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it all."""
    parser = argparse.ArgumentParser(prog="python -m tests.page")
    parser.add_argument("--pictures", type=Path, default=HERE / "pictures")
    parser.add_argument("--browser", default=shutil.which("chromium") or shutil.which("chromium-browser"))
    parser.add_argument("--streams", type=int, default=16, metavar="N", help="that run all the while (16); 0: no load")
    options = parser.parse_args(arguments)
    if options.browser is None or shutil.which("node") is None:
        print("the page's checks need chromium and node")
        return 1
    options.pictures.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(check(Path(folder), options.browser, options.pictures.resolve(), options.streams))


if __name__ == "__main__":
    sys.exit(main())
