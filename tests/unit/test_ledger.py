import json
from collections.abc import AsyncGenerator, Iterable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from longcat_pd.load_balancer.events import Event, EventReader, Groups, Origin
from longcat_pd.load_balancer.ledger import Ledger
from longcat_pd.server import resume
from longcat_pd.server.answers import Step
from longcat_pd.server.openai import CHAT_ROUTE, decode_body, read_body
from longcat_pd.server.told import told
from tests.balancer_rig import DONE

ORIGIN = Origin(seed=2**63 - 1, created=1767225600, prompt_digest="0f" * 16)
TOLD = {"seed": 2**63 - 1, "created": 1767225600, "prompt_digest": "0f" * 16}


def ledger(*ids: int) -> Ledger:
    made = Ledger()
    made.note([Event(b"data: a\n\n", origin=ORIGIN), Event(b"data: b\n\n", ids=ids)])
    return made


def test_ids_add_up_in_their_order_and_the_origin_stays() -> None:
    made = Ledger()
    assert not made.can_go_on
    made.note([Event(b"data: a\n\n")])
    assert not made.can_go_on
    made.note([Event(b"data: b\n\n", origin=ORIGIN)])
    assert made.can_go_on and made.ids == []
    for ids in ((3, 1), (), (2, 3)):
        made.note([Event(b"data: c\n\n"), Event(b"data: d\n\n", ids=ids)])
    assert made.ids == [3, 1, 2, 3]
    assert json.loads(made.added_to(b"{}")) == {"resume": {"token_ids": [3, 1, 2, 3], **TOLD}}


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"  {  }\n",
        b'{"a":1}',
        b'{"a":1}\r\n\t ',
        b'{"a":{} }',
        b'{"a":"{"}',
        b'{"a":"}"  }  ',
        b'{"a":[{}]}',
        '{"a":"\u4f60\U0001f600"}'.encode(),
        b'{"a":"\\u4f60",\n"a":2 }',
        b'{"resume":{"token_ids":[9]},"a":1}',  # a client's own is another key to us, and the last one counts
    ],
)
def test_a_body_stays_byte_for_byte_and_has_one_more_field_at_its_end(body: bytes) -> None:
    added = ledger(7, 0).added_to(body)
    assert json.loads(added) == {**json.loads(body), "resume": {"token_ids": [7, 0], **TOLD}}
    close = body.rindex(b"}")
    assert added.startswith(body[:close])
    assert added.endswith(body[close:])


TEXT = st.text('a{}[]",:\\ \n\u00e9\U0001f600', max_size=4)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(TEXT, JSON, max_size=4), st.text(" \t\r\n", max_size=3), st.integers(0, 3), st.booleans())
def test_any_object_stays_what_it_is(value: dict[str, object], blank: str, indent: int, is_ascii: bool) -> None:
    body = (blank + json.dumps(value, indent=indent or None, ensure_ascii=is_ascii) + blank).encode()
    added = ledger(1).added_to(body)
    expected = {**value, "resume": {"token_ids": [1], **TOLD}}
    assert json.loads(added) == expected


# ---------------------------------------------------------------------- what workers say and read

BEGUN = resume.Origin(seed=-(2**63), created=1767225600, prompt_token_ids=(1, 2, 3))
BODY = b'{"messages":[{"role":"user","content":"x"}]} '


def record(text: str, finish: str | None = None) -> dict[str, object]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": finish}]}


async def heard(steps: Iterable[Step], *, is_whole: bool, bits: int) -> tuple[Ledger, list[list[bytes]]]:
    """The ledger behind what a worker tells, and the groups that were passed on."""

    async def made() -> AsyncGenerator[Step, None]:
        for step in steps:
            yield step

    data = b"".join([part async for part in told(made(), has_ids=True)]) + DONE
    reader, groups, found, passed = EventReader(hears=True), Groups(is_whole=is_whole), Ledger(), []
    for start in range(0, len(data), bits):
        if group := groups.take(reader.feed(data[start : start + bits])):
            found.note(group)
            passed.append([event.raw for event in group if event.raw])
    return found, passed


@pytest.mark.parametrize("bits", [1, 7, 10_000])
async def test_what_a_worker_tells_is_what_the_next_one_is_told(bits: int) -> None:
    steps = [
        Step(BEGUN, (record("a"), record("b")), (7,)),
        Step(BEGUN, (record("c"),), ()),
        Step(BEGUN, (record("d"), record("", "stop")), (8, 2**31 - 1)),
        Step(BEGUN, ({"choices": [], "usage": {}},)),
    ]
    found, passed = await heard(steps, is_whole=False, bits=bits)
    assert [len(group) for group in passed] == ([2, 1, 4] if bits < 10 else [7])
    values = decode_body(found.added_to(BODY))
    assert resume.read_resume(values, read_body(CHAT_ROUTE, values, "m")) == resume.Resume(
        token_ids=(7, 8, 2**31 - 1),
        seed=-(2**63),
        created=1767225600,
        prompt_digest=resume.prompt_digest((1, 2, 3)),
    )


async def test_what_a_worker_tells_of_a_whole_answer_is_understood() -> None:
    steps = [*(Step(BEGUN, token_ids=(i,)) for i in range(66)), Step(BEGUN, (record("all", "stop"),))]
    found, passed = await heard(steps, is_whole=True, bits=5)
    assert found.ids == list(range(65))  # some wait for each other
    assert [len(group) for group in passed] == [0, 0, 0, 2]
