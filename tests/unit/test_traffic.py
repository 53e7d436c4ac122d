"""parallel/traffic.py: what is noted of a step and counted again is what the step would have counted."""

from longcat_pd.parallel.traffic import Traffic


def step(traffic: Traffic) -> None:
    for kind in ("all_gather", "reduce_scatter", "all_gather"):
        traffic.began("ep", kind)
        traffic.sent("ep", 1, 10)
        traffic.sent("ep", 2, 10)
    traffic.began("attn_tp", "all_reduce")
    traffic.sent("attn_tp", 1, 7)


def test_a_note_repeats_what_a_step_counts() -> None:
    eager, compiled = Traffic(), Traffic()
    for traffic in (eager, compiled):
        traffic.began("ep", "all_to_all")  # before
        traffic.sent("ep", 3, 5)
    with compiled.noted() as note:
        step(compiled)
    for _ in range(2):
        compiled.repeat(note)
    for _ in range(3):
        step(eager)
    assert (compiled.axes, compiled.sent_to) == (eager.axes, eager.sent_to)
    assert compiled.axes["ep"].num_collectives == 10
    step(compiled)
    assert note.sent_bytes["ep"] == 60, "a note ends with its block"


def test_another_order_is_another_digest() -> None:
    one, other = Traffic(), Traffic()
    with one.noted() as note:
        one.began("ep", "all_gather")
        one.began("ep", "reduce_scatter")
    other.began("ep", "reduce_scatter")
    other.began("ep", "all_gather")
    assert one.axes != other.axes
    one.repeat(note)
    assert one.axes["ep"].num_collectives == 4
