"""Taking the balancer or one instance out of use, and back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from fastapi import Request, Response

from longcat_pd import log
from longcat_pd.errors import InvalidRequest
from longcat_pd.load_balancer.face import Face
from longcat_pd.load_balancer.fault_routes import fault_routes
from longcat_pd.server.admin import named_instance
from longcat_pd.server.errors import json_response


def admin_routes(face: Face) -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """The operator's POST routes by path, where there are keys for them, and that of faults where there is one."""

    async def switch(request: Request, *, draining: bool) -> Response:
        face.check_admin(request)
        name = await named_instance(request)
        if name is None:
            (face.gate.drain if draining else face.gate.undrain)()
            is_out, num_open = face.gate.is_draining, face.gate.num_open
        else:
            instance = face.means.pool.drain(name, out=draining)
            if instance is None:
                known = ", ".join(face.means.pool.instances)
                raise InvalidRequest(f"instance = {name!r} is not one of {known}", param="instance")
            is_out, num_open = draining, instance.open_legs
        target = name or face.served.instance
        if draining:
            log.logger().info("drain_started", target=target, open=num_open)
        else:
            log.logger().info("undrained", target=target, open=num_open)
        return json_response({"draining": is_out, "open": num_open}, status=202)

    async def drain(request: Request) -> Response:
        return await switch(request, draining=True)

    async def undrain(request: Request) -> Response:
        return await switch(request, draining=False)

    routes = fault_routes(face) if face.has_faults else {}
    if face.keys.admin is not None:
        routes |= {"/admin/drain": drain, "/admin/undrain": undrain}
    return routes
