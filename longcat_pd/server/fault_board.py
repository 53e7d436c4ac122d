"""The fault switches of an instance, and the route by which they are set: ``POST /admin/fault``, where ``faults`` is true.

Those of the driver are here, those of its ranks there, where they are ordered over the socket of the plans. Knows which
instance has which switches; what they do stands where they act.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from fastapi import Request, Response

from longcat_pd.config.schema import InstanceSpec
from longcat_pd.errors import InvalidRequest, WorkerUnavailable
from longcat_pd.faults import OF_A_DRIVER, SWITCHES, Fault, FaultOrder, FaultRefused, Switches, read_fault
from longcat_pd.log import logger
from longcat_pd.server.about_routes import Routes
from longcat_pd.server.errors import json_response
from longcat_pd.server.intake import read_bytes
from longcat_pd.server.openai import decode_body
from longcat_pd.wire import Unsendable

PATH = "/admin/fault"
_MAX_BODY_BYTES = 4096

OrderRanks = Callable[[FaultOrder, int | None], None]


class FaultBoard:
    """What is set at one instance.

    Args:
        order: to one rank, or (None) to all; raises Unsendable.
    """

    def __init__(self, spec: InstanceSpec, order: OrderRanks) -> None:
        self.switches = Switches(_tell)
        self._spec = spec
        self._order = order
        self._ordered: list[Fault] = []

    def set(self, told: Mapping[str, object]) -> None:
        """As described. Raises InvalidRequest, or WorkerUnavailable for a rank that cannot be told."""
        try:
            fault = read_fault(told)
        except FaultRefused as error:
            raise InvalidRequest(str(error)) from None
        self._check(fault)
        if fault.where in OF_A_DRIVER:
            self.switches.set(fault)
        else:
            self._tell_ranks(FaultOrder(fault=fault), fault.rank)
            self._ordered.append(fault)
        logger().warning("fault_set", **{"fault" if key == "name" else key: value for key, value in fault.told().items()})

    def clear(self, name: str) -> None:
        """Those of this name; of every name if it is empty."""
        if name and name not in SWITCHES:
            raise InvalidRequest(f"clear = {name!r} is no switch; known: {', '.join(SWITCHES)}", param="clear")
        self.switches.clear(name)
        self._ordered = [fault for fault in self._ordered if name and fault.name != name]
        self._tell_ranks(FaultOrder(clear=name), None)
        logger().warning("fault_cleared", fault=name or "all")

    def listed(self) -> dict[str, Any]:
        """What is set here; of the ranks, what they were told: that it has struck its last time is in their log alone."""
        faults = [fault.told() for fault in (*self.switches.listed(), *self._ordered)]
        return {"instance": self._spec.name, "faults": faults}

    def routes(self) -> Routes:
        """By path; POST."""

        async def switch(request: Request) -> Response:
            told = decode_body(await read_bytes(request, _MAX_BODY_BYTES) or b"{}")
            wanted, clear = told.pop("instance", self._spec.name), told.pop("clear", None)
            if wanted != self._spec.name:
                raise InvalidRequest(f"instance = {wanted!r} is not {self._spec.name}", param="instance")
            if clear is not None and (told or not isinstance(clear, str)):
                raise InvalidRequest("clear: the name of a switch, or all; alone", param="clear")
            if clear is not None:
                self.clear("" if clear == "all" else clear)
            elif told:
                self.set(told)
            return json_response(self.listed())

        return {PATH: switch}

    def _check(self, fault: Fault) -> None:
        size, role = self._spec.parallel.world_size, self._spec.role
        if fault.rank is not None and fault.rank >= size:
            raise InvalidRequest(f"rank = {fault.rank}: the ranks of {self._spec.name} are 0 ... {size - 1}", param="rank")
        if fault.where == "lane" and role != "prefill":
            raise InvalidRequest(f"{fault.name}: lanes have their faults where they begin, at a prefill instance")
        if fault.where == "control" and role == "standalone":
            raise InvalidRequest(f"{fault.name}: a standalone engine has no peers")

    def _tell_ranks(self, order: FaultOrder, rank: int | None) -> None:
        try:
            self._order(order, rank)
        except Unsendable as error:
            raise WorkerUnavailable(f"a rank of {self._spec.name} cannot be told: {error}") from error


def _tell(fault: Fault) -> None:
    logger().warning("fault_struck", fault=fault.name, record=fault.record)
