"""engine/runner.py and handover.py with a model of a few lines: the order inside a plan, lanes, accounts, what fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from longcat_pd import kernels, wire
from longcat_pd.config.schema import EngineConfig, InstanceSpec, ModelSection, ParallelConfig, RankSpec, TransferConfig
from longcat_pd.engine.plan import Segment, SlotOutput, StepPlan
from longcat_pd.engine.rank_model import RankModel
from longcat_pd.engine.runner import ModelRunner
from longcat_pd.kv_cache.block_pool import GroupPool
from longcat_pd.kv_cache.spec import CacheEntry, CacheSpec
from longcat_pd.kv_cache.storage import KVCache
from longcat_pd.kv_transfer.messages import Arrival, Push
from longcat_pd.kv_transfer.sides import LaneCounts
from longcat_pd.models.batch import ForwardInputs, Rows
from longcat_pd.parallel.layout import ParallelLayout
from longcat_pd.parallel.mesh import Mesh
from longcat_pd.parallel.platform import platform_of
from tests.slots import GREEDY, admit

BLOCK = 4
VOCAB = 101
PUSH = Push(
    transfer_id="t",
    peer="d0",
    peer_incarnation="",
    lane_host="",
    lane_port=0,
    kvp_size=1,
    first_rank=0,
    blocks=b"",
    generation=1,
)


class SumModel:
    """The next token is the sum of all ids so far, mod VOCAB: wrong as soon as one position is missed or repeated."""

    def __init__(self, cache: KVCache, calls: list[Any]) -> None:
        self.ids = cache.tensor("latent.0").view(-1)
        self.calls = calls
        self.steps: list[tuple[int, Rows, Rows]] = []
        self.num_logits: list[int] = []

    def forward(
        self, inputs: ForwardInputs, hidden: torch.Tensor | None, on_layer: Callable[[int], None] | None
    ) -> torch.Tensor:
        self.steps.append((len(inputs.token_ids), inputs.rows, inputs.outputs))
        self.ids[inputs.slot_mapping] = inputs.token_ids.float()
        for layer in (0, 1):
            self.calls.append(("layer", layer))
            if on_layer is not None:
                on_layer(layer)
        sums = []
        for row, seq in enumerate(inputs.row_seqs.tolist()):
            seen = 0.0
            for block, start in zip(inputs.block_tables[seq].tolist(), inputs.block_starts[seq].tolist(), strict=True):
                count = max(0, min(BLOCK, int(inputs.positions[row]) + 1 - start))
                seen += float(self.ids[block * BLOCK : block * BLOCK + count].sum())
            sums.append(seen)
        return torch.tensor(sums, dtype=torch.float32)[:, None]

    has_split_head = False

    def final(self, hidden: torch.Tensor, inputs: ForwardInputs) -> torch.Tensor:
        return hidden if inputs.output_rows is None else hidden[inputs.output_rows]

    def logits(self, final: torch.Tensor, rows: Rows) -> torch.Tensor:
        self.num_logits.append(len(final))
        return torch.zeros(len(final), VOCAB).scatter(1, final.long() % VOCAB, 5.0)


class FakeLanes:
    """Both sides; notes every call."""

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.reserved = 0
        self.quarantined: frozenset[int] = frozenset()

    def begin(self, push: Push, *, prompt_len: int, blocks: bytes, split_start: int) -> None:
        self.calls.append(("begin", push.transfer_id, prompt_len))

    def push_layer(self, transfer_id: str, layer: int, first_block: int, end_block: int, *, is_last_chunk: bool) -> None:
        self.calls.append(("push", transfer_id, layer, first_block, end_block, is_last_chunk))

    def retire(self, transfer_id: str) -> None:
        self.calls.append(("retire", transfer_id))

    def cancel(self, transfer_id: str) -> None:
        self.calls.append(("cancel", transfer_id))

    def announce(self, arrival: Arrival) -> None:
        self.calls.append(("announce", arrival.transfer_id))
        self.reserved += len(arrival.blocks) // 4

    def drop(self, transfer_id: str) -> None:
        self.calls.append(("drop", transfer_id))

    def adopt(self, transfer_id: str) -> None:
        self.calls.append(("adopt", transfer_id))
        self.reserved = 0

    def counts(self) -> LaneCounts:
        return LaneCounts(posted=1, reserved_blocks=self.reserved, quarantined=self.quarantined)

    def close(self) -> None:
        self.calls.append("close")


class Bench:
    """A runner of one rank, its pool, and the calls that it made."""

    def __init__(self, *, push: bool = False, arrival: bool = False, num_groups: int = 1, group: int = 0) -> None:
        self.calls: list[Any] = []
        self.pool = GroupPool(group, 1, 20)
        cache = KVCache(CacheSpec((CacheEntry("latent.0", 0, 1, torch.float32),)), 20, BLOCK, torch.device("cpu"))
        self.model = SumModel(cache, self.calls)
        loaded = RankModel(
            model=cast(Any, self.model),
            ops=kernels.load("cpu"),
            cache=cache,
            hidden_size=1,
            dtype=torch.float32,
            device=torch.device("cpu"),
            ngram_order=0,
            vocab_size=VOCAB,
            model_digest="abc",
            weight_bytes=7,
            load_s=0.5,
        )
        parallel = ParallelConfig(dp_size=num_groups)
        mesh = Mesh(ParallelLayout.of(parallel), group, {}, platform=platform_of("cpu"))
        self.lanes = lanes = FakeLanes(self.calls)
        self.runner = ModelRunner(
            rank_spec(num_groups, group),
            mesh,
            loaded=loaded,
            push=lanes if push else None,
            arrival=lanes if arrival else None,
        )
        self.steps = 0

    def run(self, phase: Any = "prefill", **fields: Any) -> tuple[SlotOutput, ...]:
        self.steps += 1
        self.output = self.runner.execute(StepPlan(step_id=self.steps, phase=phase, **fields))
        return self.output.slots


def rank_spec(num_groups: int, rank: int) -> RankSpec:
    instance = InstanceSpec(
        name="x0",
        role="standalone",
        host="",
        http_port=1,
        device="cpu",
        model=ModelSection(path=""),
        parallel=ParallelConfig(dp_size=num_groups),
        engine=EngineConfig(block_size=BLOCK, max_num_seqs=3 * num_groups, num_blocks=20, max_model_len=24),
        transfer=TransferConfig(),
    )
    return RankSpec(
        instance=instance,
        rank=rank,
        incarnation="i",
        plan_endpoint="",
        output_endpoint="",
        rendezvous_host="",
        rendezvous_port=0,
    )


def segment(slot: int, start: int, num_tokens: int, is_last: bool) -> Segment:
    return Segment(slot=slot, start=start, num_tokens=num_tokens, is_last=is_last)


def decode(*slots: int) -> tuple[Segment, ...]:
    return tuple(segment(slot, -1, 1, True) for slot in slots)


def test_chunks_then_tokens() -> None:
    bench = Bench()
    ids = [10, 20, 30, 40, 50, 60]
    first = admit(bench.pool, 0, ids, block_size=BLOCK, room=6)
    second = admit(bench.pool, 1, [5], block_size=BLOCK, room=6)
    assert bench.run(admit=(first,), segments=(segment(0, 0, 4, False),)) == ()
    slots = bench.run(admit=(second,), segments=(segment(0, 4, 2, True), segment(1, 0, 1, True)))
    assert [(s.slot, s.token_ids, s.logprobs, s.top) for s in slots] == [(0, (210 % VOCAB,), (), ()), (1, (5,), (), ())]
    slots = bench.run("decode", segments=decode(0, 1))
    assert [s.token_ids for s in slots] == [((210 + 210 % VOCAB) % VOCAB,), (10,)]
    assert [s.token_ids for s in bench.run("decode", segments=decode(1))] == [(20,)]


def test_a_slot_is_used_again_after_retire_in_one_plan() -> None:
    bench = Bench()
    old = admit(bench.pool, 2, [90, 91, 92], block_size=BLOCK, room=9)
    new = admit(bench.pool, 2, [1, 2], block_size=BLOCK, room=1)
    bench.run(admit=(old,), segments=(segment(2, 0, 3, True),))
    slots = bench.run(retire=(2,), admit=(new,), segments=(segment(2, 0, 2, True),))
    assert slots[0].token_ids == (3,)
    with pytest.raises(AssertionError, match="slot 2 is taken"):
        bench.run(admit=(old,))


def test_accounts_follow_the_plans() -> None:
    bench = Bench(arrival=True)
    first = admit(bench.pool, 0, [1] * 6, block_size=BLOCK, room=6)
    bench.run(admit=(first,))
    accounts = bench.output.accounts
    assert accounts is not None
    assert (accounts.blocks_total, accounts.blocks_live, accounts.blocks_free) == (19, 3, 16)
    assert (accounts.slots_total, accounts.slots_used, accounts.lanes_posted) == (3, 1, 1)
    bench.run(retire=(0,))
    assert bench.runner.accounts().blocks_free == 19 and bench.runner.accounts().slots_used == 0


def test_every_layer_of_every_chunk_leaves_once_right_after_it_was_computed() -> None:
    bench = Bench(push=True)
    first = admit(bench.pool, 0, [1] * 10, block_size=BLOCK, room=0, push=PUSH)
    other = admit(bench.pool, 1, [1] * 3, block_size=BLOCK, room=0)
    bench.run(admit=(first, other), segments=(segment(0, 0, 8, False), segment(1, 0, 3, True)))
    bench.run(segments=(segment(0, 8, 2, True),))
    assert bench.calls == [
        ("begin", "t", 10),
        ("layer", 0),
        ("push", "t", 0, 0, 2, False),
        ("layer", 1),
        ("push", "t", 1, 0, 2, False),
        ("layer", 0),
        ("push", "t", 0, 2, 3, True),
        ("layer", 1),
        ("push", "t", 1, 2, 3, True),
    ]
    bench.run(cancel_push=("t",), retire=(0, 1))
    assert bench.calls[-2:] == [("retire", "t"), ("cancel", "t")]


def test_an_arrival_is_announced_then_adopted_or_dropped() -> None:
    bench = Bench(arrival=True)
    taken = admit(bench.pool, 0, [4, 5, 6, 7], block_size=BLOCK, room=8, num_computed=3, arrival="a")
    arrival = Arrival(
        transfer_id="a",
        group=0,
        peer="p0",
        peer_incarnation="",
        source_cp_size=1,
        source_layers=(2,),
        prompt_len=3,
        blocks=taken.blocks,
        split_start=0,
        generation=1,
    )
    bench.run("decode", arrivals=(arrival,))
    accounts = bench.runner.accounts()
    assert (accounts.blocks_reserved, accounts.blocks_live) == (3, 0)
    bench.run("decode", drop=("old",), arrivals=(replace(arrival, transfer_id="b", blocks=b""),), admit=(taken,))
    accounts = bench.runner.accounts()
    assert (accounts.blocks_reserved, accounts.blocks_live) == (0, 3)
    assert bench.calls == [("announce", "a"), ("drop", "old"), ("announce", "b"), ("adopt", "a")]
    table = bench.runner.cache.tensor("latent.0").view(-1)  # what the lanes would have written
    first_block = int.from_bytes(taken.blocks[:4], "little")
    table[first_block * BLOCK : first_block * BLOCK + 3] = torch.tensor([4.0, 5.0, 6.0])
    assert bench.run("decode", segments=decode(0))[0].token_ids == (22,)


def test_a_gap_in_the_plans_is_a_fault() -> None:
    bench = Bench()
    bench.run()
    bench.steps = 2
    with pytest.raises(AssertionError, match="plan 3 after plan 1"):
        bench.run()


def test_logprobs_where_asked_for() -> None:
    bench = Bench()
    asked = admit(bench.pool, 0, [7], block_size=BLOCK, room=2, sampling=replace(GREEDY, num_logprobs=2))
    (slot,) = bench.run(admit=(asked,), segments=(segment(0, 0, 1, True),))
    assert slot.token_ids == (7,)
    assert len(slot.logprobs) == 1 and len(slot.top) == 1
    assert [i for i, _ in slot.top[0]] == [7, 0]
    assert slot.top[0][0][1] == slot.logprobs[0]


def test_ready_names_the_cache_entries() -> None:
    ready = Bench().runner.ready()
    assert ready.cache_entries == (("latent.0", 1, "float32"),)
    assert (ready.model_digest, ready.weight_bytes, ready.num_blocks, ready.accounts.blocks_free) == ("abc", 7, 20, 19)


def test_close_ends_the_lanes() -> None:
    bench = Bench(push=True)
    bench.runner.close()
    assert bench.calls == ["close"]


def test_a_push_needs_lanes() -> None:
    bench = Bench()
    with pytest.raises(AssertionError, match="without lanes"):
        bench.run(admit=(admit(bench.pool, 0, [1], block_size=BLOCK, room=0, push=PUSH),))


def test_a_block_that_several_slots_share_is_live_once_and_until_the_last_of_them_leaves() -> None:
    bench = Bench()
    first = admit(bench.pool, 0, list(range(10, 19)), block_size=BLOCK, room=1)
    bench.run(admit=(first,), segments=(segment(0, 0, 9, True),))
    own = bench.runner.accounts().blocks_live
    second = replace(first, slot=1, num_computed=2 * BLOCK, blocks=first.blocks[: 4 * 2] + wire.pack([17]))
    bench.run(admit=(second,), segments=(segment(1, 8, 1, True),))
    assert bench.runner.accounts().blocks_live == own + 1
    bench.run(retire=(0,))
    assert bench.runner.accounts().blocks_live == 3
    bench.run(retire=(1,))
    assert bench.runner.accounts().blocks_live == 0


def test_a_first_chunk_takes_along_the_blocks_that_were_there() -> None:
    bench = Bench(push=True)
    known = admit(bench.pool, 0, list(range(10, 29)), block_size=BLOCK, room=0, push=PUSH)
    bench.run(admit=(replace(known, num_computed=2 * BLOCK),), segments=(segment(0, 8, 4, False),))
    bench.run(segments=(segment(0, 12, 7, True),))
    pushed = [call[2:] for call in bench.calls if call[0] == "push"]
    assert pushed == [(0, 0, 3, False), (1, 0, 3, False), (0, 3, 5, True), (1, 3, 5, True)]


def test_what_a_lane_still_reads_is_in_quarantine_only_if_no_slot_has_it() -> None:
    bench = Bench(push=True)
    seq = admit(bench.pool, 0, list(range(10, 19)), block_size=BLOCK, room=0)
    bench.run(admit=(seq,), segments=(segment(0, 0, 9, True),))
    bench.lanes.quarantined = frozenset(wire.unpack(seq.blocks)[:2]) | {18}
    assert (bench.runner.accounts().blocks_live, bench.runner.accounts().blocks_quarantined) == (3, 1)
    bench.run(retire=(0,))
    assert (bench.runner.accounts().blocks_live, bench.runner.accounts().blocks_quarantined) == (0, 3)


def test_slots_of_other_groups_are_ignored_and_counted() -> None:
    """Two groups of three slots: 0 1 2 and 3 4 5. Each rank is given everything."""
    benches = [Bench(num_groups=2, group=group) for group in range(2)]
    admits = [
        admit(benches[slot // 3].pool, slot, ids, block_size=BLOCK, room=6)
        for slot, ids in ((3, [10, 20, 30]), (4, [1]), (1, [5, 6, 7, 8, 9]))
    ]
    first = {"admit": admits, "segments": (segment(3, 0, 3, True), segment(1, 0, 4, False), segment(4, 0, 1, True))}
    second = {"segments": (segment(1, 4, 1, True),)}
    found = [[b.run(**first), b.run(**second), b.run("decode", segments=decode(4, 1, 3))] for b in benches]
    told = [[[(s.slot, s.token_ids) for s in slots] for slots in bench] for bench in found]
    assert told[0] == [[], [(1, (35,))], [(1, (70,))]]
    assert told[1] == [[(3, (60,)), (4, (1,))], [], [(4, (2,)), (3, (120 % VOCAB,))]]
    steps = [bench.model.steps for bench in benches]
    assert steps[0] == [(4, Rows(4, 4), Rows(0, 2)), (1, Rows(1, 1), Rows(1, 1)), (2, Rows(2, 2), Rows(2, 2))]
    assert steps[1] == [(4, Rows(4, 4), Rows(2, 2)), (0, Rows(0, 1), Rows(0, 1)), (2, Rows(2, 2), Rows(2, 2))]
    assert [bench.model.num_logits for bench in benches] == [[0, 1, 2], [2, 0, 2]], "a head for all, or for none"
    assert [bench.runner.accounts().slots_used for bench in benches] == [1, 2]
    assert [bench.runner.accounts().slots_total for bench in benches] == [3, 3]
    for bench in benches:
        bench.run("decode", retire=(3, 1), segments=decode(4))
    assert [bench.model.steps[-1] for bench in benches] == [(1, Rows(1, 1), Rows(1, 1))] * 2
    assert [bench.runner.accounts().slots_used for bench in benches] == [0, 1]
    assert benches[0].output.slots == () and [s.token_ids for s in benches[1].output.slots] == [(4,)]


def test_nobody_runs_a_head_where_nobody_wants_a_token() -> None:
    bench = Bench(num_groups=2, group=1)
    assert bench.run(segments=(segment(0, 0, 4, False),)) == ()
    assert bench.model.steps == [(0, Rows(0, 4), Rows(0, 0))] and bench.model.num_logits == []


def test_an_admission_names_the_group_of_its_slot() -> None:
    bench = Bench(num_groups=2, group=1)
    wrong = replace(admit(bench.pool, 3, [1], block_size=BLOCK, room=1), group=0)
    with pytest.raises(AssertionError, match="slot 3 is not one of group 0"):
        bench.run(admit=(wrong,))
