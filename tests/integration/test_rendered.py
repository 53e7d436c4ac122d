"""What the manifests start, started: the containers' own commands at the pods' own names, each process with a hosts file.

A mount namespace for each process stands for its pod. Kubernetes is not here.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from longcat_pd.cluster.processes import Children, Process, kill_sessions, send, wait_for_end
from longcat_pd.render.main import main
from tests.parity.conftest import MakeCheckpoint
from tests.ports import free_base
from tests.processes import ready

IN_A_POD = ("unshare", "--mount", "sh", "-c", 'mount --bind "$0" /etc/hosts && exec "$@"')


def may_mount() -> bool:
    done = subprocess.run([*IN_A_POD, "/etc/hosts", "true"], capture_output=True, timeout=10, check=False)
    return done.returncode == 0


def manifests(checkpoint: Path, folder: Path) -> list[dict[str, Any]]:
    """P and D with two nodes each."""
    base, engine = free_base(40), {"block_size": 16, "max_model_len": 512, "max_num_seqs": 4}
    key = folder / "cluster.key"
    key.write_text("a-key-of-these-pods\n")
    tree = {
        "model": {"path": str(checkpoint)},
        "cluster_key_file": str(key),
        "load_balancer": {"port": base + 30},
        "prefill": {
            "parallel": {"pp_size": 2},
            "engine": {**engine, "max_num_batched_tokens": 64},
            "instances": [{"name": "p0", "http_port": base, "nodes": ["10.0.0.1", "10.0.0.2"]}],
        },
        "decode": {
            "parallel": {"kvp_size": 2, "attn_tp_size": 2},
            "engine": engine,
            "instances": [{"name": "d0", "http_port": base + 10, "nodes": ["10.0.1.1", "10.0.1.2"]}],
        },
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(tree))
    out = folder / "out"
    arguments = ["--image", "longcat-pd:1", "--python", sys.executable, "--out", str(out)]
    assert main(["k8s", str(folder / "cluster.yaml"), *arguments]) == 0
    return [yaml.safe_load(file.read_text()) for file in sorted(out.iterdir())]


class Pods:
    """A process for each container that the objects make, at addresses of the loopback network."""

    def __init__(self, objects: list[dict[str, Any]], folder: Path) -> None:
        self._folder = folder
        self._config = folder / "pod.yaml"
        self._children = Children()
        self.processes: dict[str, Process] = {}
        (text,) = [item["data"]["cluster.yaml"] for item in objects if item["kind"] == "ConfigMap"]
        self._config.write_text(text)
        tree = yaml.safe_load(text)
        names = [node for role in ("prefill", "decode") for item in tree[role]["instances"] for node in item["nodes"]]
        names.append(tree["load_balancer"]["node"])
        lines = [f"127.1.{os.getpid() % 250}.{place + 10} {name}\n" for place, name in enumerate(names)]
        (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
        self.url = f"http://127.0.0.1:{tree['load_balancer']['port']}"
        for item in objects:
            if item["kind"] == "Deployment":
                self._start(item["metadata"]["name"], 0, item["spec"]["template"])
            if item["kind"] == "LeaderWorkerSet":
                group = item["spec"]["leaderWorkerTemplate"]
                for place in range(group["size"]):
                    self._start(item["metadata"]["name"], place, group["workerTemplate" if place else "leaderTemplate"])

    def _start(self, name: str, place: int, template: dict[str, Any]) -> None:
        def as_run(word: str) -> str:
            return word.replace("$(NODE_RANK)", str(place)).replace("$$", "$")

        spec = template["spec"]
        pod = [*IN_A_POD, str(self._folder / "hosts")]
        for container in spec["initContainers"]:
            subprocess.run([*pod, *map(as_run, container["command"])], check=True, timeout=30)
        (container,) = spec["containers"]
        (mount,) = [item["mountPath"] for item in container["volumeMounts"] if item["name"] == "config"]
        command = [str(self._config) if word == f"{mount}/cluster.yaml" else as_run(word) for word in container["command"]]
        assert str(self._config) in command
        given = [f"{item['name']}={as_run(item.get('value', '$(NODE_RANK)'))}" for item in container["env"]]
        key = f"{name}-{place}"
        launched = self._children.launch(
            key, ["env", *given, *pod, *command], log=self._folder / f"{key}.log", ready_url=""
        )
        self.processes[key] = launched

    def end(self) -> dict[str, int | None]:
        """Tell all to end at once, as a deletion does; exit statuses."""
        for process in self.processes.values():
            send(process, signal.SIGTERM)
        wait_for_end(list(self.processes.values()), timeout_s=90.0, all_of_them=True)
        return {name: self._children.exit_status(process) for name, process in self.processes.items()}


@pytest.mark.skipif(not may_mount(), reason="a mount namespace cannot be had here")
async def test_the_containers_of_a_cluster_answer_and_drain(tiny: MakeCheckpoint, tmp_path: Path) -> None:
    pods = Pods(manifests(tiny("2.0", with_tokenizer=True), tmp_path), tmp_path)
    try:
        async with httpx.AsyncClient(base_url=pods.url, timeout=30.0) as client:
            await ready(pods.url, client)
            body = {"prompt": list(range(20, 60)), "max_tokens": 40, "temperature": 0, "ignore_eos": True}
            streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
            async with client.stream("POST", "/v1/completions", json=streamed) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: {"), answer.status_code
                ending = asyncio.ensure_future(asyncio.to_thread(pods.end))
                *_, usage, done = [line async for line in lines if line]
            ends = await ending
        assert done == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 40
        assert list(ends.values()) == [0] * 5, ends
    finally:
        kill_sessions(list(pods.processes.values()))
