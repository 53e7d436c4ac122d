"""The OpenAPI document against running servers: schemathesis, and mutated bodies over real connections.

The balancer of a small cluster and a standalone server are up for the whole of a test, with keys; both end idle.
"""

import asyncio
import json
import sys
import time

import httpx
import pytest

from longcat_pd.config import resolve
from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.server.openapi import document
from longcat_pd.tiny.make import write_tiny
from tests.contract import Contract, narrowed
from tests.fuzzing import check_refusal, shots
from tests.topology import cluster_file, pools, standalone

NAME, VOCAB = "tiny", 1024
CLIENT, ADMIN = "key-of-a-client", "key-of-the-operator"
CHECKS = "use_after_free,ensure_resource_availability"  # need operations that make something
AT_ONCE = 8


class Site:
    """Both servers. ``few``: how much of everything is asked."""

    def __init__(self, folder, servers):
        self.folder, self.servers = folder, servers
        self.contract = Contract(document(has_keys=True, has_admin_keys=True))

    async def idle(self):
        for server in self.servers:
            await server.idle_within()

    async def schemathesis(self, server, given, mode, phases, count):
        """Run it in a process of its own; its exit status and its report."""
        description = self.folder / f"{mode}-{server.url[-5:]}.json"
        description.write_text(json.dumps(given))
        config = self.folder / "schemathesis.toml"
        schemes = {"clientKey": CLIENT, "adminKey": ADMIN}
        config.write_text("".join(f'[auth.openapi.{name}]\nbearer = "{key}"\n' for name, key in schemes.items()))
        options = {
            "--url": server.url, "--mode": mode, "--phases": phases, "-n": str(count), "--seed": "1", "--checks": "all",
            "--exclude-checks": CHECKS, "--exclude-path": "/admin/drain",
            "--generation-database": "none", "--request-timeout": "20",
        }  # fmt: skip
        command = [
            sys.executable,
            "-m",
            "schemathesis.cli",
            "--config-file",
            str(config),
            "run",
            str(description),
            "--no-color",
        ]
        process = await asyncio.create_subprocess_exec(
            *command,
            *(part for option in options.items() for part in option),
            cwd=self.folder,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        told, _ = await asyncio.wait_for(process.communicate(), 540)
        return process.returncode, told.decode()


@pytest.fixture
async def site(tmp_path):
    model = tmp_path / "model"
    write_tiny(model, "2.0", dtype="float32")
    for name, key in (("client", CLIENT), ("admin", ADMIN)):
        (tmp_path / name).write_text(f"{key}\n")
    limits = {"api_key_file": str(tmp_path / "client"), "admin_key_file": str(tmp_path / "admin")}
    common = ["model.dtype=float32", f"model.served_name={NAME}", "model.default_max_tokens=3"]
    settings = [f"load_balancer.{name}={value}" for name, value in limits.items()]
    sizes = {"max_model_len": 4096, "num_blocks": 513}  # room for what a generator makes of messages and tools
    path = cluster_file(tmp_path, model, prefill_engine=sizes, decode_engine=sizes)
    own = [f"engine.{name}={size}" for name, size in sizes.items()]
    front = LoadBalancerConfig(**limits)
    async with (
        pools(resolve.load(path, [*settings, *common])) as pair,
        standalone(model, *common, *own, front=front) as alone,
    ):
        for server in (pair, alone):
            server.client.headers["authorization"] = f"Bearer {CLIENT}"
        yield Site(tmp_path, (pair, alone))


FEW_AND_MANY = [4, pytest.param(100, marks=pytest.mark.slow)]


@pytest.mark.parametrize("count", FEW_AND_MANY)
async def test_schemathesis_finds_nothing(site, count):
    """Bodies that fit are accepted, others are refused, every answer is as described, and no key is forgotten."""
    given = [(await server.client.get("/openapi.json")).json() for server in site.servers]
    assert given[0] == given[1] == site.contract.document
    narrow = narrowed(given[0], model=NAME, vocab_size=VOCAB)
    phases = "fuzzing" if count == FEW_AND_MANY[0] else "coverage,fuzzing"
    for server in site.servers:
        told = await asyncio.gather(
            site.schemathesis(server, narrow, "positive", "examples,fuzzing", count),
            site.schemathesis(server, given[0], "negative", phases, count),
        )
        for status, report in told:
            assert status == 0, report
            print(server.url, *(line for line in report.splitlines() if "generated" in line))
    await site.idle()


@pytest.mark.parametrize("count", [150, pytest.param(5_000, marks=pytest.mark.slow)])
async def test_wild_clients_get_what_they_can_act_on(site, count):
    for server in site.servers:
        limit = asyncio.Semaphore(AT_ONCE)
        began = time.monotonic()

        async def ask(shot, server=server, limit=limit):
            headers = {"content-type": "application/json", **shot.headers}
            if not headers["content-type"]:
                del headers["content-type"]
            sent = {name: value.encode() for name, value in headers.items()}
            async with limit:
                answer = await server.client.post(shot.path, content=shot.body, headers=sent, timeout=20)
            status, content = answer.status_code, answer.content
            site.contract.check("POST", shot.path, status=status, headers=answer.headers, content=content)
            if shot.error is not None or status != 200:
                check_refusal(shot, status, answer.headers, content)
            return status

        every = shots(site.contract, count, seed=7, name=NAME, calm=True)
        statuses = await asyncio.gather(*(ask(shot) for shot in every))
        found = {status: statuses.count(status) for status in sorted(set(statuses))}
        print(server.url, found, f"{time.monotonic() - began:.1f} s")
        assert found[200] > count // 20 and found[400] > count // 2
        good = await server.client.post("/v1/completions", json={"prompt": [5], "max_tokens": 2})
        assert good.status_code == 200
    await site.idle()


async def _pieces():
    for _ in range(40):
        yield b"x" * (1 << 20)


async def test_what_every_route_tells_is_as_described(site):
    for server in site.servers:
        for method, path in site.contract.operations:
            if path.startswith("/admin"):
                continue
            path = path.replace("{model_id}", NAME)
            for sent in (method, "HEAD") if method == "GET" else (method,):
                answer = await server.client.request(sent, path, content=b"{}" if sent == "POST" else None)
                site.contract.check(sent, path, status=answer.status_code, headers=answer.headers, content=answer.content)
        operator = {"authorization": f"Bearer {ADMIN}"}
        for path, status in (
            ("/admin/drain", 202),
            ("/ready", 503),
            ("/v1/completions", 503),
            ("/admin/undrain", 202),
            ("/ready", 200),
        ):
            method = "GET" if path == "/ready" else "POST"
            headers = operator if "admin" in path else {}
            body = None if method == "GET" else b'{"prompt": [5]}'
            answer = await server.client.request(method, path, content=body, headers=headers)
            assert answer.status_code == status, path
            site.contract.check(method, path, status=status, headers=answer.headers, content=answer.content)
        for content in (b"x" * (40 << 20), _pieces()):  # sent whole, and the answer is not lost
            answer = await server.client.post("/v1/completions", content=content)
            assert (answer.status_code, answer.headers["connection"]) == (413, "close")
            headers = answer.headers
            site.contract.check("POST", "/v1/completions", status=413, headers=headers, content=answer.content)
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as stranger:
            for path in ("/server_info", "/v1/models"):
                answer = await stranger.get(path)
                assert answer.status_code == 401
                site.contract.check("GET", path, status=401, headers=answer.headers, content=answer.content)
    await site.idle()
