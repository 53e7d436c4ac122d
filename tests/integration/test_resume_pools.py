"""An answer of a pair that is gone on with by a pair: real ranks, prompts split one way and caches another, with drafts.

What a pair says of its answer is given to it again, behind every group of its events: it says the rest as it did before.
"""

from __future__ import annotations

import asyncio
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest

from longcat_pd.config import resolve
from longcat_pd.config.schema import ClusterConfig
from tests.answer_parts import differences
from tests.integration.test_resume import BOUND, DRAWN, NARROW, PENALTIES, counts
from tests.parity.conftest import MakeCheckpoint
from tests.resumption import IDS, RESUME, Told, changed, read_plain, read_told, steady_parts
from tests.topology import CHUNK, cluster_file, pools

ROUTE = "/v1/completions"
USAGE = {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "logprobs": 2, **USAGE},
    {"temperature": 1.0, **USAGE},
    {**DRAWN, "logit_bias": NARROW, **PENALTIES, "min_tokens": 7, "logprobs": 1, **USAGE},
    {"temperature": 0, "response_format": BOUND, "max_tokens": 20, **USAGE},
    {**DRAWN, "logit_bias": NARROW, **PENALTIES},
    {**DRAWN, "logprobs": 1},
)


class Legs:
    """Both instances of a cluster, asked as a balancer asks them."""

    def __init__(self, config: ClusterConfig, client: httpx.AsyncClient) -> None:
        assert config.prefill is not None and config.decode is not None
        self._places = [(config.prefill.instances[0], "d0"), (config.decode.instances[0], "p0")]
        self._client = client

    async def ask(self, fields: dict[str, Any], header: dict[str, str]) -> bytes:
        """What D says."""
        transfer = secrets.token_hex(16)
        prefill, decode = await asyncio.gather(
            *(
                self._client.post(
                    f"http://{place.host}:{place.http_port}{ROUTE}",
                    json=fields,
                    headers={
                        "X-Request-Id": "r",
                        "X-Longcat-Transfer-Id": transfer,
                        "X-Longcat-Peer": peer,
                        "X-Longcat-Deadline-Ms": "60000",
                        **header,
                    },
                )
                for place, peer in self._places
            )
        )
        assert (prefill.status_code, decode.status_code) == (200, 200), (prefill.text, decode.text)
        assert prefill.json()["prompt_tokens"] == len(fields["prompt"])
        return bytes(decode.content)


async def goes_on(legs: Legs, fields: dict[str, Any]) -> None:
    is_stream = "stream" in fields
    told = read_told(await legs.ask(fields, IDS), is_stream=is_stream)
    first = 1 if is_stream else 0
    assert len(told.groups) >= first
    cuts = range(first, len(told.groups) + 1)
    answers = await asyncio.gather(*(legs.ask(told.resumed(fields, cut), RESUME) for cut in cuts))
    for cut, content in zip(cuts, answers, strict=True):
        assert found(told, cut, content, is_stream=is_stream) - {"usage"} == set(), f"behind {told.ids(cut)}"


def found(told: Told, cut: int, content: bytes, *, is_stream: bool) -> set[str]:
    """What is not as it would have been."""
    if not is_stream:
        whole = httpx.Response(200, content=content).json()
        assert counts([whole]) == counts(told.ending)
        return differences(steady_parts(whole), steady_parts(told.ending[0]))
    rest = read_plain(content)
    assert counts(rest) == counts(told.ending)
    return changed(told.events(cut) + rest, told.all_events)


@pytest.mark.parametrize(
    ("prefill", "decode", "num_drafts"),
    [
        ({"cp_size": 2}, {"kvp_size": 3, "attn_tp_size": 3}, 3),
        pytest.param(
            {"pp_size": 2, "cp_size": 2}, {"dp_size": 2, "kvp_size": 2, "attn_tp_size": 2}, 0, marks=pytest.mark.slow
        ),
    ],
)
async def test_every_cut_through_two_pools(
    tiny: MakeCheckpoint, tmp_path: Path, prefill: dict[str, Any], decode: dict[str, Any], num_drafts: int
) -> None:
    model = tiny("2.0+predictable", with_tokenizer=True)
    engine = {"num_draft_tokens": num_drafts}
    path = cluster_file(
        tmp_path,
        model,
        prefill=prefill,
        decode=decode,
        prefill_engine=engine,
        decode_engine=engine,
        transfer={"digest": "all"},
    )
    config = resolve.load(path, ["model.dtype=float32"])
    prompts = [[40, 41, 300], [30 + 7 * n % 900 for n in range(CHUNK + 1)]]
    async with pools(config) as topology:
        legs = Legs(config, topology.client)
        for number, case in enumerate(CASES):
            fields = {"prompt": prompts[number % 2], "max_tokens": 12, "return_token_ids": True, **case}
            await goes_on(legs, fields)
        await topology.idle_within()
