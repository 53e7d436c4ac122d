"""The headers of a balancer's leg to a worker."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from longcat_pd.engine.request import TransferRef
from longcat_pd.errors import InvalidRequest

TRANSFER_ID = "X-Longcat-Transfer-Id"
PEER = "X-Longcat-Peer"
DEADLINE_MS = "X-Longcat-Deadline-Ms"
ATTEMPT = "X-Longcat-Attempt"
FAILOVER = "X-Longcat-Failover"

_ID = re.compile(r"[0-9a-f]{32}")
_NUMBER = re.compile(r"[0-9]{1,12}")
_FAILOVER = re.compile("ids|resume|")


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What a leg says of the hand-over it belongs to.

    ``tells_ids``: the answer may have to go on elsewhere, so its ids are told beside it. ``is_resumed``: it began
    elsewhere.
    """

    transfer: TransferRef
    time_left_s: float
    attempt: int
    tells_ids: bool = False
    is_resumed: bool = False


def read_leg(headers: Mapping[str, str], *, front: str) -> Leg:
    """The leg of a request. Raises InvalidRequest, which points to ``front`` where the headers are missing."""
    values: dict[str, str] = {}
    for name in (TRANSFER_ID, PEER, DEADLINE_MS):
        value = headers.get(name)
        if not value:
            raise InvalidRequest(
                f"this is one half of a pair; send requests to the load balancer at {front}",
                code="missing_field",
                param=name,
            )
        values[name] = value
    values |= {ATTEMPT: headers.get(ATTEMPT, "1"), FAILOVER: headers.get(FAILOVER, "")}
    for name, form in ((TRANSFER_ID, _ID), (DEADLINE_MS, _NUMBER), (ATTEMPT, _NUMBER), (FAILOVER, _FAILOVER)):
        if not form.fullmatch(values[name]):
            raise InvalidRequest(f"{name} = {values[name][:40]!r} is malformed", param=name)
    return Leg(
        transfer=TransferRef(id=values[TRANSFER_ID], peer=values[PEER]),
        time_left_s=int(values[DEADLINE_MS]) / 1000,
        attempt=int(values[ATTEMPT]),
        tells_ids=values[FAILOVER] == "ids",
        is_resumed=values[FAILOVER] == "resume",
    )
