"""Who may talk on a ZeroMQ socket: the key pair of a cluster, the door of a socket, and what is said of those sent away.

The first key of the cluster's key file makes one Curve25519 key pair, which every process of the cluster has: it is both
server and client with it. CURVE encrypts and authenticates each message, and a socket that listens proves that it has the
pair. It would still take in every client that knows the public half; that half never travels in the clear and follows from
the secret, so strangers do not know it, but what lets a peer in should not be what another peer may see: a door asks for
the client's own key too (ZAP, RFC 27, answered by the loop of the socket itself, without a thread), and opens for the pair
alone.

A door also hears of handshakes that fail, with or without a key, and tells of a peer with another key, with none, or that
speaks something else. Knows no records and no files; imports nothing of ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

_SALT = b"longcat_pd control sockets"
_DOMAIN = b"longcat_pd"
_DOOR = "inproc://zeromq.zap.01"  # where ZeroMQ asks, in the context of the socket
_FAILURES = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
_REASONS: Mapping[int, str] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "it has another cluster key",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one side has a cluster key, the other has none",
}
_UNNAMED: Mapping[int, str] = {
    zmq.EVENT_HANDSHAKE_FAILED_AUTH: "it does not have the key pair of this cluster",
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL: "it hung up before the greeting was over, as who has another cluster key does",
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL: "what it says is not the protocol of these sockets",
}


class CurveMissing(RuntimeError):
    """The ZeroMQ library was built without CURVE."""


@dataclass(frozen=True, slots=True)
class Seal:
    """The key pair of a cluster, each half as ZeroMQ writes it (Z85)."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, key: bytes) -> Seal:
        """The pair that follows from a key; deriving it takes ten milliseconds, for whoever guesses keys too.

        Raises CurveMissing.
        """
        if not zmq.has("curve"):
            raise CurveMissing
        secret: bytes = z85.encode(hashlib.scrypt(key, salt=_SALT, n=1 << 12, r=8, p=1, dklen=32))
        return cls(public=zmq.curve_public(secret), secret=secret)

    def put_on(self, socket: zmq.Socket[bytes], *, listens: bool) -> None:
        """Before the socket is bound or connected. One that listens needs a ``Door`` too."""
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
        if listens:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)  # else nobody is asked
        else:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """To a socket. ``seal``: that its peers have; None: anybody. ``tell``: is told of each refusal: endpoint, reason."""

    seal: Seal | None
    tell: Callable[[str, str], None]


class Door:
    """Beside one socket, in the same context and thread: who is let in, and who was not.

    Args:
        listens: whether the socket will be bound. The door is made before that, or there is a moment without one.
    """

    def __init__(self, socket: zmq.Socket[bytes], admission: Admission, *, listens: bool) -> None:
        seal = admission.seal
        self._socket = socket
        self._tell = admission.tell
        self._asked: zmq.Socket[bytes] | None = None
        self._heard: zmq.Socket[bytes] | None = None
        self._client = b"" if seal is None else z85.decode(seal.public)
        if seal is not None and listens:
            self._asked = socket.context.socket(zmq.REP)
            self._asked.bind(_DOOR)

    def hear(self) -> None:
        """Note what goes wrong, for ``look``. Before the socket dials: what failed unheard would never be dialled again."""
        self._heard = self._socket.get_monitor_socket(_FAILURES)

    def attend(self) -> tuple[int, ...]:
        """From now on ``look`` is called whenever one of these files becomes readable, and once at first."""
        return tuple(s.fileno() for s in (self._asked, self._heard) if s is not None)

    def look(self) -> bool:
        """Answer who asks and tell of who was sent away; never waits. True: a dialled peer must be dialled again.

        ZeroMQ tries again after a connection that broke, and not after a handshake that went wrong: but another process
        may have the peer's place soon.
        """
        while self._asked is not None and (question := _next(self._asked)) is not None:
            self._asked.send_multipart(self._answer(question))
        is_over = False
        while self._heard is not None and (frames := _next(self._heard)) is not None:
            event = parse_monitor_message(frames)
            kind = event["event"]
            is_over = is_over or kind != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
            named = _REASONS.get(event["value"]) if kind == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL else None
            self._tell(event["endpoint"].decode(errors="replace"), named or _UNNAMED[kind])
        return is_over

    def close(self) -> None:
        """Before the socket and its context."""
        if self._heard is not None:
            self._socket.disable_monitor()
        for socket in (self._asked, self._heard):
            if socket is not None:
                socket.close(linger=0)
        self._asked = self._heard = None

    def _answer(self, question: list[bytes]) -> list[bytes]:
        """[version, request, domain, address, identity, mechanism, credentials] -> [..., status, text, user, metadata]."""
        is_ours = len(question) == 7 and question[5] == b"CURVE" and bool(self._client) and question[6] == self._client
        status, text = (b"200", b"") if is_ours else (b"400", b"not of this cluster")
        return [*question[:2], status, text, b"", b""]


def _next(socket: zmq.Socket[bytes]) -> list[bytes] | None:
    try:
        return socket.recv_multipart(flags=zmq.NOBLOCK)
    except zmq.Again:
        return None
