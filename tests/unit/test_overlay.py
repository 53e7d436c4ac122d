"""The variables of a deployment script, laid over a cluster YAML."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from longcat_pd.cluster import overlay
from longcat_pd.config.resolve import unresolved
from longcat_pd.config.services import balancer_url, services
from longcat_pd.errors import ConfigError

TREE: dict[str, Any] = {
    "model": {"path": "weights"},
    "cluster_key_file": "/etc/longcat_pd/cluster.key",
    "devices_per_node": 2,
    "prefill": {"parallel": {"pp_size": 2}, "instances": [{"name": "p0", "http_port": 30000}]},
    "decode": {
        "parallel": {"kvp_size": 4, "attn_tp_size": 4},
        "instances": [{"name": "d0", "http_port": 31000}, {"name": "d1", "http_port": 31100}],
    },
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps(TREE))
    return file


def laid(config: Path, *arguments: str) -> list[str]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    overlay.arguments(parser)
    return overlay.overrides(config, parser.parse_args(arguments))


def test_decode_comes_first_and_the_balancer_is_on_the_last(config: Path) -> None:
    settings = laid(config, "--iplist", "10.0.0.1 10.0.0.2 10.0.0.3, 10.0.0.4 10.0.0.5", "--testpath", "/opt/x")
    cluster = unresolved(config, settings)
    assert [(service.name, service.node) for service in services(cluster)] == [
        ("d0", "10.0.0.1"),
        ("d0.1", "10.0.0.2"),
        ("d1", "10.0.0.3"),
        ("d1.1", "10.0.0.4"),
        ("p0", "10.0.0.5"),
        ("balancer", "10.0.0.5"),
    ]
    assert balancer_url(cluster) == "http://10.0.0.5:8081", "not where only that machine itself can reach it"
    assert cluster.hosts.path == "/opt/x"


def test_a_wrong_number_of_addresses_is_told_with_both(config: Path) -> None:
    with pytest.raises(ConfigError) as raised:
        laid(config, "--iplist", "10.0.0.1 10.0.0.2 10.0.0.3")
    assert raised.value.message == (
        "--iplist: has 3 addresses, c.yaml needs 5: decode.instances.0 2, decode.instances.1 2, prefill.instances.0 1"
    )


def test_the_file_may_spread_an_instance_wider_than_its_ranks_need(config: Path) -> None:
    wide = "prefill.instances.0.nodes=[a, b]"
    settings = laid(config, "--set", wide, "--iplist", "1.0.0.1 1.0.0.2 1.0.0.3 1.0.0.4 1.0.0.5 1.0.0.6")
    with pytest.raises(ConfigError, match=r"has 5 addresses, c\.yaml needs 6"):
        laid(config, "--set", wide, "--iplist", "1.0.0.1 1.0.0.2 1.0.0.3 1.0.0.4 1.0.0.5")
    assert 'prefill.instances.0.nodes=["1.0.0.5", "1.0.0.6"]' in settings


def test_where_it_listens_is_kept_where_others_reach_it(config: Path) -> None:
    addresses = "10.0.0.1 10.0.0.2 10.0.0.3 10.0.0.4 10.0.0.5"
    everywhere = laid(config, "--iplist", addresses, "--set", "load_balancer.host=0.0.0.0")
    assert unresolved(config, everywhere).load_balancer.host == "0.0.0.0"
    loopback = laid(config, "--iplist", "127.0.0.1 127.0.0.2 127.0.0.3 127.0.0.4 127.0.0.5")
    assert unresolved(config, loopback).load_balancer.host == "127.0.0.1"


def test_the_other_variables_and_what_counts_more(config: Path) -> None:
    nodes = ["--iplist", "a b c d e"]
    given = [*nodes, "--ssh-port", "2222", "--testpath", "/opt/a", "--logdir", "/logs", "--model-path", "/weights/true"]
    cluster = unresolved(config, laid(config, *given, "--set", "log_dir=/other"))
    assert (cluster.hosts.port, cluster.hosts.path, cluster.model.path) == (2222, "/opt/a", "/weights/true")
    assert cluster.log_dir == "/other", "what is set by its key"
    assert laid(config) == []


def test_an_instance_that_has_no_file_yet_is_no_reason_to_stop(config: Path) -> None:
    """Findings of the file itself come when it is read as a whole."""
    settings = laid(config, "--set", "decode.engine.block_sise=4", "--iplist", "a b c d e")
    with pytest.raises(ConfigError, match="block_sise: unknown key"):
        unresolved(config, settings)
