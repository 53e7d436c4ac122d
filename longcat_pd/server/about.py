"""What an instance says about itself: health, readiness, information, accounts, its model.

Owns the shapes of those answers, for the service's figures and for what only the face knows: drain and open requests.
"""

from __future__ import annotations

import time
from typing import Any

from longcat_pd.errors import WorkerUnavailable
from longcat_pd.metrics import Metrics
from longcat_pd.server.gate import Gate
from longcat_pd.server.sampling_defaults import SamplingDefaults
from longcat_pd.server.service import Service
from longcat_pd.version import VERSION


class About:
    """Answers about one instance, from what is known already."""

    def __init__(self, service: Service, gate: Gate, defaults: SamplingDefaults) -> None:
        self._service = service
        self._gate = gate
        self._defaults = defaults
        self._created = int(time.time())

    def is_alive(self) -> bool:
        """Whether the process can still recover by itself."""
        return not self._service.readiness().is_lost

    def readiness(self) -> dict[str, Any]:
        """``/ready``."""
        state = self._service.readiness()
        reasons = list(state.reasons)
        if self._gate.is_draining:
            detail = f"{self._gate.num_open} requests are open"
            reasons.append({"code": "draining", "detail": detail, "rank": None})
        start = [stage.as_json() for stage in state.start(self._service.now())]
        return {
            "ready": not reasons,
            "busy": state.busy,
            "role": self._service.role,
            "instance": self._service.name,
            "incarnation": state.incarnation,
            "config_digest": state.config_digest,
            "ranks": {"total": state.ranks_total, "ok": state.ranks_ok},
            "peers": state.peers,
            "reasons": reasons,
            **({"start": start} if start else {}),
        }

    def refresh(self, metrics: Metrics) -> None:
        """Set the gauges that repeat ``/ready``."""
        metrics.ready.set(self.readiness()["ready"])
        metrics.draining.set(self._gate.is_draining)

    def server_info(self) -> dict[str, Any]:
        """``/server_info``; the service adds ``parallel``, ``memory`` and ``internal_states``."""
        model = self._service.model
        return {
            "version": VERSION,
            "role": self._service.role,
            "instance": self._service.name,
            **self._paths(),
            "served_model_name": model.served_name,
            "max_model_len": self._service.engine_config.max_model_len,
            "sampling_defaults": self._defaults.shown(),
            "determinism": "batch_invariant",
            **self._service.info(),
        }

    def model_info(self) -> dict[str, Any]:
        """``/model_info``."""
        return {**self._paths(), "is_generation": True}

    def model(self) -> dict[str, Any]:
        """The one entry of ``/v1/models``. Raises WorkerUnavailable until the instance could serve."""
        if self._service.readiness().is_starting:
            raise WorkerUnavailable("this server is starting", code="starting")
        model = self._service.model
        return {
            "id": model.served_name,
            "object": "model",
            "created": self._created,
            "owned_by": "longcat",
            "root": model.path,
            "parent": None,
            "max_model_len": self._service.engine_config.max_model_len,
        }

    async def accounting(self) -> dict[str, Any]:
        """``/debug/accounting``: the service's figures, and the requests that are open here."""
        account = await self._service.accounting()
        driver: dict[str, int] = account["driver"]
        num_open = self._gate.num_open
        return {
            **account,
            "idle": account["idle"] and not num_open,
            "outstanding": account["outstanding"] - driver.get("request_sockets", 0) + num_open,
            "driver": {**driver, "request_sockets": num_open},
        }

    def _paths(self) -> dict[str, Any]:
        return {"model_path": self._service.model.path, "tokenizer_path": self._service.model.path}
