"""``longcat-pd serve``: one engine behind the public face, its ranks in processes of their own: the face never waits.

Owns the command's arguments and what is checked before anything is loaded.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import replace

from longcat_pd import log
from longcat_pd.config import resolve
from longcat_pd.config.schema import LoadBalancerConfig
from longcat_pd.errors import ConfigError
from longcat_pd.server.inspected import tell_plan
from longcat_pd.server.run import STATUS_OK, listen, refuse
from longcat_pd.standalone.default_model import HELP, with_default
from longcat_pd.standalone.online import serve


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal or a fault; the exit status."""
    options = _parser().parse_args(arguments)
    log.set_up()
    log.logger().info("starting", role="standalone")
    began = time.monotonic()
    keys = {"api_key_file": options.api_key_file, "admin_key_file": options.admin_key_file}
    try:
        model, overrides = with_default(options.model, _overrides(options))
        cluster = resolve.standalone_cluster(model, overrides, host=options.host, port=options.port)
        spec = resolve.instance_spec(cluster, "standalone")
        log.logger().info("config_resolved", digest=spec.config_digest, seconds=time.monotonic() - began)
        front = replace(cluster.load_balancer, **{name: path for name, path in keys.items() if path is not None})
        tell_plan(spec)
        if options.check:
            return STATUS_OK
        with listen(options.host, options.port) as listener:
            return asyncio.run(serve(spec, front, listener))
    except ConfigError as error:
        return refuse(error)


def _overrides(options: argparse.Namespace) -> list[str]:
    """Settings as they are given, and those that have a word of their own."""
    record = [] if options.record is None else [f"record.dir={json.dumps(options.record)}"]
    return [*options.overrides, *record, *(["record.texts=true"] if options.record_texts else [])]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="longcat-pd serve", description="Serve one engine over HTTP, without a balancer.")
    parser.add_argument("--model", metavar="DIR", help=HELP)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=LoadBalancerConfig.port, help="of HTTP; the ranks use the next ones")
    parser.add_argument("--api-key-file", metavar="FILE", help="keys of clients, one a line; none: open to all")
    parser.add_argument("--admin-key-file", metavar="FILE", help="keys for /admin, one a line; none: no /admin")
    parser.add_argument("--record", metavar="DIR", help="keep a bundle of each request there, for longcat-pd replay")
    parser.add_argument("--record-texts", action="store_true", help="with --record: texts too, and not ids alone")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="key=value",
        help="a setting, such as engine.max_num_seqs=16, model.dtype=float32 or load_balancer.max_inflight=64",
    )  # fmt: skip
    parser.add_argument("--check", action="store_true", help="print the plan, test ports and memory, then end")
    return parser
