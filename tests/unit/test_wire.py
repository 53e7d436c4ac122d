"""Records survive the wire, and everything that is not a record is one typed error."""

from __future__ import annotations

import pytest

from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, RankSpec, TransferConfig
from longcat_pd.engine.plan import (
    RANK_MESSAGES,
    Admit,
    Heartbeat,
    RankAccounts,
    RankMessage,
    Segment,
    SlotOutput,
    SlotSampling,
    StepOutput,
    StepPlan,
)
from longcat_pd.kv_transfer.messages import Arrival, Push, TransferClosed
from longcat_pd.wire import Codec, MalformedRecord, from_json, pack, to_json, unpack

MESSAGES = Codec[RankMessage](*RANK_MESSAGES)
PLANS = Codec[StepPlan](StepPlan)


def a_plan() -> StepPlan:
    push = Push(
        transfer_id="t", peer="d0", peer_incarnation="i", lane_host="h", lane_port=1, kvp_size=2, first_rank=0,
        blocks=pack([1, 2]), generation=7,
    )  # fmt: skip
    sampling = SlotSampling(temperature=0.5, top_p=1.0, top_k=0, seed=-(2**63), choice=0, num_logprobs=None)
    admit = Admit(
        slot=3, group=0, token_ids=pack(range(5)), prompt_len=5, num_computed=0, blocks=pack([4]), split_start=1,
        sampling=sampling, push=push,
    )  # fmt: skip
    arrival = Arrival(
        transfer_id="u", group=0, peer="p0", peer_incarnation="j", source_cp_size=2,
        source_layers=(2, 1), prompt_len=9, blocks=pack([]), split_start=0, generation=2,
    )  # fmt: skip
    segment = Segment(slot=3, start=0, num_tokens=5, is_last=True)
    return StepPlan(step_id=4, phase="prefill", admit=(admit,), segments=(segment,), retire=(1,), arrivals=(arrival,))


@pytest.mark.parametrize(
    "message",
    [
        Heartbeat(rank=1, step_id=2, accounts=RankAccounts(rank=1, blocks_total=8)),
        StepOutput(
            step_id=1,
            rank=0,
            slots=(SlotOutput(slot=1, token_ids=(5,), logprobs=(-0.25,), top=(((5, -0.25), (7, -2.0)),)),),
        ),
        TransferClosed(transfer_id="t", rank=2, ok=False, reason="时间"),
    ],
)
def test_a_message_survives(message: RankMessage) -> None:
    assert MESSAGES.decode(MESSAGES.encode(message)) == message


def test_a_plan_survives() -> None:
    assert PLANS.decode(PLANS.encode(a_plan())) == a_plan()


def test_configuration_survives_json() -> None:
    instance = InstanceSpec(
        name="s0", role="standalone", host="127.0.0.1", http_port=8081, device="cpu", model=ModelSection(path="/m"),
        parallel=ParallelConfig(layers_per_stage=(2, 1)), engine=EngineConfig(), transfer=TransferConfig(),
    )  # fmt: skip
    spec = RankSpec(
        instance=instance, rank=0, incarnation="i", plan_endpoint="a", output_endpoint="b", rendezvous_host="c",
        rendezvous_port=1,
    )  # fmt: skip
    assert from_json(RankSpec, to_json(spec)) == spec


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"Heartbeat"],
        [b"Heartbeat", b"\x80", b""],
        [b"Nobody", b"\x80"],
        [b"x" * 1000, b"\x80"],
        [b"Heartbeat", b""],
        [b"Heartbeat", b"\xff\xff"],
        [b"Heartbeat", b"\x80"],  # no fields
        [b"StepOutput", b"\x82\xa7step_id\xa1x\xa4rank\x00"],  # a string where a number belongs
        [b"\xff\xfe", b"\x80"],
    ],
)
def test_what_is_no_record_is_one_error(frames: list[bytes]) -> None:
    with pytest.raises(MalformedRecord):
        MESSAGES.decode(frames)


def test_half_a_record_is_an_error() -> None:
    tag, body = PLANS.encode(a_plan())
    for end in range(len(body)):
        with pytest.raises(MalformedRecord):
            PLANS.decode([tag, body[:end]])


def test_bad_json_is_the_same_error() -> None:
    with pytest.raises(MalformedRecord):
        from_json(RankSpec, '{"rank": 1}')


def test_ids_are_little_endian_int32() -> None:
    assert pack([1, -2, 2**31 - 1]) == bytes([1, 0, 0, 0, 254, 255, 255, 255, 255, 255, 255, 127])
    assert list(unpack(pack(range(1000)))) == list(range(1000))
    with pytest.raises(MalformedRecord):
        unpack(b"abc")
