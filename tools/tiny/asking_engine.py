"""Cases asked of one engine in this process, through the face that ``longcat-pd infer`` answers lines with.

Knows no skill and no floor.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

from longcat_pd.config import resolve
from longcat_pd.config.schema import InstanceSpec
from longcat_pd.metrics import Metrics
from longcat_pd.server.checked_face import checked_face
from longcat_pd.server.text import TextProcessor
from longcat_pd.standalone.batch import answer_in_order
from longcat_pd.standalone.offline import offline
from tools.tiny.asking import AT_ONCE, Body, Progress, Told, drafted, reply_of
from tools.tiny.asking_blindly import with_random_choice

BLOCK, CHUNK = 16, 128
_PORT = 8081  # nothing listens


def engine_spec(model: Path, num_drafts: int, settings: Sequence[str]) -> InstanceSpec:
    """One rank; every prompt is computed whole, in chunks of CHUNK tokens. Raises ConfigError."""
    mine = [
        f"engine.block_size={BLOCK}",
        f"engine.max_num_batched_tokens={CHUNK}",
        f"engine.max_num_seqs={AT_ONCE}",
        f"engine.num_draft_tokens={num_drafts}",
        "engine.prefix_cache=false",
    ]
    return resolve.standalone(str(model), [*mine, *settings], host="127.0.0.1", port=_PORT)


async def ask_engine(
    model: Path,
    bodies: Sequence[Body],
    *,
    num_drafts: int,
    progress: Progress,
    settings: Sequence[str] = (),
    is_blind: bool = False,
) -> Told:
    """All replies. ``is_blind``: the indexer picks keys at random (``asking_blindly``). Raises ConfigError."""
    spec = engine_spec(model, num_drafts, settings)
    metrics = Metrics(role=spec.role, instance=spec.name)
    service = offline(spec, metrics=metrics, loaded=with_random_choice(spec) if is_blind else None)
    face, out = checked_face(service, TextProcessor.load(str(model))), _Lines(progress)
    lines = [(number, json.dumps(body).encode()) for number, body in enumerate(bodies, start=1)]
    try:
        await service.start()
        await answer_in_order(face, lines, out, width=AT_ONCE)
    finally:
        await service.close()
    replies = tuple(reply_of(json.loads(line)) for line in out.getvalue().splitlines())
    return Told(replies=replies, drafted=drafted(metrics.render().decode(), num_drafts))


class _Lines(io.StringIO):
    """Lines that tell how many there are."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._count = 0

    def write(self, text: str, /) -> int:
        self._count += text.count("\n")
        self._progress(self._count)
        return super().write(text)
