"""The control sockets of two pools in memory, and two drivers on pencils that hand over to each other."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from longcat_pd.config.schema import InstanceSpec, ModelSection, ParallelConfig, PeerAddress, Role, TransferConfig
from longcat_pd.decode_worker.service import DecodeService
from longcat_pd.engine.driver import Engine
from longcat_pd.engine.request import Request, SamplingParams, TransferRef
from longcat_pd.faults import Switches
from longcat_pd.kv_transfer.control import CONTROL
from longcat_pd.kv_transfer.faulty_control import FaultySocket
from longcat_pd.kv_transfer.messages import ControlMessage, Hello
from longcat_pd.kv_transfer.offering import Offering
from longcat_pd.kv_transfer.offers import Offers, PairLimits
from longcat_pd.metrics import Metrics
from longcat_pd.prefill_worker.service import PrefillService
from tests.manual_clock import ManualClock, settle
from tests.unit.engine_rig import FAR, engine_config
from tests.unit.pencil import Pencil


def hello(name: str, role: Role, **changes: Any) -> Hello:
    values: dict[str, Any] = {
        "name": name, "role": role, "incarnation": f"{name}-life", "wire_version": 1, "code_version": "0.1.0",
        "model_digest": "m", "tokenizer_digest": "t", "block_size": 4, "cache_entries": (("latent.0", 8, "float32"),),
        "digest_mode": "off", "max_model_len": 64, "pp_size": 1, "cp_size": 1, "dp_size": 1, "kvp_size": 1,
        "layers_per_stage": (1,), "device": "cpu", "lane_host": "h", "lane_port": 7,
    }  # fmt: skip
    return Hello(**(values | changes))


@dataclass(eq=False)
class Pipe:
    """One socket."""

    inbox: asyncio.Queue[list[bytes]] = field(default_factory=asyncio.Queue)
    identity: bytes = b""
    router: Pipe | None = None
    dealers: dict[bytes, Pipe] = field(default_factory=dict)
    sent: list[ControlMessage] = field(default_factory=list)
    is_cut: bool = False

    def send(self, frames: list[bytes]) -> None:
        record = CONTROL.decode(frames[-2:])
        if self.is_cut:
            return
        self.sent.append(record)
        if self.router is not None:
            self.router.inbox.put_nowait([self.identity, *frames])
        elif frames[0] in self.dealers:
            self.dealers[frames[0]].inbox.put_nowait(list(frames[1:]))

    async def recv(self) -> list[bytes]:
        return await self.inbox.get()

    def close(self) -> None:
        self.is_cut = True

    def dealer(self, identity: bytes) -> Pipe:
        self.dealers[identity] = Pipe(identity=identity, router=self)
        return self.dealers[identity]


LIMITS = PairLimits(offer_s=10.0, commit_s=60.0, vocab_size=1 << 17, hidden_size=2)


class Pair:
    """P and D: engines on pencils, services, links. ``auto`` is the pencils'. ``switches``: of each driver's faults."""

    def __init__(
        self, *, auto: bool = True, prefill: Hello | None = None, decode: Hello | None = None, **engine: Any
    ) -> None:
        self.clock = ManualClock()
        self.router = Pipe()
        self.switches = {"p": Switches(), "d": Switches()}
        self.p_hello = prefill or hello("p0", "prefill")
        self.d_hello = decode or hello("d0", "decode")
        self.p_metrics, self.d_metrics = Metrics(role="prefill", instance="p0"), Metrics(role="decode", instance="d0")
        config = engine_config(**engine)
        self.p_pencil, self.d_pencil = Pencil(config, ParallelConfig(), auto), Pencil(config, ParallelConfig(), auto)
        self.p_engine = self._engine(self.p_pencil, self.p_metrics)
        self.d_engine = self._engine(self.d_pencil, self.d_metrics)
        self.offers = Offers(
            self.d_hello,
            ["p0"],
            socket=FaultySocket(self.router, self.switches["d"]),
            limits=LIMITS,
            clock=self.clock,
            metrics=self.d_metrics.transfers,
        )
        self.decode = DecodeService(
            self._spec("d0", "decode"), self.d_hello, engine=self.d_engine, offers=self.offers, now=self.clock.now,
            metrics=self.d_metrics.transfers,
        )  # fmt: skip
        self.tasks: list[asyncio.Task[None]] = []
        self.start_prefill(self.p_hello)

    def start_prefill(self, p_hello: Hello) -> None:
        """A life of P's driver."""
        self.p_hello = p_hello
        self.dealer = self.router.dealer(p_hello.incarnation.encode())
        self.offering = Offering(
            p_hello,
            [PeerAddress(name="d0", role="decode", host="h", http_port=1)],
            connect=lambda _peer: FaultySocket(self.dealer, self.switches["p"]),
            clock=self.clock,
            metrics=self.p_metrics.transfers,
        )
        self.prefill = PrefillService(
            self._spec("p0", "prefill"), p_hello, engine=self.p_engine, offering=self.offering, now=self.clock.now,
            metrics=self.p_metrics.transfers,
        )  # fmt: skip

    def _engine(self, pencil: Pencil, metrics: Metrics) -> Engine:
        return Engine(
            pencil.config,
            pencil.parallel,
            executor=pencil,
            eos_token_ids=frozenset({20}),
            clock=self.clock,
            metrics=metrics,
        )

    def _spec(self, name: str, role: Role) -> InstanceSpec:
        return InstanceSpec(
            name=name, role=role, host="h", http_port=1, device="cpu", model=ModelSection(path="m"),
            parallel=ParallelConfig(), engine=self.p_pencil.config, transfer=TransferConfig(),
        )  # fmt: skip

    def prefill_leg(
        self,
        transfer_id: str = "t",
        *,
        prompt: tuple[int, ...] = (1, 2, 3, 4, 5),
        is_patient: bool = False,
        **sampling: Any,
    ) -> Leg:
        values = SamplingParams(max_tokens=3, temperature=0.0)
        return Leg(self, transfer_id, prompt, replace(values, **sampling), is_patient=is_patient)

    def close_lanes(self, transfer_id: str, **how: Any) -> None:
        """The ranks of both sides report the end of the transfer."""
        self.p_pencil.close_transfer(transfer_id, **how)
        self.d_pencil.close_transfer(transfer_id, **how)

    async def assert_idle(self) -> None:
        """Nothing is left on either side, by the drivers' and the ranks' own count."""
        for service, pencil in ((self.prefill, self.p_pencil), (self.decode, self.d_pencil)):
            pencil.auto = True
            while pencil.waiting:
                pencil.step()
            for transfer_id in list(pencil.pushes):  # the lanes of a cancelled push fall silent
                pencil.close_transfer(transfer_id, ok=False)
            await settle()
            account = await service.accounting()
            assert account["idle"], account
            for rank in account["ranks"]:
                assert rank["blocks"]["free"] + rank["blocks"]["cached"] == rank["blocks"]["total"]


class Leg:
    """A client's request at both services. ``p_end``, ``d_end``: how each leg has ended."""

    def __init__(
        self, pair: Pair, transfer_id: str, prompt: tuple[int, ...], sampling: SamplingParams, *, is_patient: bool
    ) -> None:
        self._pair = pair
        self._is_patient = is_patient
        self._transfer = transfer_id
        self._prompt = prompt
        self._sampling = sampling
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.p: asyncio.Task[None] | None = None
        self.d: asyncio.Task[None] | None = None

    def send(self, *, p: bool = True, d: bool = True, deadline: float = FAR) -> Leg:
        if p:
            self.p = asyncio.ensure_future(self._prefill(deadline))
        if d:
            self.d = asyncio.ensure_future(self._decode(deadline))
        for task in (self.p, self.d):
            if task is not None:  # a test that asks for one leg's end only has seen enough
                task.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self

    async def _prefill(self, deadline: float) -> None:
        request = Request(
            request_id="r", prompt_token_ids=self._prompt, sampling=self._sampling, deadline=deadline,
            transfer=TransferRef(id=self._transfer, peer="d0"), is_patient=self._is_patient,
        )  # fmt: skip
        deltas = [delta async for delta in self._pair.prefill.generate(request)]
        assert len(deltas) == 1 and not deltas[0].tokens

    async def _decode(self, deadline: float) -> None:
        ours = replace(self._sampling, max_tokens=99, seed=99)  # P's values count
        transfer = TransferRef(id=self._transfer, peer="p0")
        request = await self._pair.decode.adopt(transfer, deadline, ours, is_patient=self._is_patient)
        request = replace(request, is_patient=self._is_patient)
        assert request.prompt_token_ids == self._prompt
        assert request.sampling.max_tokens == self._sampling.max_tokens
        async for delta in self._pair.decode.generate(request):
            self.tokens += [t.token_id for t in delta.tokens]
            self.finish = delta.finish.value if delta.finish else None

    async def ends(self) -> list[BaseException | None]:
        """Of P's and D's leg: None or the error."""
        tasks = [t for t in (self.p, self.d) if t is not None]
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60.0)
        return [r if isinstance(r, BaseException) else None for r in results]


@asynccontextmanager
async def pair(**changes: Any) -> AsyncIterator[Pair]:
    made = Pair(**changes)
    await made.p_engine.start()
    await made.d_engine.start()
    made.tasks = [asyncio.ensure_future(made.offers.run()), asyncio.ensure_future(made.offering.run())]
    await made.clock.advance(0.1)
    try:
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        await made.p_engine.close()
        await made.d_engine.close()
