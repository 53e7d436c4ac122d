"""An answer that goes on at another decode instance than it began at: what has to be known of it there.

Owns the words for that: the lines beside an answer from which whoever passes it on learns it, and the object in the body of
a resumed leg that says it again. Knows nothing of how an answer is read or made.
"""

from __future__ import annotations

import hashlib
import re
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from longcat_pd.errors import InvalidRequest, WorkerUnavailable
from longcat_pd.server.errors import to_json
from longcat_pd.server.fields import Fields, as_integer, missing, out_of_range, shown
from longcat_pd.server.openai import Body
from longcat_pd.wire import pack

FIELD = "resume"
_SEED = 2**63
_LARGEST_ID = 2**31 - 1
_LATEST = 2**53  # of a time in seconds
_DIGEST = re.compile("[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What an answer began with: the seed of its draws, the time in its head, the prompt as ids."""

    seed: int
    created: int
    prompt_token_ids: Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Resume:
    """An answer that goes on behind ``token_ids``."""

    token_ids: tuple[int, ...]
    seed: int
    created: int
    prompt_digest: str

    def check_prompt(self, token_ids: Iterable[int]) -> None:
        """Raise WorkerUnavailable where the prompt is not the one that the answer began behind."""
        found = prompt_digest(token_ids)
        if found != self.prompt_digest:
            raise WorkerUnavailable(
                f"the prompt of the answer to go on with is another one here: digest {found}, not {self.prompt_digest}"
            )


def prompt_digest(token_ids: Iterable[int]) -> str:
    """Of a prompt, in hex."""
    return hashlib.blake2b(pack(token_ids), digest_size=16).hexdigest()


def origin_line(origin: Origin) -> bytes:
    """The comment in front of an answer."""
    digest = prompt_digest(origin.prompt_token_ids)
    return b": answer " + to_json({"seed": origin.seed, "created": origin.created, "prompt_digest": digest}) + b"\n"


def ids_line(token_ids: Iterable[int]) -> bytes:
    """The comment that says which ids of the answer are passed on."""
    return b": ids " + b64encode(pack(token_ids)) + b"\n"


def can_go_on(body: Body) -> bool:
    """Whether an answer to this body goes on behind the ids that are there of it.

    One that is told as a whole tells the log-probs of all its ids, which are known only where they were drawn: it begins
    anew, and comes out the same.
    """
    return body.stream or body.num_logprobs is None


def need_one_choice(body: Body, param: str) -> None:
    """Raise InvalidRequest for a body with several choices: nobody says which of them an id belongs to."""
    if body.num_choices != 1:
        raise InvalidRequest(
            f"{param}: only an answer with one choice can go on elsewhere, this one has {body.num_choices}",
            code="unsupported_combination",
            param=param,
        )


def read_resume(values: Mapping[str, Any], body: Body) -> Resume:
    """The object in the body of a resumed leg; without ids where the answer begins anew. Raises InvalidRequest."""
    need_one_choice(body, FIELD)
    fields = Fields(values).object(FIELD)
    if fields is None:
        raise missing(FIELD)
    given = fields.items("token_ids")
    if given is None:
        raise missing(fields.path("token_ids"))
    token_ids = tuple(_id(value, f"{fields.path('token_ids')}[{place}]") for place, value in enumerate(given))
    return Resume(
        token_ids=token_ids if can_go_on(body) else (),
        seed=_integer(fields, "seed", -_SEED, _SEED - 1),
        created=_integer(fields, "created", 0, _LATEST),
        prompt_digest=_digest(fields),
    )


def _id(value: Any, path: str) -> int:
    token_id = as_integer(value, path)
    if not 0 <= token_id <= _LARGEST_ID:
        raise out_of_range(path, value, f"0 ... {_LARGEST_ID}")
    return token_id


def _integer(fields: Fields, name: str, low: int, high: int) -> int:
    number = fields.integer(name, low, high)
    if number is None:
        raise missing(fields.path(name))
    return number


def _digest(fields: Fields) -> str:
    digest = fields.text("prompt_digest")
    if digest is None:
        raise missing(fields.path("prompt_digest"))
    if not _DIGEST.fullmatch(digest):
        path = fields.path("prompt_digest")
        raise InvalidRequest(f"{path} = {shown(digest)} is not 32 hex digits", param=path)
    return digest
