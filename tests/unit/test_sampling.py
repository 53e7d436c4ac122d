"""kernels/reference/sampling.py: keys to numbers to the bit, and draws against a definition that takes row after row."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from longcat_pd import kernels
from longcat_pd.kernels.drawing_ops import ENDS, IN_PROMPT, Edits
from longcat_pd.kernels.reference.sampling import (
    draw,
    draw_edited,
    draw_edited_static,
    draw_static,
    edited,
    keyed_uniform,
    keyed_uniform_static,
)

BOTH = pytest.mark.parametrize("execution", [draw, draw_static])
BOTH_KEYED = pytest.mark.parametrize("keyed", [keyed_uniform, keyed_uniform_static])
EDGES = (0, 1, -1, 2, 11, -5, 2**31 - 1, 2**31, -(2**31), 2**53 + 1, 2**62, 2**63 - 1, -(2**63), 0x5DEECE66D)

# Names, and names with an overload, for which graph compilers of accelerators have no converter.
FORBIDDEN = set(
    re.findall(
        r"\S+",
        """
        amax amin all.dim bincount bitwise_and.Scalar bitwise_left_shift bitwise_or.Scalar bitwise_right_shift bitwise_xor
        bucketize cummax cummin cumprod diagonal eye fmod index_copy index_put isin isnan masked_select nonzero prod
        rand_like roll scatter_reduce sort.stable unique_consecutive var _local_scalar_dense _unique2
        __rshift__ __lshift__ __xor__
        """,
    )
)


def keys_of(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(t.flatten() for t in torch.meshgrid(*map(torch.tensor, (seeds, choices, positions)), indexing="ij"))


def hashed(*parts: Tensor) -> npt.NDArray[np.float64]:
    """splitmix64's finaliser over the parts, with the unsigned integers that it is made for."""

    def mixed(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        x = x + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))

    state = np.zeros(len(parts[0]), dtype=np.uint64)
    for part in parts:
        state = mixed(state ^ part.numpy().view(np.uint64))
    return np.asarray((state >> np.uint64(11)).astype(np.float64) * 2.0**-53)


@BOTH_KEYED
def test_a_key_gives_the_bits_of_its_hash(keyed: Callable[..., Tensor]) -> None:
    keys = keys_of(EDGES, (0, 1, 2, 127), (0, 1, 2, 3, 1023, 65535, 999_999, 1_000_000))
    assert np.array_equal(keyed(*keys).numpy(), hashed(*keys))
    many = torch.randint(-(2**63), 2**63 - 1, (3, 20000), generator=torch.Generator().manual_seed(0))
    assert np.array_equal(keyed(*many).numpy(), hashed(*many))


def test_the_hash_never_changes() -> None:
    """A seeded text must be the same after an update: these numbers are part of the contract."""
    values = keyed_uniform(torch.tensor([0, -5]), torch.tensor([0, 3]), torch.tensor([0, 123456]))
    assert values.tolist() == [0.13870941014555427, 0.9411003284026059]


def test_keys_differ_in_every_part() -> None:
    values = keyed_uniform(*keys_of((-1, 0, 1), (0, 1), range(200)))
    assert len(values.unique()) == 1200
    assert values.min() >= 0.0 and values.max() < 1.0
    counts = torch.histc(values, bins=8, min=0.0, max=1.0)
    assert counts.min() > 0.7 * 150 and counts.max() < 1.3 * 150


def defined(row: Sequence[float], temperature: float, top_k: int, *, top_p: float, floor: float, uniform: float) -> int:
    """One row: temperature, the k best, the shortest run of the best that reaches p, what is not too faint, the draw."""
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if temperature == 0.0:
        return order[0]
    weights = [math.exp((value - row[order[0]]) / temperature) for value in row]
    kept = order[: top_k or len(row)]
    if top_p < 1.0:
        total, before, run = sum(weights[i] for i in kept), 0.0, []
        for i in kept:
            if before / total < top_p:
                run.append(i)
            before += weights[i]
        kept = run
    kept = [i for i in kept if (row[i] - row[order[0]]) / temperature >= floor]
    total, reached = sum(weights[i] for i in sorted(kept)), 0.0
    for i in sorted(kept):
        reached += weights[i]
        if reached > uniform * total:
            return i
    raise AssertionError("a number below 1 falls on some id")


Rows = dict[str, Tensor]


def rules_of(num_rows: int, num_ids: int, *, seed: int) -> Rows:
    """Rows of every kind: greedy, plain, one filter, both, filters that let everything pass."""
    source = np.random.default_rng(seed)
    return {
        "temperature": torch.from_numpy(source.choice([0.0, 0.3, 1.0, 1.7], num_rows)),
        "top_k": torch.from_numpy(source.choice([0, 0, 1, 2, 5, num_ids - 1, num_ids, 10 * num_ids], num_rows)),
        "top_p": torch.from_numpy(source.choice([1.0, 1.0, 0.05, 0.437, 0.9, 0.999], num_rows)),
        "floor": torch.from_numpy(np.log(source.choice([1.0, 0.5, 0.02, 1e-9], num_rows))).where(
            torch.from_numpy(source.random(num_rows) < 0.5), -torch.inf
        ),
        "uniform": torch.from_numpy(source.random(num_rows)),
    }


def logits_of(kind: str, num_rows: int, num_ids: int, *, seed: int) -> Tensor:
    made = torch.randn(num_rows, num_ids, generator=torch.Generator().manual_seed(seed)) * 2
    if kind == "ties":
        return made.round()
    if kind == "masked":
        made[:, 1:][made[:, 1:] < 0.5] = -torch.inf
    return made


@BOTH
@pytest.mark.parametrize("kind", ["spread", "ties", "masked"])
@pytest.mark.parametrize(("num_rows", "num_ids"), [(400, 7), (300, 61), (40, 1000), (1, 33), (0, 9)])
def test_a_draw_is_its_definition(execution: Callable[..., Tensor], kind: str, num_rows: int, num_ids: int) -> None:
    logits, rules = logits_of(kind, num_rows, num_ids, seed=num_ids), rules_of(num_rows, num_ids, seed=num_rows)
    got = execution(logits, **rules)
    assert got.dtype == torch.int64
    wanted = [
        defined(row, t, k, top_p=p, floor=f, uniform=u)
        for row, t, k, p, f, u in zip(logits.tolist(), *(column.tolist() for column in rules.values()), strict=True)
    ]
    assert got.tolist() == wanted


@BOTH
def test_shares_of_equal_ids_are_met_exactly(execution: Callable[..., Tensor]) -> None:
    """``share`` of ``same`` equal ids, at the boundary: so many stay and not one more."""
    num_ids = 30
    rows = [(same, share) for same in range(1, num_ids + 1) for share in range(1, same + 1)]
    logits = torch.full((len(rows), num_ids), -torch.inf)
    for row, (same, _) in zip(logits, rows, strict=True):
        row[num_ids - same :] = 1.0
    for uniform in (0.0, 1.0 - 2.0**-53):
        got = execution(
            logits,
            temperature=torch.full((len(rows),), 0.7, dtype=torch.float64),
            top_k=torch.tensor([same if i % 2 else 0 for i, (same, _) in enumerate(rows)]),
            top_p=torch.tensor([share / same for same, share in rows], dtype=torch.float64),
            floor=torch.zeros(len(rows), dtype=torch.float64),  # equals of the best are as likely as it
            uniform=torch.full((len(rows),), uniform, dtype=torch.float64),
        )
        assert got.tolist() == [num_ids - same + (share - 1 if uniform else 0) for same, share in rows]


@BOTH
def test_company_does_not_matter(execution: Callable[..., Tensor]) -> None:
    logits, rules = logits_of("ties", 37, 1003, seed=1), rules_of(37, 1003, seed=1)
    together = execution(logits, **rules)
    for part in (slice(0, 1), slice(5, 6), slice(30, 37), slice(3, 21)):
        assert torch.equal(execution(logits[part], **{name: rule[part] for name, rule in rules.items()}), together[part])


@BOTH
@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (0.24, 1), (0.26, 3), (1.0 - 2.0**-53, 3)])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.99), (5, 5e-324)])
def test_the_ends_of_the_range_never_meet_an_id_without_probability(
    execution: Callable[..., Tensor], uniform: float, token: int, top_k: int, top_p: float
) -> None:
    logits = torch.tensor([[-torch.inf, math.log(0.25), -torch.inf, math.log(0.75), -torch.inf]])
    rules = {"temperature": 1.0, "top_p": top_p, "floor": -math.inf, "uniform": uniform}
    columns = {name: torch.tensor([value], dtype=torch.float64) for name, value in rules.items()}
    expected = 3 if top_p < 0.5 else token
    assert execution(logits, **columns, top_k=torch.tensor([top_k])).tolist() == [expected]


@BOTH
def test_a_row_that_is_not_a_number_still_gives_an_id(execution: Callable[..., Tensor]) -> None:
    logits = torch.full((3, 6), torch.nan)
    rules = rules_of(3, 6, seed=0) | {"temperature": torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64)}
    rules["top_p"] = torch.tensor([1.0, 1.0, 0.5], dtype=torch.float64)
    assert all(0 <= token < 6 for token in execution(logits, **rules).tolist())


def test_nothing_is_sorted_or_widened_for_a_greedy_batch() -> None:
    rules = rules_of(3, 50, seed=0) | {"temperature": torch.zeros(3, dtype=torch.float64)}
    with torch.profiler.profile() as profile:
        draw(logits_of("spread", 3, 50, seed=0), **rules)
    assert not {event.key for event in profile.key_averages()} & {"aten::sort", "aten::_softmax", "aten::cumsum"}


# -- draws from logits that are changed first


def edits_of(num_rows: int, num_ids: int, *, seed: int) -> Edits:
    """Three sequences; rows of each that ask for nothing, for one thing, or for all."""
    source, num_seqs = np.random.default_rng(seed), 3

    def some(values: list[Any], *sizes: int) -> Tensor:
        return torch.from_numpy(source.choice(values, sizes))

    bias_ids = torch.stack([torch.from_numpy(source.permutation(num_ids)[:5]) for _ in range(num_seqs)])
    bias = some([0.0, 1.0, -1.0, 100.0, 0.1], num_seqs, 5).float()
    bias[0] = 0.0
    return Edits(
        counts=some([0, 0, 0, 1, 2, 7], num_seqs, num_ids).float(),
        flags=some([0, 0, IN_PROMPT, ENDS, IN_PROMPT | ENDS], num_seqs, num_ids).to(torch.uint8),
        bias_ids=bias_ids,
        bias=bias,
        seqs=some([*range(num_seqs)], num_rows),
        drafts=some([-1, *range(num_ids)], num_rows, 3),
        is_early=some([False, False, True], num_rows),
        frequency=some([0.0, 0.0, 0.0, 1.0, -0.5, 0.3], num_rows),
        presence=some([0.0, 0.0, 0.0, 1.0, 2.0, -1.1], num_rows),
        repetition=some([1.0, 1.0, 1.0, 2.0, 0.5, 1.3], num_rows),
        masks=some([-1, 0x55555555, 1 - 2**31, 3, 6, 257], num_rows, -(-num_ids // 32)).int(),
        is_bound=some([False, False, True], num_rows),
    )


def changed(row: Sequence[float], number: int, edits: Edits) -> list[float]:
    """The logits of one row, id after id."""
    seq, drafts = int(edits.seqs[number]), edits.drafts[number].tolist()
    bias = dict.fromkeys(range(len(row)), 0.0)
    for token, value in zip(edits.bias_ids[seq].tolist(), edits.bias[seq].tolist(), strict=True):
        bias[token] += value
    found = []
    for token, logit in enumerate(row):
        x, flags = logit + bias[token], int(edits.flags[seq, token])
        count = int(edits.counts[seq, token]) + drafts.count(token)
        if count > 0 or flags & IN_PROMPT:
            x = x / float(edits.repetition[number]) if x > 0 else x * float(edits.repetition[number])
        x -= float(edits.frequency[number]) * count
        x -= float(edits.presence[number]) if count else 0.0
        found.append(float(np.float32(x)))
    words, is_bound = edits.masks[number].tolist(), bool(edits.is_bound[number])
    allowed = {token for token in bias if not is_bound or words[token // 32] >> token % 32 & 1}
    early = {token for token in bias if edits.is_early[number] and int(edits.flags[seq, token]) & ENDS}
    return [x if token in (allowed - early or allowed) else -math.inf for token, x in enumerate(found)]


@pytest.mark.parametrize("kind", ["spread", "ties"])
@pytest.mark.parametrize(("num_rows", "num_ids"), [(300, 7), (200, 61), (30, 1000), (1, 33), (0, 9)])
def test_an_edited_draw_is_its_definition(kind: str, num_rows: int, num_ids: int) -> None:
    logits, rules = logits_of(kind, num_rows, num_ids, seed=num_ids), rules_of(num_rows, num_ids, seed=num_rows)
    edits, before = edits_of(num_rows, num_ids, seed=num_rows + num_ids), logits.clone()
    wanted = []
    for number, (row, t, k, p, f, u) in enumerate(
        zip(logits.tolist(), *(column.tolist() for column in rules.values()), strict=True)
    ):
        other = changed(row, number, edits)
        assert edited(logits[number : number + 1], of_row(edits, number)).tolist() == [other]
        wanted.append(defined(other, t, k, top_p=p, floor=f, uniform=u) if max(other) > -math.inf else 0)
    sealed = kernels.load("cpu", exe_mode="inductor").draw_edited
    assert draw_edited(logits, edits, **rules).tolist() == wanted
    assert draw_edited_static(logits, edits, **rules).tolist() == wanted
    assert sealed(logits, edits, **rules).tolist() == wanted
    assert torch.equal(logits, before)


def test_masks_that_bind_nothing_may_have_any_width() -> None:
    """A rank without a tokenizer has one word of them."""
    logits, rules = logits_of("spread", 40, 1000, seed=1), rules_of(40, 1000, seed=2)
    edits = edits_of(40, 1000, seed=3)._replace(is_bound=torch.zeros(40, dtype=torch.bool))
    wanted = draw_edited(logits, edits, **rules)
    for num_words in (0, 1):
        narrow = edits._replace(masks=edits.masks[:, :num_words])
        assert torch.equal(draw_edited(logits, narrow, **rules), wanted)
        assert torch.equal(draw_edited_static(logits, narrow, **rules), wanted)


def of_row(edits: Edits, number: int) -> Edits:
    tables = ("counts", "flags", "bias_ids", "bias")
    return Edits(**{n: t if n in tables else t[number : number + 1] for n, t in edits._asdict().items()})


def test_company_does_not_matter_to_edited_rows() -> None:
    logits, rules, edits = logits_of("ties", 37, 203, seed=1), rules_of(37, 203, seed=1), edits_of(37, 203, seed=1)
    together = draw_edited(logits, edits, **rules).tolist()
    for number in range(37):
        own = {name: rule[number : number + 1] for name, rule in rules.items()}
        assert draw_edited(logits[number : number + 1], of_row(edits, number), **own).tolist() == [together[number]]


def test_tables_are_not_read_for_rows_that_ask_for_nothing() -> None:
    rules = rules_of(6, 50, seed=0) | {"temperature": torch.zeros(6, dtype=torch.float64)}
    plain = {"frequency": 0.0, "presence": 0.0, "repetition": 1.0, "bias": 0.0, "is_early": 0.0}
    made = edits_of(6, 50, seed=0)
    edits = made._replace(**{name: torch.full_like(getattr(made, name), value) for name, value in plain.items()})
    logits = logits_of("spread", 6, 50, seed=0)
    with torch.profiler.profile() as profile:
        found = draw_edited(logits, edits, **rules)
    assert torch.equal(found, logits.argmax(-1))
    assert not {event.key for event in profile.key_averages()} & {"aten::scatter_add", "aten::where", "aten::sort"}


def keyed_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]:
    keys = keys_of((1, -7, 2**63 - 1), (0,), (3, 4, 5))
    return keyed_uniform_static, keys, keyed_uniform(*keys)


def drawn_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]:
    logits, rules = logits_of("ties", 9, 20, seed=0), rules_of(9, 20, seed=0)

    def of_columns(logits: Tensor, *columns: Tensor) -> Tensor:
        return draw_static(logits, **dict(zip(rules, columns, strict=True)))

    return of_columns, (logits, *rules.values()), draw(logits, **rules)


def edited_case() -> tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]:
    logits, rules, edits = logits_of("ties", 9, 40, seed=0), rules_of(9, 40, seed=0), edits_of(9, 40, seed=0)

    def of_columns(logits: Tensor, *columns: Tensor) -> Tensor:
        own = dict(zip(rules, columns[: len(rules)], strict=True))
        return draw_edited_static(logits, Edits(*columns[len(rules) :]), **own)

    return of_columns, (logits, *rules.values(), *edits), draw_edited(logits, edits, **rules)


@pytest.mark.parametrize("case", [keyed_case, drawn_case, edited_case])
def test_a_graph_holds_only_what_converts(
    case: Callable[[], tuple[Callable[..., Tensor], tuple[Tensor, ...], Tensor]],
) -> None:
    function, arguments, wanted = case()
    graph = make_fx(function)(*arguments)
    assert torch.equal(graph(*arguments), wanted)
    found = {str(node.target).removeprefix("aten.") for node in graph.graph.nodes if node.op == "call_function"}
    assert "bitwise_and.Tensor" in found
    assert not (found | {name.split(".")[0] for name in found}) & FORBIDDEN
