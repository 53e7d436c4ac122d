"""From a bundle and the words behind ``--layout`` to a configuration on this machine.

Owns what of the recorded settings holds again (checkpoint, data type, drafts) and what is chosen anew (ports, lengths).
"""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from longcat_pd.clock import Clock
from longcat_pd.config import resolve
from longcat_pd.config.checks import port_uses
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.errors import ConfigError
from longcat_pd.replay.engines import Asked, Pools, one_engine
from longcat_pd.server.bundle import Bundle
from longcat_pd.sizing.preflight import port_findings
from longcat_pd.standalone.unattended import unattended

_POOLS = ("prefill", "decode")
_HOST = "127.0.0.1"
_ANY_PORT = 8081  # stands in the configuration until it is known which are free
_BASES = range(20000, 31000, 10)  # below the range that outgoing connections take their ports from
_APART = 300  # ports between the instances: each device has one
_TRIES = 50
_NUM_SEQS = 16  # nobody else asks


class Layout:
    """Where a bundle is asked again.

    Args:
        bundle: checked.
        model: folder of the checkpoint.
        words: ``key.path=value`` as in a cluster YAML, and at most one such file; what begins with ``prefill.`` or
            ``decode.`` asks for two pools, as the file does; ``engine.…`` is of the one engine or of both pools,
            ``parallel.…`` of the one engine.
    """

    def __init__(self, bundle: Bundle, model: str, words: Sequence[str]) -> None:
        self._files = [word for word in words if "=" not in word]
        self._given = [word for word in words if "=" in word]
        wrong = [word for word in self._files if Path(word).suffix not in (".yaml", ".yml")]
        if wrong or len(self._files) > 1:
            raise ConfigError(f"--layout {' '.join(wrong or self._files)}: takes key.path=value, and one cluster YAML")
        self._bundle = bundle
        self._model = str(Path(model).absolute())
        self.has_pools = bool(self._files) or any(word.startswith(tuple(f"{pool}." for pool in _POOLS)) for word in words)

    def build(self, clock: Clock) -> Asked:
        """What is asked; nothing is started. Raises ConfigError."""
        if self.has_pools:
            return Pools(self._pools(), clock)
        settings = [*self._of_model(), *self._of_engine("engine"), *self._given]
        spec = resolve.standalone(self._model, settings, host=_HOST, port=_ANY_PORT)
        return one_engine(unattended(spec), clock)

    def __str__(self) -> str:
        kind = "prefill and decode" if self.has_pools else "one engine"
        return " ".join([f"{kind}:", *self._files, *self._given]) if self._files or self._given else kind

    def _of_model(self) -> Iterator[str]:
        yield f"model.dtype={self._bundle.model.dtype}"
        yield f"model.weights={self._bundle.model.weights}"

    def _of_engine(self, path: str) -> Iterator[str]:
        """Room for this one request, with as many drafts as there were."""
        drafts = self._bundle.instances[-1].num_draft_tokens if self._bundle.instances else 0
        length = len(self._bundle.prompt_token_ids) + self._bundle.sampling.max_tokens + drafts
        yield f"{path}.max_model_len={length}"
        yield f"{path}.max_num_seqs={_NUM_SEQS}"
        yield f"{path}.num_draft_tokens={drafts}"

    def _pools(self) -> ClusterConfig:
        """On ports that nobody listens on now. Raises ConfigError."""
        for base in random.sample(_BASES, _TRIES):
            config = self._pools_at(base)
            if not any(port_findings(list(port_uses(config)))):
                return config
        raise ConfigError(f"no free ports among {_TRIES} places tried in {_BASES.start} ... {_BASES.stop}")

    def _pools_at(self, base: int) -> ClusterConfig:
        settings = [
            f"model.path={json.dumps(self._model)}",
            *self._of_model(),
            f"load_balancer.port={base + 2 * _APART}",
            "cluster_key_file=null",
            "record=null",
        ]
        for place, (pool, name) in enumerate(zip(_POOLS, "pd", strict=True)):
            instance = {"name": f"{name}0", "http_port": base + place * _APART, "nodes": [_HOST]}
            settings += [f"{pool}.instances={json.dumps([instance])}", *self._of_engine(f"{pool}.engine")]
        with tempfile.TemporaryDirectory(prefix="longcat-pd-replay-") as folder:
            blank = Path(folder) / "cluster.yaml"
            blank.write_text(json.dumps({"model": {"path": self._model}}), encoding="utf-8")
            return resolve.load(self._files[0] if self._files else blank, [*settings, *_of_both(self._given)])


def _of_both(words: Sequence[str]) -> Iterator[str]:
    """``engine.…`` is of both pools."""
    for word in words:
        yield from (f"{pool}.{word}" for pool in _POOLS) if word.startswith("engine.") else (word,)
