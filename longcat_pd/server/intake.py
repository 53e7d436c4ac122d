"""What surrounds a request: its id, its media type, its size, its key, its time limit.

Owns the checks that come before a body is looked at. Does not know routes.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
import secrets
from collections.abc import Iterable

from fastapi import Request
from fastapi.requests import HTTPConnection

from longcat_pd.clock import MonotonicClock
from longcat_pd.config.keys import read_keys
from longcat_pd.errors import AuthenticationFailed, DeadlineExceeded, InvalidRequest, NotAccepted
from longcat_pd.server.errors import ClientGone

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SECONDS = re.compile(r"[0-9]{1,9}(\.[0-9]{1,9})?")


class KeyRing:
    """The keys of one file, one a line. Only digests are kept."""

    def __init__(self, keys: Iterable[bytes]) -> None:
        self._digests = tuple(hashlib.sha256(key).digest() for key in keys)

    @classmethod
    def load(cls, path: str) -> KeyRing:
        """Read a key file. Raises ConfigError: not readable, or without a key (which would lock everybody out)."""
        return cls(read_keys(path))

    def check(self, request: HTTPConnection) -> None:
        """Raise AuthenticationFailed unless the request's bearer key is one of ours."""
        header = request.headers.get("authorization", "").encode("latin-1")  # the bytes as sent
        scheme, _, key = header.partition(b" ")
        if not header:
            raise AuthenticationFailed("an API key is needed: Authorization: Bearer <key>")
        digest = hashlib.sha256(key.strip()).digest()
        matches = [hmac.compare_digest(digest, ours) for ours in self._digests]  # all of them: time tells nothing
        if scheme.lower() != b"bearer" or not any(matches):
            raise AuthenticationFailed("the API key is not valid", code="invalid_api_key")


def request_id_of(given: str | None) -> str:
    """The client's request id if it is well-formed, else a new one."""
    return given if given is not None and _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)


def check_media_type(request: HTTPConnection) -> None:
    """Raise NotAccepted unless the body is JSON in UTF-8 that is not compressed; no Content-Type is taken as JSON."""
    essence, _, parameters = request.headers.get("content-type", "").partition(";")
    essence = essence.strip().lower()
    charset = next(
        (value.strip().strip('"') for name, _, value in (p.partition("=") for p in parameters.split(";"))
         if name.strip().lower() == "charset"),
        "utf-8",
    )  # fmt: skip
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    refused = ""
    if essence not in ("", "application/json"):
        refused = f"Content-Type {essence}"
    elif charset.lower() not in ("utf-8", "utf8"):
        refused = f"charset {charset}"
    elif encoding not in ("", "identity"):
        refused = f"Content-Encoding {encoding}"
    if refused:
        raise NotAccepted(
            f"{refused} is not accepted; send Content-Type: application/json, in UTF-8, not compressed",
            code="unsupported_media_type",
        )


async def read_in_time(request: Request, max_bytes: int, limit_s: float) -> bytes:
    """As ``read_bytes``. The time of a request counts from its arrival: a body that does not come is not waited for.

    Raises DeadlineExceeded.
    """
    try:
        return await MonotonicClock().within(limit_s, read_bytes(request, max_bytes))
    except TimeoutError:
        raise DeadlineExceeded("the body did not come within the time of the request") from None


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """The body, once its media type is accepted.

    Raises:
        NotAccepted: 415; 413 as soon as Content-Length or the bytes read say so.
        ClientGone: the client closed before the end.
    """
    check_media_type(request)
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise _too_large(max_bytes)
    received = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        received += message.get("body", b"")
        if len(received) > max_bytes:
            raise _too_large(max_bytes)
        if not message.get("more_body", False):
            return bytes(received)


def _too_large(max_bytes: int) -> NotAccepted:
    return NotAccepted(f"the body is longer than {max_bytes} bytes", code="body_too_large")


def time_limit_of(request: HTTPConnection, longest_s: float) -> float:
    """Seconds that this request may take: ``X-Request-Timeout`` shortens ``longest_s``, never lengthens it."""
    given = request.headers.get("x-request-timeout")
    if given is None:
        return longest_s
    seconds = float(given) if _SECONDS.fullmatch(given.strip()) else math.nan
    if not seconds > 0:
        raise InvalidRequest(f"X-Request-Timeout = {given[:40]!r} is not seconds > 0", param="X-Request-Timeout")
    return min(seconds, longest_s)
