import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longcat_pd.load_balancer.events import Event, Origin
from longcat_pd.load_balancer.ledger import Ledger

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


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.text(" \t\r\n", max_size=3), st.integers(0, 3), st.booleans())
def test_any_object_stays_what_it_is(value: dict[str, object], blank: str, indent: int, is_ascii: bool) -> None:
    body = (blank + json.dumps(value, indent=indent or None, ensure_ascii=is_ascii) + blank).encode(
        "utf-8", "surrogatepass"
    )
    added = ledger(1).added_to(body)
    expected = {**value, "resume": {"token_ids": [1], **TOLD}}
    assert json.loads(added.decode("utf-8", "surrogatepass")) == expected
