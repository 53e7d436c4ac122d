"""What an operator's request to drain or undrain says. Does not know what draining does."""

from __future__ import annotations

from fastapi import Request

from longcat_pd.server.fields import Fields
from longcat_pd.server.intake import read_bytes
from longcat_pd.server.openai import decode_body

_MAX_BODY_BYTES = 4096


async def named_instance(request: Request) -> str | None:
    """The ``instance`` of the body; None: whoever is asked. No body is taken as ``{}``. Raises RequestError."""
    body = await read_bytes(request, _MAX_BODY_BYTES)
    return Fields(decode_body(body or b"{}")).text("instance")
