"""``longcat-pd render k8s|systemd YAML``: a cluster's processes for who else may start them, written out and not started.

Owns the command line and where the files go. What is in them follows from the cluster YAML alone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from longcat_pd.config.reader import Findings
from longcat_pd.config.resolve import as_json
from longcat_pd.errors import ConfigError
from longcat_pd.render.command import CONFIG_FILE, Launch
from longcat_pd.render.files import as_yaml, write
from longcat_pd.render.k8s import objects
from longcat_pd.render.names import Names, check_names, pod_tree
from longcat_pd.render.planned import cluster, planned
from longcat_pd.render.systemd import Machine, units
from longcat_pd.render.target import Target, Weights

EXIT_OK, EXIT_REFUSED = 0, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the files. Exit status 2 for what is refused, with every finding."""
    options = _parser().parse_args(arguments)
    forms = {"k8s": _manifests, "systemd": _units}
    try:
        write(forms[options.form](options), options.out)
    except ConfigError as error:
        for line in error.message.splitlines():
            sys.stderr.write(f"error: {line}\n")
        return EXIT_REFUSED
    return EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longcat-pd render", description="Write what starts a cluster's processes.")
    forms = parser.add_subparsers(dest="form", required=True, metavar="k8s|systemd")
    k8s = forms.add_parser("k8s", help="manifests for Kubernetes with LeaderWorkerSet")
    k8s.add_argument("--image", required=True, metavar="NAME:TAG", help="of every pod; pinned by a tag or a digest")
    k8s.add_argument("--namespace", default="default")
    k8s.add_argument("--name", default="longcat", help="what every object begins with (default: longcat)")
    k8s.add_argument("--python", default="python", help="the interpreter in the image (default: python)")
    k8s.add_argument(
        "--secret", default="", help="with the key files, each under the name of its setting (default: NAME-keys)"
    )
    k8s.add_argument(
        "--weights-claim", default="", metavar="PVC", help="holds model.path (default: that path of each machine)"
    )
    k8s.add_argument("--weights-sub-path", default="", metavar="PATH", help="in the claim")
    systemd = forms.add_parser("systemd", help="units for systemd")
    systemd.add_argument("--node", default="", help="all services of this machine (default: the balancer alone)")
    systemd.add_argument(
        "--tree", default="", metavar="DIR", help="the code there (default: current in hosts.path, or here)"
    )
    systemd.add_argument("--user", default="", help="who services run as (default: hosts.user, or longcat-pd)")
    for form in (k8s, systemd):
        form.add_argument("config", metavar="CLUSTER_YAML")
        form.add_argument("--set", dest="overrides", action="append", default=[], metavar="key.path=value")
        form.add_argument("--out", type=Path, metavar="DIR", help="one file each (default: all to standard output)")
    return parser


def _manifests(options: argparse.Namespace) -> Mapping[str, str]:
    config, memory = planned(Path(options.config), options.overrides)
    names = Names(release=options.name, namespace=options.namespace)
    found = Findings()
    check_names(config, names, image=options.image, found=found)
    found.raise_if_any()
    tree = pod_tree(Path(options.config), options.overrides, config=config, names=names)
    text = as_yaml(tree)
    target = Target(
        config=config,
        config_text=text,
        config_digest=hashlib.sha256(text.encode()).hexdigest(),
        names=names,
        image=options.image,
        launch=Launch(python=options.python, setup_files=config.hosts.setup_files),
        secret=options.secret or f"{names.release}-keys",
        weights=Weights(claim=options.weights_claim, sub_path=options.weights_sub_path),
        memory_bytes=memory,
    )
    return {
        f"{place:02}-{item['kind'].lower()}-{item['metadata']['name']}.yaml": f"---\n{as_yaml(item)}"
        for place, item in enumerate(objects(target))
    }


def _units(options: argparse.Namespace) -> Mapping[str, str]:
    config = cluster(Path(options.config), options.overrides)
    hosts = config.hosts
    given = options.tree or (f"{hosts.path.removesuffix('/')}/current" if hosts.path else "")
    tree = os.path.normpath(Path(given).absolute())
    launch = Launch(python=hosts.python or f"{tree}/.venv/bin/python", setup_files=hosts.setup_files)
    machine = Machine(launch=launch, tree=tree, user=options.user or hosts.user or "longcat-pd", node=options.node)
    files = dict(units(config, machine))
    if not files:
        raise ConfigError(f"--node {options.node}: nothing of this cluster runs there", param="--node")
    return {**files, Path(CONFIG_FILE).name: as_json(options.config, options.overrides) + "\n"}
