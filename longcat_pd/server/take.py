"""One request as it goes, for whoever keeps a record of it. Knows no file, and nothing of text."""

from __future__ import annotations

from collections.abc import Sequence

from longcat_pd.engine.request import Delta, FinishReason, Request, TokenOutput


class Take:
    """Written by the face while the request runs.

    ``finish``: the reason that the client is told, ``engine_finish`` the engine's own; each None as long as there is none.
    """

    def __init__(self, request: Request, attempt: int) -> None:
        self.request = request
        self.attempt = attempt
        self.finish: str | None = None
        self.engine_finish: FinishReason | None = None
        self._tokens: list[TokenOutput] = []
        self._num_counted: int | None = None

    def read(self, delta: Delta) -> None:
        """The engine has generated this."""
        self._tokens += delta.tokens
        self.engine_finish = delta.finish

    def end(self, finish: str, num_counted: int) -> None:
        """The answer is complete; the client is told of so many of its tokens. Others lay behind a stop string."""
        self.finish, self._num_counted = finish, num_counted
        if num_counted < len(self._tokens):
            self.engine_finish = None

    @property
    def counted(self) -> Sequence[TokenOutput]:
        """The tokens of the answer that were generated here."""
        return self._tokens[: self._num_counted]
