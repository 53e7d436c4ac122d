import asyncio

import pytest

from longcat_pd.errors import WorkerUnavailable
from longcat_pd.load_balancer.pool import Avoid, Instance, Pair
from tests.balancer_rig import Rig, refused


def names(rig: Rig, avoid: Avoid | None = None) -> tuple[str, str]:
    return rig.means.pool.choose(avoid).names


def instance(rig: Rig, name: str) -> Instance:
    return rig.means.pool.instances[name]


def pair(rig: Rig, prefill: str, decode: str) -> Pair:
    return Pair(instance(rig, prefill), instance(rig, decode))


async def test_equal_ones_are_chosen_in_turn() -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    assert [names(rig) for _ in range(4)] == [("p0", "d0"), ("p1", "d1"), ("p0", "d0"), ("p1", "d1")]


async def test_the_least_loaded_is_chosen_prefill_by_bytes_and_decode_by_calls() -> None:
    rig = await Rig.make("p0 p1 d0 d1")
    pool = rig.means.pool
    with pool.leg(instance(rig, "p0"), 1000), pool.leg(instance(rig, "p1"), 10), pool.leg(instance(rig, "p1"), 10):
        assert {names(rig)[0] for _ in range(4)} == {"p1"}
    with pool.leg(instance(rig, "d0"), 10), pool.leg(instance(rig, "d0"), 10), pool.leg(instance(rig, "d1"), 1000):
        assert {names(rig)[1] for _ in range(4)} == {"d1"}
    assert {names(rig) for _ in range(2)} == {("p0", "d0"), ("p1", "d1")}


async def test_a_pair_needs_a_link_that_both_sides_call_up() -> None:
    rig = await Rig.make("p0 d0 d1")
    rig.cluster.ready["d0"]["peers"]["p0"] = "down"
    await rig.poll()
    assert {names(rig) for _ in range(3)} == {("p0", "d1")}
    rig.cluster.ready["p0"]["peers"]["d1"] = "mismatch"
    await rig.poll()
    with pytest.raises(WorkerUnavailable) as caught:
        names(rig)
    assert caught.value.code == "worker_unavailable"
    assert [reason["code"] for reason in rig.means.pool.reasons()] == ["no_linked_pair"]


async def test_two_misses_put_an_instance_out_and_one_success_in() -> None:
    rig = await Rig.make()
    good = rig.cluster.ready["d0"]

    async def silent() -> None:
        await asyncio.Event().wait()

    rig.cluster.ready["d0"] = silent
    for expected in (True, False):
        polling = asyncio.ensure_future(rig.poll())
        await rig.clock.advance(0.9)
        assert not polling.done()
        await rig.clock.advance(0.2)
        await polling
        assert instance(rig, "d0").is_ready is expected
    assert [reason["code"] for reason in rig.means.pool.reasons()] == ["no_decode"]
    rig.cluster.ready["d0"] = good
    await rig.poll()
    assert instance(rig, "d0").is_ready


async def test_a_refused_connection_and_a_no_put_it_out_at_once() -> None:
    rig = await Rig.make()
    good = rig.cluster.ready["p0"]
    rig.cluster.ready["p0"] = refused()
    await rig.poll()
    assert not instance(rig, "p0").is_ready
    rig.cluster.ready["p0"] = {**good, "ready": False, "reasons": [{"code": "rank_silent", "detail": "", "rank": 3}]}
    await rig.poll()
    assert not instance(rig, "p0").is_ready
    assert instance(rig, "p0").reasons == [{"code": "rank_silent", "detail": "", "rank": 3}]
    rig.cluster.ready["p0"] = good
    await rig.poll()
    assert instance(rig, "p0").is_ready


@pytest.mark.parametrize(
    ("reasons", "told"), [([{"code": "rank_lost"}, {"code": "draining"}], "rank_lost,draining"), ("nonsense", "not ready")]
)
async def test_who_is_refused_is_told_why_from_the_first_no_on(reasons: object, told: str) -> None:
    rig = await Rig.make()
    rig.cluster.ready["d0"] = {**rig.cluster.ready["d0"], "ready": False, "reasons": reasons}
    await rig.poll()
    with pytest.raises(WorkerUnavailable, match=f"no_decode: d0 {told}"):
        names(rig)


@pytest.mark.parametrize("field", ["instance", "role", "config_digest"])
async def test_another_name_role_or_digest_is_kept_out(field: str) -> None:
    rig = await Rig.make()
    rig.cluster.ready["d0"] = {**rig.cluster.ready["d0"], field: "other"}
    await rig.poll()
    assert not instance(rig, "d0").is_ready


async def test_it_polls_each_second_for_ever() -> None:
    rig = await Rig.make()
    asked = []

    async def count() -> dict[str, object]:
        asked.append(rig.clock.now())
        return {"ready": False}

    rig.cluster.ready["d0"] = count
    watching = asyncio.ensure_future(rig.means.pool.watch())
    start = rig.clock.now()
    await rig.clock.advance(3.5)
    watching.cancel()
    assert [at - start for at in asked] == pytest.approx([0.0, 1.0, 2.0, 3.0])


async def test_five_failures_in_a_row_open_the_breaker_for_ten_seconds_then_one_tries() -> None:
    rig = await Rig.make("p0 d0 d1")
    pool, d0 = rig.means.pool, instance(rig, "d0")
    for _ in range(4):
        pool.failed(d0)
    pool.succeeded(d0)
    for _ in range(4):
        pool.failed(d0)
    assert d0.breaker.allows
    pool.failed(d0)
    assert not d0.breaker.allows
    assert {names(rig)[1] for _ in range(4)} == {"d1"}
    await rig.clock.advance(9.9)
    assert not d0.breaker.allows
    await rig.clock.advance(0.2)
    with pool.leg(instance(rig, "d1"), 1), pool.leg(instance(rig, "d1"), 1):
        assert names(rig)[1] == "d0"
        with pool.leg(d0, 1):
            assert names(rig)[1] == "d1"  # the trial is running
        assert names(rig)[1] == "d0"  # it said nothing, so the next one is the trial
        with pool.leg(d0, 1):
            pool.failed(d0)
        assert names(rig)[1] == "d1"  # open for ten seconds more
        await rig.clock.advance(10.1)
        with pool.leg(d0, 1):
            pool.succeeded(d0)
        assert not d0.breaker.is_open


async def test_the_breaker_never_keeps_the_only_instance_of_a_role_out() -> None:
    rig = await Rig.make("p0 d0 d1")
    pool, d0, d1 = rig.means.pool, instance(rig, "d0"), instance(rig, "d1")
    for _ in range(20):
        pool.failed(instance(rig, "p0"))
    assert not instance(rig, "p0").breaker.is_open
    for _ in range(5):
        pool.failed(d0)
    assert d0.breaker.is_open
    pool.refused(d1)
    assert names(rig) == ("p0", "d0")


@pytest.mark.parametrize("is_away", [False, True])
async def test_a_new_incarnation_starts_with_a_clean_record(is_away: bool) -> None:
    rig = await Rig.make("p0 d0 d1")
    d0 = instance(rig, "d0")
    for _ in range(5):
        rig.means.pool.failed(d0)
    assert d0.breaker.is_open
    if is_away:  # between the two nobody listens
        rig.means.pool.refused(d0)
    rig.cluster.ready["d0"]["incarnation"] = "d0-2"
    await rig.poll()
    assert not d0.breaker.is_open


async def test_an_open_breaker_is_no_reason_to_have_no_other_pair() -> None:
    rig = await Rig.make("p0 d0 d1")
    for _ in range(5):
        rig.means.pool.failed(instance(rig, "d0"))
    assert names(rig) == ("p0", "d1")
    failed = pair(rig, "p0", "d1")
    assert names(rig, Avoid(pair=failed, blamed=failed.decode)) == ("p0", "d0")


async def test_what_an_attempt_has_taught_is_avoided() -> None:
    rig = await Rig.make("p0 d0 d1")
    failed = pair(rig, "p0", "d0")
    assert names(rig, Avoid(pair=failed, blamed=failed.decode)) == ("p0", "d1")
    assert names(rig, Avoid(pair=failed, blamed=failed.prefill)) == ("p0", "d1")  # another pair all the same
    with pytest.raises(WorkerUnavailable):
        names(rig, Avoid(pair=failed, blamed=failed.prefill, never=True))
    rig.means.pool.refused(instance(rig, "d1"))
    with pytest.raises(WorkerUnavailable):
        names(rig, Avoid(pair=failed, blamed=failed.decode))
    assert names(rig, Avoid(pair=failed, blamed=failed.decode, same_pair=True)) == ("p0", "d0")


async def test_before_the_first_readiness_the_code_is_starting() -> None:
    rig = await Rig.make()
    fresh = type(rig.means.pool)(
        [i.target for i in rig.means.pool.instances.values()],
        ask=rig.means.workers.ask_ready,
        clock=rig.clock,
        metrics=rig.means.metrics,
    )
    with pytest.raises(WorkerUnavailable) as caught:
        fresh.choose()
    assert caught.value.code == "starting"


async def test_draining_here_takes_one_out_of_the_choice_and_back() -> None:
    rig = await Rig.make("p0 d0 d1")
    assert rig.means.pool.drain("d0", out=True) is instance(rig, "d0")
    assert {names(rig)[1] for _ in range(3)} == {"d1"}
    rig.means.pool.drain("d0", out=False)
    assert {names(rig)[1] for _ in range(3)} == {"d0", "d1"}
    assert rig.means.pool.drain("nobody", out=True) is None
