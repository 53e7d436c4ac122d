"""Ranks that meet where everybody may write: what strangers write there, say again or alter joins nobody to them."""

from __future__ import annotations

import multiprocessing
import secrets
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroupGloo, TCPStore  # type: ignore[attr-defined]

from longcat_pd.config.schema import ParallelConfig, RankSpec
from longcat_pd.errors import RankLost
from longcat_pd.kv_transfer import process_group
from longcat_pd.kv_transfer.process_group import GlooCaller, GlooListener, LaneMakers
from longcat_pd.kv_transfer.transport import LaneClosed, LaneEnd
from longcat_pd.parallel import joining
from longcat_pd.parallel.meeting import Signature, SignedStore, Unsigned, make_pair
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from longcat_pd.wire import to_json
from tests.forks import start_server
from tests.parity.gloo import rank_specs

OURS, THEIRS = Signature(b"ours"), Signature(b"theirs")
D, P = LaneEnd("d0", "d", 0), LaneEnd("p0", "p", 0)
LIMIT = timedelta(seconds=30)


@pytest.fixture
def listener() -> Iterator[GlooListener]:
    made = GlooListener(D, ("127.0.0.1", 0), 5.0, makers=LaneMakers(signature=OURS))
    yield made
    made.close()


def store_of(listener: GlooListener) -> TCPStore:
    return process_group._connect(listener.address, 5.0)


def test_only_who_has_the_key_is_heard(listener: GlooListener) -> None:
    """Each stranger's call stands where one of ours would; the one that counts comes last."""
    store = store_of(listener)
    good = to_json(process_group._CallRecord(P, D, "word"))

    def key(number: int) -> str:
        return process_group._call_key(D, number)

    first = OURS.sign(key(1), good.encode())
    store.set(key(1), first.hex())
    heard = listener.next_call()
    assert heard is not None and heard.source == P
    strangers = (
        first.hex(),  # ours, said again in another place
        THEIRS.sign(key(3), good.encode()).hex(),
        Signature(b"").sign(key(4), good.encode()).hex(),
        good,
        OURS.sign(key(6), good.encode())[:40].hex(),
        (first[:-9] + bytes(9)).hex(),
        "\xff\xfe not hex",
        OURS.sign(key(9), b"no record").hex(),
        secrets.token_hex(16),  # as a goodbye looks
    )
    for number, text in enumerate(strangers, 2):
        store.set(key(number), text)
    process_group._write_call(store, D, to_json(process_group._CallRecord(P, D, "last")), OURS, 5.0)
    call = listener.next_call()
    assert isinstance(call, process_group.GlooCall)
    assert call.record.word == "last"
    assert listener._refusals._count == len(strangers)


def test_bytes_that_are_no_text_do_not_end_a_caller(listener: GlooListener) -> None:
    store = store_of(listener)
    store.set(process_group._call_key(D, 1), b"\xff\x80")  # type: ignore[arg-type]
    process_group._write_call(store, D, to_json(process_group._CallRecord(P, D, "w")), OURS, 5.0)
    call = listener.next_call()
    assert call is not None and call.source == P


@pytest.mark.parametrize("theirs", [OURS, THEIRS])
def test_ends_of_one_cluster_make_a_lane_and_others_none(listener: GlooListener, theirs: Signature) -> None:
    def answer() -> None:
        call = listener.next_call()
        if call is not None:
            call.open(5.0).close()

    answering = threading.Thread(target=answer)
    answering.start()
    try:
        caller = GlooCaller(P, LaneMakers(signature=theirs))
        if theirs is OURS:
            caller.open(D, listener.address, 5.0).close()
        else:
            with pytest.raises(LaneClosed):
                caller.open(D, listener.address, 1.0)
    finally:
        listener.close()
        answering.join(10.0)
    assert not answering.is_alive()


@pytest.mark.parametrize("theirs", [THEIRS, Signature(b"")])
def test_what_a_stranger_wrote_never_reaches_gloo(theirs: Signature) -> None:
    """gloo takes lengths and addresses from there as they are: it would call whom they name, or end the process."""
    true, forged = HashStore(), HashStore()
    with ThreadPoolExecutor(2) as both:
        list(both.map(lambda me: make_pair(true, "g", me, signature=OURS, limit=LIMIT), (0, 1)))
    place = next(key for key in true.list_keys() if key.startswith("g/") and key.endswith("1"))
    word = OURS.read(place, true.get(place))
    for written in (theirs.sign(place, word), word, b"\xff" * 8 + word, b"", true.get(place)[:-1]):
        forged.set(place, written)  # type: ignore[arg-type]
        with pytest.raises(Unsigned, match="not signed with the key"):
            make_pair(forged, "g", 0, signature=OURS, limit=LIMIT)


def test_who_took_the_place_of_a_peer_shows_no_key() -> None:
    """The store told him where to go, and he was first there."""
    store = HashStore()

    def intrude() -> object:
        group: Any = ProcessGroupGloo(SignedStore(store, "g", signature=OURS, limit=LIMIT), 1, 2, LIMIT)
        learnt = torch.empty(32, dtype=torch.uint8)
        group.recv([learnt], 0, 0).wait()
        group.send([learnt], 0, 0).wait()  # all he has
        return group

    with ThreadPoolExecutor(1) as stranger:
        intruding = stranger.submit(intrude)
        with pytest.raises(Unsigned, match="g/1/0 is not signed"):
            make_pair(store, "g", 0, signature=OURS, limit=LIMIT)
        intruding.result(60.0)


def joined(spec: RankSpec) -> str:
    platform_of("cpu").prepare_rank()
    try:
        Mesh.join(spec).leave()
    except RankLost as error:
        return error.message
    return ""


@pytest.mark.parametrize("same", [True, False])
def test_ranks_of_an_instance_have_one_key(tmp_path: Path, same: bool) -> None:
    start_server()
    specs = []
    for spec in rank_specs(tmp_path, ParallelConfig(pp_size=2)):
        file = tmp_path / f"{spec.rank}.key"
        file.write_text("a key" if same else f"key {spec.rank}")
        specs.append(replace(spec, instance=replace(spec.instance, cluster_key_file=str(file))))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver")) as ranks:
        said = [each.result(180.0) for each in [ranks.submit(joined, spec) for spec in specs]]
    assert said == ["", ""] if same else any("not signed with the key" in each for each in said)


def joined_late(spec: RankSpec, late: int) -> tuple[float, float]:
    """When this rank had made its groups, which takes the late one longer; and when it was joined."""
    platform_of("cpu").prepare_rank()
    make, made_at = joining._make_groups, 0.0

    def slowly(*given: Any) -> Any:
        nonlocal made_at
        time.sleep(1.0 if spec.rank == late else 0.0)
        groups, made_at = make(*given), time.monotonic()
        return groups

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(joining, "_make_groups", slowly)
        mesh = Mesh.join(spec)
    joined_at = time.monotonic()
    mesh.leave()
    return made_at, joined_at


@pytest.mark.parametrize("late", [0, 1])
def test_nobody_is_joined_before_all_are(tmp_path: Path, late: int) -> None:
    """Else rank 0 might leave, and the rendezvous with it, while others are on their way: no axis holds it up."""
    start_server()
    specs = rank_specs(tmp_path, ParallelConfig(dp_size=2))
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("forkserver")) as ranks:
        said = [each.result(180.0) for each in [ranks.submit(joined_late, spec, late) for spec in specs]]
    assert min(joined_at for _, joined_at in said) >= max(made_at for made_at, _ in said)


def test_words_are_good_for_one_place() -> None:
    signed = OURS.sign("a/1", b"word")
    assert OURS.read("a/1", signed) == b"word"
    for signature, place in ((OURS, "a/2"), (OURS, "a"), (THEIRS, "a/1")):
        with pytest.raises(Unsigned):
            signature.read(place, signed)
    for cut in range(len(signed)):
        with pytest.raises(Unsigned):
            OURS.read("a/1", signed[:cut])
