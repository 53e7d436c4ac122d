"""Keeps a bundle of each request that ended, for ``longcat-pd replay``.

Owns what a bundle is made of, and that nobody waits for a disk: bundles are made and written in a thread, one at a time,
and a disk that is full or slow costs bundles and never a request. The file is ``bundle.py``, the folder
``bundle_folder.py``.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timezone

from longcat_pd.clock import Clock
from longcat_pd.config.schema import InstanceSpec, RecordConfig
from longcat_pd.kv_transfer.messages import Hello
from longcat_pd.log import logger
from longcat_pd.server.bundle import (
    SCHEMA,
    Bundle,
    Ending,
    RecordedInstance,
    RecordedModel,
    Texts,
    Versions,
    ids_digest,
)
from longcat_pd.server.bundle_folder import BundleFolder
from longcat_pd.server.take import Take
from longcat_pd.server.text import TextProcessor
from longcat_pd.wire import WIRE_VERSION

MOST_WAITING = 64  # bundles that wait for the disk; the next ones are lost
LAST_S = 5.0  # for those that still wait when the process ends


@dataclass(frozen=True, kw_only=True)
class _Ended:
    """A request that is over: all that a bundle is made of, and nothing that changes."""

    take: Take
    outcome: str
    at: datetime
    computed_by: tuple[Hello, ...]


class Recorder:
    """Of one instance.

    Args:
        spec: of the instance.
        computed_by: who computes an answer of a hand-over from an instance of this name; of none.
        torch: the version that the ranks have, once they are there.
        text: of the checkpoint.
    """

    def __init__(
        self,
        spec: InstanceSpec,
        config: RecordConfig,
        *,
        computed_by: Callable[[str | None], tuple[Hello, ...]],
        torch: Callable[[], str],
        text: TextProcessor,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._computed_by = computed_by
        self._torch = torch
        self._text = text if config.texts else None
        self._clock = clock
        self._folder = BundleFolder(config)
        self._waiting: deque[_Ended] = deque()
        self._writing: asyncio.Task[None] | None = None
        self._num_lost = 0
        self._folder.check()

    def keep(self, take: Take, outcome: str) -> None:
        """Keep what became of a request, soon. ``outcome``: of its body: a finish reason, a code or "cancelled"."""
        if len(self._waiting) >= MOST_WAITING:
            self._lost(take.request.request_id, f"{MOST_WAITING} bundles wait for the disk")
            return
        transfer = take.request.transfer
        computed_by = self._computed_by(None if transfer is None else transfer.peer)
        self._waiting.append(_Ended(take=take, outcome=outcome, at=datetime.now(timezone.utc), computed_by=computed_by))
        if self._writing is None or self._writing.done():
            self._writing = asyncio.get_running_loop().create_task(self._write_all())

    async def close(self) -> None:
        """Write what waits, for a while."""
        if self._writing is None:
            return
        try:
            await self._clock.within(LAST_S, self._writing)
        except TimeoutError:
            logger().warning("bundles_not_written", reason=f"not within {LAST_S:g} s of the end", count=len(self._waiting))

    async def _write_all(self) -> None:
        while self._waiting:
            ended = self._waiting.popleft()
            reason = await asyncio.to_thread(self._write, ended)
            if reason:
                self._lost(ended.take.request.request_id, reason)

    def _write(self, ended: _Ended) -> str:
        """In the thread. Returns why nothing was written, else ""."""
        request = ended.take.request
        name = f"{ended.at:%Y%m%dT%H%M%S}{ended.at.microsecond // 1000:03}Z-{self._spec.name}"
        try:
            data = self._bundle(ended).encoded()
            return self._folder.write(f"{name}-{request.request_id}-{request.sampling.choice}", data)
        except OSError as error:
            return error.strerror or str(error)

    def _bundle(self, ended: _Ended) -> Bundle:
        take, spec = ended.take, self._spec
        request, tokens = take.request, take.counted
        answer = tuple(token.token_id for token in tokens)
        own = ended.computed_by[-1]
        return Bundle(
            schema=SCHEMA,
            request_id=request.request_id,
            recorded_at=ended.at.isoformat(timespec="milliseconds"),
            recorded_by=spec.name,
            attempt=take.attempt,
            transfer_id=None if request.transfer is None else request.transfer.id,
            model=RecordedModel(
                path=spec.model.path,
                digest=own.model_digest,
                tokenizer_digest=own.tokenizer_digest,
                dtype=spec.model.dtype,
                weights=spec.model.weights,
            ),
            versions=Versions(package=own.code_version, torch=self._torch(), wire=WIRE_VERSION),
            instances=tuple(map(self._instance, ended.computed_by)),
            sampling=replace(request.sampling, grammar=""),
            has_grammar=bool(request.sampling.grammar),
            prompt_token_ids=request.prompt_token_ids,
            answer_token_ids=answer,
            logprobs=() if request.sampling.num_logprobs is None else tuple(token.logprob for token in tokens),
            ids_digest=ids_digest(request.prompt_token_ids, answer),
            ending=_ending(take, ended.outcome),
            num_cached_tokens=request.life.num_cached_tokens,
            timings_ms=request.life.timings_ms(),
            events_ms=request.life.events_ms(),
            texts=self._texts(request.prompt_token_ids, answer, request.sampling.grammar),
        )

    def _instance(self, hello: Hello) -> RecordedInstance:
        """What an instance said of itself; of this one all sizes."""
        said = {"pp_size": hello.pp_size, "cp_size": hello.cp_size, "dp_size": hello.dp_size, "kvp_size": hello.kvp_size}
        sizes = asdict(self._spec.parallel) if hello.name == self._spec.name else said
        return RecordedInstance(
            name=hello.name,
            role=hello.role,
            device=hello.device,
            version=hello.code_version,
            block_size=hello.block_size,
            num_draft_tokens=hello.num_draft_tokens,
            parallel={name: size for name, size in sizes.items() if isinstance(size, int) and size > 1},
            layers_per_stage=hello.layers_per_stage,
        )

    def _texts(self, prompt: Sequence[int], answer: Sequence[int], grammar: str) -> Texts | None:
        if self._text is None:
            return None
        return Texts(prompt=self._text.raw(prompt), answer=self._text.raw(answer), grammar=grammar)

    def _lost(self, request_id: str, reason: str) -> None:
        """Told of the 1st, 2nd, 4th, 8th ... time: a full disk must not fill the log."""
        self._num_lost += 1
        if self._num_lost & (self._num_lost - 1) == 0:
            logger().warning("bundle_not_written", request=request_id, reason=reason, count=self._num_lost)


def _ending(take: Take, outcome: str) -> Ending:
    hop, engine_finish = take.request.life.hop, None if take.engine_finish is None else take.engine_finish.value
    if take.finish is not None:
        return Ending(outcome="finished", hop=hop, finish=take.finish, engine_finish=engine_finish)
    if outcome == "cancelled":
        return Ending(outcome="cancelled", hop=hop)
    return Ending(outcome="failed", hop=hop, code=outcome)
