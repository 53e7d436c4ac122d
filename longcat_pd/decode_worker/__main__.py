"""``python -m longcat_pd.decode_worker --config YAML --instance NAME``: one decode instance."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from longcat_pd.config.keys import admission
from longcat_pd.decode_worker.service import DecodeService
from longcat_pd.kv_transfer.faulty_control import exposed
from longcat_pd.kv_transfer.hello import CONTROL_PORT_OFFSET
from longcat_pd.kv_transfer.offers import Offers, PairLimits
from longcat_pd.server.parts import Parts
from longcat_pd.server.peered import WorkerRole
from longcat_pd.server.worker import run_worker
from longcat_pd.wire import AsyncSocket, tcp

LINGER_S = 0.2  # for the last aborts to leave


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a signal or a fault; the exit status."""
    return run_worker(WorkerRole(name="decode", rank_entry="longcat_pd.decode_worker.rank:main", build=build), arguments)


def build(parts: Parts) -> tuple[DecodeService, Offers]:
    """The service, and the socket to which every prefill instance connects. Raises OSError when it cannot be bound."""
    spec, transfers = parts.spec, parts.metrics.transfers
    limits = PairLimits(
        offer_s=spec.transfer.pairing_timeout_s,
        commit_s=spec.transfer.timeout_s,
        vocab_size=parts.vocab_size,
        hidden_size=parts.hidden_size,
    )
    endpoint = tcp(spec.host, spec.http_port + CONTROL_PORT_OFFSET)
    switches = parts.faults.switches if parts.faults is not None else None
    place = admission(spec.cluster_key_file)
    socket = AsyncSocket("router", endpoint, bind=True, admission=place, linger_s=LINGER_S)
    offers = Offers(
        parts.hello,
        [peer.name for peer in spec.peers],
        socket=exposed(socket, switches),
        limits=limits,
        clock=parts.clock,
        metrics=transfers,
    )
    service = DecodeService(spec, parts.hello, engine=parts.engine, offers=offers, now=parts.clock.now, metrics=transfers)
    return service, offers


if __name__ == "__main__":
    sys.exit(main())
