"""An answer that breaks anywhere and goes on elsewhere is the undisturbed one, whatever it says and however it is cut."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from longcat_pd.engine.request import Delta, Request
from tests.answer_parts import differences
from tests.resumption import IDS, RESUME, Told, changed, read_plain, read_told, steady_parts
from tests.unit.choice_rig import sliced
from tests.unit.fake_service import LEG, FakeService, deltas_of, make_app, write_folder
from tests.unit.test_any_cut import CHAT, COMPLETIONS, SETTINGS, Asked, Faces, bodies, few_or_many, holds

PLENTY = 450  # tokens
OPEN = "<longcat_think>\n"  # the end of a prompt whose answer begins inside
NUM_CUTS = 6  # of each answer, besides the first and the last place


class Decoders(Faces):
    """A decode instance of each setting, which plays the rest of what the test lays out."""

    def __init__(self, folders: dict[str, str]) -> None:
        super().__init__(folders)
        self.services = [FakeService(folders[s.variant], self._rest, role="decode", **s.parsers) for s in SETTINGS]
        for client in self.clients:
            self.loop.run_until_complete(client.aclose())
        self.clients = [
            httpx.AsyncClient(transport=httpx.ASGITransport(make_app(service)), base_url="http://d0")
            for service in self.services
        ]

    async def _rest(self, request: Request) -> AsyncGenerator[Delta, None]:
        said = request.sampling.num_said
        assert list(request.said_token_ids) == self.ids[:said]
        (whole,) = deltas_of(self.ids[said:], request.sampling, group=len(self.ids))
        *parts, last = sliced(whole.tokens, self.runs)
        for part in parts:
            yield Delta(part)
        yield replace(whole, tokens=last)

    def leg(self, asked: Asked, fields: dict[str, Any], header: dict[str, str]) -> bytes:
        service = self.services[asked.setting]
        prompt = self.text.encode(OPEN if asked.body.get("enable_thinking") else "hi")
        said = fields.get("resume", {}).get("token_ids", [])
        if not fields.get("stream") and asked.body.get("logprobs") is not None:
            said = []  # P knows too that it begins anew
        service.offered_prompt = (*prompt, *said)
        service.offered_max_tokens = min(asked.body.get("max_tokens", PLENTY), PLENTY) - len(said)
        route = CHAT if "messages" in fields else COMPLETIONS
        work = self.clients[asked.setting].post(route, json=fields, headers={**LEG, **header, "X-Request-Id": "r"})
        answer = self.loop.run_until_complete(work)
        assert answer.status_code == 200, answer.text
        return answer.content


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoders]:
    made = Decoders({variant: write_folder(tmp_path_factory.mktemp("model"), variant) for variant in ("2.0", "chat")})
    yield made
    made.close()


def cuts(told: Told, first: int) -> list[int]:
    """Places to break at: the first that can be, the last, and some between."""
    last = len(told.groups)
    step = max((last - first) // NUM_CUTS, 1)
    return sorted({*range(first, last + 1, step), last} & {*range(first, last + 1)})


@few_or_many
def test_a_stream_goes_on_as_if_nothing_had_been(decoders: Decoders, share: int) -> None:
    def is_undisturbed(asked: Asked) -> None:
        decoders.ids, decoders.runs = decoders.encode(asked), asked.runs
        usage = {"include_usage": True, "continuous_usage_stats": True}
        fields = {**asked.body, "stream": True, "stream_options": usage}
        told = read_told(decoders.leg(asked, fields, IDS), is_stream=True)
        whole = [token_id for chunk in told.all_events for c in chunk["choices"] for token_id in c["token_ids"]]
        assert told.ids(len(told.groups)) == whole[: len(told.ids(len(told.groups)))]
        for runs in (asked.runs, [3]):
            decoders.runs = runs
            for cut in cuts(told, 1):
                rest = read_plain(decoders.leg(asked, told.resumed(fields, cut), RESUME))
                assert changed(told.events(cut) + rest, told.all_events) == set(), cut

    holds(bodies(), is_undisturbed, 40 * share)


@few_or_many
def test_a_whole_answer_is_told_whole(decoders: Decoders, share: int) -> None:
    def is_undisturbed(asked: Asked) -> None:
        decoders.ids, decoders.runs = decoders.encode(asked), asked.runs
        told = read_told(decoders.leg(asked, asked.body, IDS), is_stream=False)
        (answer,) = told.ending
        ids = told.ids(len(told.groups))
        assert ids == answer["choices"][0]["token_ids"][: len(ids)]
        for cut in {0, *cuts(told, 0)}:
            found = read_whole(decoders.leg(asked, told.resumed(asked.body, cut), RESUME))
            assert differences(steady_parts(found), steady_parts(answer)) == set(), cut

    holds(bodies(), is_undisturbed, 40 * share)


def read_whole(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = httpx.Response(200, content=content).json()
    return found
