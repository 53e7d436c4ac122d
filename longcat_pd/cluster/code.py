"""``run_pd.sh code``: the tree of this machine becomes the current release of every node, or of none.

Owns the order over all nodes: look, copy and verify everywhere, and only then switch everywhere; who fails is named and
nothing is switched. What happens on one machine is ``release.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from longcat_pd.cluster.everywhere import Outcome, everywhere
from longcat_pd.cluster.release import NodeCode, Place
from longcat_pd.cluster.shell import Shell, Unreachable, is_this_machine, shell_of
from longcat_pd.cluster.telling import EXIT_FAILED, EXIT_OK, complain, say
from longcat_pd.cluster.tree import Tree, tree_of
from longcat_pd.config.checks import pools
from longcat_pd.config.resolve import unresolved
from longcat_pd.config.schema import ClusterConfig
from longcat_pd.config.services import nodes_of
from longcat_pd.errors import ConfigError

_DEFAULT_GRAPHS = "~/.cache/longcat_pd/compiled"
_WRITABLE_BY_OTHERS = 0o022
Nodes = Sequence[tuple[str, NodeCode]]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What was done on a machine before the switch."""

    num_sent: int
    was_there: bool
    python: str


def arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own options."""
    text = "a folder of compiled graphs, of this user alone, that is laid into engine.compile_cache of the machines"
    parser.add_argument("--compile-cache", type=Path, metavar="DIR", help=text)


def main(options: argparse.Namespace) -> int:
    """The verb. Raises ConfigError."""
    return distribute(options.root, options.config, overrides=options.overrides, graphs=options.compile_cache)


def distribute(root: Path, config_file: Path, *, overrides: Sequence[str], graphs: Path | None = None) -> int:
    """Distribute the tree at ``root`` over the cluster of a file. Returns the exit status: 0 done, 1 failed, 2 refused.

    ``graphs``: a folder of compiled graphs that goes along. Raises ConfigError for what is refused before any machine is
    asked.
    """
    config = unresolved(config_file, overrides)
    check_place(root, config)
    if graphs is not None:
        check_graphs(graphs)
    tree = tree_of(root.resolve())
    nodes = nodes_with(config, tree)
    say(f"release {tree.digest}: {len(tree.paths)} files of {root}, {'; '.join(tree.notes)}")
    with contextlib.ExitStack() as stack:
        looked = everywhere(nodes, lambda node: stack.enter_context(node).look())
        if looked.faults:
            return _refuse(looked)
        places = looked.results
        if not config.hosts.python:
            say("an environment is made on each machine where the release has none yet, which takes minutes")
        fetched = everywhere(nodes, lambda node: _fetch(node, places[node.shell.node], graphs=graphs))
        _show(fetched)
        return _refuse(fetched) if fetched.faults else _switch(nodes, places)


def check_place(root: Path, config: ClusterConfig) -> None:
    """``hosts.path`` is there, and apart from the tree, on this machine and on those that share its disk."""
    path, source = config.hosts.path, root.resolve()
    if not path:
        raise ConfigError("hosts.path: must be set: the folder of each node that the code goes to", param="hosts.path")
    target = Path(path).resolve()
    for inner, outer, text in (
        (target, source, "lies in the tree that is to be distributed"),
        (source, target, "holds the tree that is to be distributed"),
    ):
        if inner == outer or outer in inner.parents:
            raise ConfigError(f"hosts.path={path}: {text}, {root}; nothing is copied onto itself", param="hosts.path")


def check_graphs(folder: Path) -> None:
    """Compiled graphs are executed: all of them must be this user's and writable by nobody else."""
    if not folder.is_dir():
        raise ConfigError(f"--compile-cache {folder}: is no folder")
    for path in (folder, *sorted(folder.rglob("*"))):
        found = path.lstat()
        if found.st_uid != os.getuid() or (not path.is_symlink() and found.st_mode & _WRITABLE_BY_OTHERS):
            text = "is not this user's, or others can write to it; compiled graphs are executed"
            raise ConfigError(f"--compile-cache {folder}: {path} {text}")


def nodes_with(config: ClusterConfig, tree: Tree) -> Nodes:
    """Every machine of a cluster, this one once, under whichever of its addresses comes first."""
    shells = [shell_of(node, config.hosts) for node in nodes_of(config)]
    here = [shell for shell in shells if shell.is_here]
    once = [shell for shell in shells if not shell.is_here or shell == here[0]]
    return [(shell.node, NodeCode(shell, config=config, tree=tree)) for shell in once]


def graph_places(config: ClusterConfig, shell: Shell) -> tuple[str, ...]:
    """The folders in which ranks on a machine look for compiled graphs."""
    nodes = {node for node in nodes_of(config) if is_this_machine(node)} if shell.is_here else {shell.node}
    engines = [pool.engine for _, pool in pools(config) if any(nodes & set(each.nodes) for each in pool.instances)]
    return tuple(dict.fromkeys(engine.compile_cache or _DEFAULT_GRAPHS for engine in engines))


def _fetch(node: NodeCode, place: Place, *, graphs: Path | None) -> Report:
    num_sent = 0 if place.has_release else node.fetch(place)
    packages = node.make_environment()
    if graphs is not None:
        node.copy_graphs(graphs, graph_places(node.config, node.shell))
    return Report(num_sent=num_sent, was_there=place.has_release, python=packages.python)


def _switch(nodes: Nodes, places: Mapping[str, Place]) -> int:
    """All nodes hold the release. If one cannot switch, those that did go back, so that no cluster is half new."""
    digest = nodes[0][1].tree.digest
    behind = [(name, node) for name, node in nodes if places[name].current != digest]
    switched = everywhere(behind, lambda node: node.switch(digest))
    if switched.faults:
        return _go_back([(name, node) for name, node in behind if name in switched.results], places, switched)
    pruned = everywhere(nodes, NodeCode.prune)
    removed = sum(len(names) for names in pruned.results.values())
    say(f"current on {len(nodes)} nodes: {digest}" + (f"; {removed} old releases removed" if removed else ""))
    for fault in pruned.faults:
        complain(f"warning: old releases stay: {fault}")
    return EXIT_OK


def _go_back(nodes: Nodes, places: Mapping[str, Place], switched: Outcome[None]) -> int:
    back = everywhere(nodes, lambda node: node.switch(places[node.shell.node].current))
    unsure = [*back.faults, *(fault for fault in switched.faults if isinstance(fault, Unreachable))]
    if not unsure:
        return _refuse(switched)
    _name(dict.fromkeys((*switched.faults, *back.faults)))
    names = ", ".join(dict.fromkeys(fault.node for fault in unsure))
    complain(f"{names} may have the new release, while the others have the one before; run code again")
    return switched.status


def _show(fetched: Outcome[Report]) -> None:
    for node, report in fetched.results.items():
        what = "was there already" if report.was_there else f"{report.num_sent} files sent"
        say(f"  {node}: {what}, every file verified; Python {report.python}")


def _refuse(outcome: Outcome[Place] | Outcome[Report] | Outcome[None]) -> int:
    _name(outcome.faults)
    complain("nothing was switched: every node keeps the release that it had")
    return outcome.status or EXIT_FAILED


def _name(faults: Iterable[Exception]) -> None:
    for fault in faults:
        complain(f"error: {fault}")
