"""The machines of a cluster as the operator's machine sees them: how each is reached, and what its agent is told.

Addresses of this machine make one machine together. Starts nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from longcat_pd import own
from longcat_pd.cluster.jobs import Job, LogQuery
from longcat_pd.cluster.record import write_private
from longcat_pd.cluster.shell import LocalShell, SshShell, is_this_machine
from longcat_pd.config.checks import pools
from longcat_pd.config.node_checks import is_everywhere
from longcat_pd.config.resolve import as_json, load, unresolved
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import BALANCER, Service, balancer_url, nodes_of, ports_of_node, services
from longcat_pd.errors import ConfigError

DRAIN_MARGIN_S = 15.0

# $1 hosts.path, $2 interpreter or nothing, $3 the verb. Where ``current`` leads to is looked up once: it may be switched.
# The empty line ends what a start-up file of the shell has said.
_AGENT = """\
echo
if ! cd "$1/current" 2>/dev/null || [ ! -f longcat_pd/cluster/agent.py ]; then
  echo "no code in $1/current; run 'run_pd.sh code' first" >&2; exit 2
fi
tree=$(pwd -P)
python=${2:-$tree/.venv/bin/python}
if [ ! -x "$python" ]; then
  echo "no interpreter $python; run 'run_pd.sh code' first, or set hosts.python" >&2; exit 2
fi
cd "$tree" && exec env PYTHONPATH="$tree" "$python" -m longcat_pd.cluster.agent "$3"
"""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine and its addresses in the configuration."""

    shell: LocalShell | SshShell
    nodes: tuple[str, ...]

    @property
    def name(self) -> str:
        """Its first address."""
        return self.nodes[0]


class Memory:
    """The configuration of what was started from here, so that the other verbs need no options to find it again."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "started.yaml"

    @property
    def file(self) -> Path | None:
        """None: nothing is known to run."""
        return self._file if self._file.is_file() else None

    def write(self, text: str) -> None:
        """Remember, whole or not at all. Raises ConfigError if that cannot be."""
        with self._refused():
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_private(self._file, text)

    def clear(self) -> None:
        """Nothing of it runs any more. Raises ConfigError if it cannot be forgotten."""
        if self.file is not None:
            with self._refused():
                self._file.unlink()

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"what was started cannot be noted down here: {error.strerror}"
            raise ConfigError(f"{self._file}: {text}") from error


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A configuration and where it runs. ``file``: as the operator named it; ``text``: what it says, overrides included.

    ``only``: the setting of the one instance (or of the balancer) that is meant, while all else runs on; "": all of it.
    """

    file: Path
    root: Path
    text: str
    config: ClusterConfig
    machines: tuple[Machine, ...]
    only: str = ""

    @property
    def name(self) -> str:
        """Two clusters of one name are one."""
        return self.file.stem

    @property
    def memory(self) -> Memory:
        """What is known here of what was started."""
        return _memory(self.root, self.file)

    @property
    def services(self) -> tuple[Service, ...]:
        """Those that are meant."""
        return tuple(service for service in services(self.config) if self.only in ("", service.key))

    def part(self, name: str) -> Cluster:
        """One instance of it, or the balancer, on the machines that it has. Raises ConfigError."""
        keys = {service.name: service.key for service in services(self.config) if service.kind != "ranks"}
        if name not in keys:
            known = ", ".join(keys)
            raise ConfigError(f"--instance {name}: not a service of {self.name}; known: {known}", param="instance")
        whole = replace(self, only=keys[name])
        nodes = {service.node for service in whole.services}
        return replace(whole, machines=tuple(machine for machine in self.machines if nodes & set(machine.nodes)))

    def forget(self) -> None:
        """Nothing of it runs any more; what a part was of does."""
        if not self.only:
            self.memory.clear()

    def job(self, machine: Machine, query: LogQuery | None = None) -> Job:
        """What the agent of one of its machines is told."""
        config, path = self.config, self.config.hosts.path
        folder = f"{path.rstrip('/')}/run/{self.name}" if path else str(self.root / ".run" / self.name)
        ports = [use for node in machine.nodes for use in ports_of_node(config, node)]
        return Job(
            config=str(self.file),
            text=self.text,
            folder=folder,
            logs=config.log_dir or folder,
            url=balancer_url(config),
            nodes=machine.nodes,
            services=tuple(service for service in self.services if service.node in machine.nodes),
            ports=tuple(use for use in ports if use.key.startswith(f"{self.only}." if self.only else "")),
            is_part=bool(self.only),
            setup_files=config.hosts.setup_files,
            drain_s=DRAIN_MARGIN_S + max(pool.engine.drain_timeout_s for _, pool in pools(config)),
            query=query or LogQuery(),
        )

    def agent(self, verb: str) -> Sequence[str]:
        """The command of an agent: this very program, unless the machines have a tree of their own."""
        hosts = self.config.hosts
        if not hosts.path:
            return own.command("-m", "longcat_pd.cluster.agent", verb)
        return ["sh", "-c", _AGENT, "sh", hosts.path.rstrip("/"), hosts.python, verb]


def cluster_of(options: argparse.Namespace) -> Cluster:
    """What the options name. Needs the checkpoint's config.json only if this machine has it. Raises ConfigError."""
    config = unresolved(options.config, options.overrides)
    if os.access(Path(config.model.path) / "config.json", os.F_OK):  # also of a folder that this user may not enter
        config = load(options.config, options.overrides)
    return _cluster(options, config, as_json(options.config, options.overrides))


def running_cluster_of(options: argparse.Namespace) -> Cluster:
    """What was started under the name of the options' file, as it was then; if nothing is known of it, what they name."""
    file = _memory(options.root, options.config).file
    if file is None:
        return _cluster(options, unresolved(options.config, options.overrides), as_json(options.config, options.overrides))
    return _cluster(options, unresolved(file), as_json(file))


def is_known_to_run(options: argparse.Namespace) -> bool:
    """Whether ``running_cluster_of`` means what was started from here, and takes nothing else of the options."""
    return _memory(options.root, options.config).file is not None


def running_part_of(options: argparse.Namespace) -> Cluster:
    """What ``--instance`` names of what was started from here. Raises ConfigError, also where nothing is known of it."""
    if not is_known_to_run(options):
        text = "nothing is known here to run of this cluster; start it, from the folder that it was started from"
        raise ConfigError(f"--instance {options.instance}: {text}", param="instance")
    return running_cluster_of(options).part(options.instance)


def _memory(root: Path, file: Path) -> Memory:
    return Memory(root / ".run" / file.stem)


def _cluster(options: argparse.Namespace, config: ClusterConfig, text: str) -> Cluster:
    if config.prefill is None:
        text = "one engine alone is not started here, see longcat-pd serve; a cluster has prefill and decode"
        raise ConfigError(f"standalone: {text}", param="standalone")
    nodes = nodes_of(config)
    here = tuple(node for node in nodes if is_this_machine(node))
    others = [node for node in nodes if node not in here]
    if others and not config.hosts.path:
        raise ConfigError(f"hosts.path: needed for {', '.join(others)}, which is not this machine", param="hosts.path")
    everywhere = sorted({s.node for s in services(config) if s.kind != BALANCER and is_everywhere(s.node)})
    if others and everywhere:
        text = f"{', '.join(everywhere)} is not this machine to {', '.join(others)}; name an address that they reach"
        raise ConfigError(f"nodes: {text}", param="nodes")
    if others and shutil.which("ssh") is None:
        raise ConfigError(f"ssh is not on PATH, and {', '.join(others)} is not this machine")
    machines = [Machine(shell=LocalShell(node=here[0]), nodes=here)] if here else []
    machines += [Machine(shell=SshShell(node=node, hosts=config.hosts), nodes=(node,)) for node in others]
    return Cluster(file=options.config, root=options.root, text=text, config=config, machines=tuple(machines))
