"""``python -m longcat_pd.prefill_worker --config YAML --instance NAME``: one prefill instance."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from longcat_pd.config.keys import admission
from longcat_pd.config.schema import PeerAddress
from longcat_pd.kv_transfer.faulty_control import exposed
from longcat_pd.kv_transfer.hello import CONTROL_PORT_OFFSET
from longcat_pd.kv_transfer.offering import Offering
from longcat_pd.prefill_worker.service import PrefillService
from longcat_pd.server.parts import Parts
from longcat_pd.server.peered import WorkerRole
from longcat_pd.server.worker import run_worker
from longcat_pd.wire import AsyncSocket, tcp

LINGER_S = 0.2  # for the last aborts to leave


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or a fault; the exit status."""
    return run_worker(WorkerRole(name="prefill", rank_entry="longcat_pd.prefill_worker.rank:main", build=build), arguments)


def build(parts: Parts) -> tuple[PrefillService, Offering]:
    """The service, and a link to every decode instance of the configuration."""
    spec, transfers = parts.spec, parts.metrics.transfers
    identity = f"{spec.name}.{parts.hello.incarnation}".encode()
    place = admission(spec.cluster_key_file)
    switches = parts.faults.switches if parts.faults is not None else None

    def connect(peer: PeerAddress) -> AsyncSocket:
        endpoint = tcp(peer.host, peer.http_port + CONTROL_PORT_OFFSET)
        return AsyncSocket("dealer", endpoint, bind=False, admission=place, identity=identity, linger_s=LINGER_S)

    offering = Offering(
        parts.hello,
        spec.peers,
        connect=lambda peer: exposed(connect(peer), switches),
        clock=parts.clock,
        metrics=transfers,
    )
    service = PrefillService(
        spec, parts.hello, engine=parts.engine, offering=offering, now=parts.clock.now, metrics=transfers
    )
    return service, offering


if __name__ == "__main__":
    sys.exit(main())
