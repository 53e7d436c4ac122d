"""Pools that were found as sections of a cluster YAML, to be put in place of a file's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator
from typing import Any

from longcat_pd.config.reader import Findings
from longcat_pd.config.resolve import complete
from longcat_pd.config.schema import ClusterConfig, EngineConfig, InstanceConfig, ParallelConfig, PoolConfig
from longcat_pd.sizing.candidates import pool_of
from longcat_pd.sizing.search import Answer


def fragment(base: ClusterConfig, answers: Iterable[Answer]) -> Iterator[str]:
    """Sections of a cluster YAML with a pool of each role. Raises ConfigError if the whole would be refused."""
    named = {answer.role: _with_nodes(answer, base) for answer in answers}
    complete(dataclasses.replace(base, prefill=named["prefill"], decode=named["decode"]), Findings())
    yield f"devices_per_node: {base.devices_per_node}"
    for role, pool in named.items():
        yield f"{role}:"
        yield f"  parallel: {json.dumps(_changed(pool.parallel, ParallelConfig()))}"
        yield f"  engine: {json.dumps(_changed(pool.engine, EngineConfig()))}"
        if pool.env:
            yield f"  env: {json.dumps(pool.env)}"
        yield "  instances:"
        yield from (f"    - {json.dumps(_changed(one, InstanceConfig(name='', http_port=0)))}" for one in pool.instances)


def _with_nodes(answer: Answer, base: ClusterConfig) -> PoolConfig:
    """One instance on the pool's own nodes, as far as they go, and on invented ones."""
    pool = pool_of(base, answer.role)
    own = list(dict.fromkeys(node for instance in pool.instances for node in instance.nodes))
    count = -(-answer.pool.parallel.world_size // base.devices_per_node)
    invented = [f"10.0.{2 if answer.role == 'prefill' else 1}.{100 + number}" for number in range(count)]
    nodes = (*own, *(node for node in invented if node not in own))[:count]
    return dataclasses.replace(answer.pool, instances=(dataclasses.replace(pool.instances[0], nodes=nodes),))


def _changed(record: Any, usual: Any) -> dict[str, Any]:
    """What a record says that its kind does not say anyway."""
    return {name: value for name, value in dataclasses.asdict(record).items() if value != vars(usual)[name]}
