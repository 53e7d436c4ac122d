"""Every route that an app has, whoever added it: without a key only what is listed here as open answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.routing import Route

from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.load_balancer.face import Keys
from longcat_pd.server.app import worker_front
from longcat_pd.server.intake import KeyRing
from tests.balancer_rig import Rig
from tests.unit.fake_service import EOS, FakeService, make_app, plays, write_folder

OPEN = {"/", "/health", "/ready", "/metrics", "/health_generate", "/openapi.json"}
KEYS = {"no key": {}, "a wrong key": {"Authorization": "Bearer wrong"}, "no bearer": {"Authorization": "right"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = write_folder(tmp_path_factory.mktemp("model"))
    return made


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    file = tmp_path / "key"
    file.write_text("right\n")
    return str(file)


def routes(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.routes:
        assert isinstance(route, Route), "mounted apps and sockets would need keys of their own"
        for method in route.methods or ():
            yield method, route.path.replace("{model_id:path}", "tiny")


async def judge(app: FastAPI, admin: str = "right") -> set[str]:
    """The paths that want a key; all others must be open on purpose."""
    guarded = set()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://face") as client:
        for method, path in routes(app):
            if path in OPEN:
                assert method in ("GET", "HEAD"), path
                continue
            for who, headers in KEYS.items():
                answer = await client.request(method, path, headers=headers, content=b"{}" if method == "POST" else None)
                assert answer.status_code == 401, f"{method} {path} with {who}"
            key = admin if path.startswith("/admin/") else "right"
            body: dict[str, Any] = {"content": b"[]"} if method == "POST" else {}  # refused at once, behind the key
            answer = await client.request(method, path, headers={"Authorization": f"Bearer {key}"}, **body)
            assert answer.status_code != 401, f"{method} {path} with the right key"
            guarded.add(path)
    return guarded


async def test_a_standalone_engine(folder: Path, key_file: str) -> None:
    app = make_app(FakeService(folder, plays([EOS])), api_key_file=key_file, admin_key_file=key_file)
    assert {"/flush_cache", "/admin/drain", "/debug/accounting", "/v1/completions"} <= await judge(app)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_worker(folder: Path, key_file: str, role: Any) -> None:
    front = worker_front(LoadBalancerConfig(), key_file)
    app = make_app(FakeService(folder, plays([EOS]), role=role), **vars(front))
    assert {"/admin/drain", "/debug/accounting", "/server_info", "/v1/completions"} <= await judge(app)


async def test_the_balancer() -> None:
    rig = await Rig.make(keys=Keys(client=KeyRing([b"right"]), admin=KeyRing([b"chief"])))
    await rig.face.lookout.close()  # a page that looks would look on
    assert {"/flush_cache", "/admin/drain", "/debug/accounting", "/v1/completions"} <= await judge(rig.app, "chief")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(rig.app), base_url="http://face") as client:
        for headers in ({}, {"Authorization": "Bearer right"}):  # a client is no operator
            assert (await client.post("/admin/drain", headers=headers, content=b"{}")).status_code == 401


async def test_nobody_is_an_operator_without_keys_for_it(folder: Path) -> None:
    rig = await Rig.make(keys=Keys(client=KeyRing([b"right"])))
    for app in (rig.app, make_app(FakeService(folder, plays([EOS])))):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://face") as client:
            answer = await client.post("/admin/drain", headers={"Authorization": "Bearer right"}, content=b"{}")
            assert answer.status_code == 404
