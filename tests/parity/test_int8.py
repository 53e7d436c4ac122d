"""int8 against its definition, to the last bit; against the float model within a bound; and over batches and layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from longcat_pd import kernels
from longcat_pd.config.schema import ParallelConfig
from longcat_pd.kernels.reference import int8
from longcat_pd.quantize import quantize
from longcat_pd.tiny.configs import VARIANTS
from tests.parity.conftest import MakeCheckpoint
from tests.parity.oracle import read_checkpoint, some_tokens
from tests.parity.single import SingleProcess
from tests.parity.test_kernels import randn
from tests.parity.test_ranks import NUM_DECODED, check_alone, check_equal

OPS = kernels.load("cpu")
TYPES = [torch.float32, torch.bfloat16]

# Of the logits' norm, for the small random checkpoints. A sparse selection that flips counts with its whole effect.
FAR = {"2.0": 0.12, "lite-sparse": 0.12, "lite": 0.04, "chat": 0.04}
AGREED = 0.85  # of the arg-max tokens


@pytest.fixture(scope="module")
def int8_of(tiny: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The small checkpoint of a variant, converted."""
    made: dict[str, Path] = {}

    def convert(variant: str) -> Path:
        if variant not in made:
            made[variant] = tmp_path_factory.mktemp("int8") / variant
            quantize(tiny(variant), made[variant])
        return made[variant]

    return convert


def weights_of(*shape: int, seed: int) -> Tensor:
    return torch.randint(-128, 128, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int8)


def scales_of(*shape: int, seed: int) -> Tensor:
    return 0.001 + 0.01 * torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def naive(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """Number by number: Python's integers for the sums, single fp32 operations for the rest."""
    out = torch.empty(x.shape[0], weight.shape[0])
    for t, row in enumerate(x.float()):
        step = torch.stack([number.abs() for number in row]).max() / torch.tensor(127.0)
        row_q = [0 if step == 0 else max(-127, min(127, round(float(number / step)))) for number in row]
        for o, weights in enumerate(weight.tolist()):
            total = sum(a * b for a, b in zip(row_q, weights, strict=True))
            out[t, o] = torch.tensor(total, dtype=torch.int32).float() * step * scale[o]
    return out.to(x.dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("num_rows", "width", "columns"), [(1, 40, 7), (3, 33, 5), (17, 64, 16), (0, 8, 4)])
def test_linear_is_its_definition(num_rows: int, width: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, scale = randn(num_rows, width, dtype=dtype), weights_of(columns, width, seed=1), scales_of(columns, seed=2)
    if num_rows > 2:
        x[1] = 0
        x[2] *= 1e30
    got = OPS.linear_int8(x, weight, scale)
    assert got.dtype == dtype
    assert torch.equal(got, naive(x, weight, scale))


def test_halves_round_to_even_and_the_largest_is_127() -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -126.5]])
    values, scale = int8.quantise(x)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2, -126]] and scale.tolist() == [[1.0]]


@pytest.mark.parametrize("width", [1, 64, 1000, 12288, int8.MAX_WIDTH])
@pytest.mark.parametrize("has_library", [True, False])
def test_sums_are_exact_up_to_the_last_bit_of_an_int32(
    width: int, has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Largest numbers of one sign, and of both; with the processor's product and with the one for other devices."""
    if not has_library:
        monkeypatch.setattr(int8, "_has_exact_product", lambda: False)
    x = torch.full((2, width), 127, dtype=torch.int8)
    x[1, ::2] = -127
    weight = torch.full((3, width), -128, dtype=torch.int8)
    weight[1] = 127
    weight[2, ::2] = 127
    assert torch.equal(int8.integer_product(x, weight).long(), x.long() @ weight.long().t())


def test_a_row_that_is_not_finite_shows() -> None:
    x = randn(3, 16)
    x[0, 3], x[1, 3] = torch.nan, torch.inf
    got = OPS.linear_int8(x, weights_of(5, 16, seed=1), scales_of(5, seed=2))
    assert not got[:2].isfinite().any() and got[2].isfinite().all()


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("parts", ["both", "gate_up", "down"])
@pytest.mark.parametrize("num_rows", [0, 1, 30])
def test_grouped_experts_are_the_linear_maps_of_each(num_rows: int, parts: str, dtype: torch.dtype) -> None:
    experts, hidden, width = 5, 24, 16
    x, weights = randn(num_rows, hidden, dtype=dtype), randn(num_rows, 3, seed=3)
    draw = torch.Generator().manual_seed(num_rows)
    ids = torch.stack([torch.randperm(8, generator=draw)[:3] for _ in range(num_rows)]) if num_rows else weights.long()
    gate_up, gate_up_scale = weights_of(experts, 2 * width, hidden, seed=4), scales_of(experts, 2 * width, seed=5)
    down, down_scale = weights_of(experts, hidden, width, seed=6), scales_of(experts, hidden, seed=7)
    given: dict[str, Tensor | None] = {
        "gate_up": gate_up,
        "gate_up_scale": gate_up_scale,
        "down": down,
        "down_scale": down_scale,
    }
    if parts == "down":
        given |= {"gate_up": randn(experts, hidden, 2 * width, seed=8, dtype=dtype), "gate_up_scale": None}
    if parts == "gate_up":
        given |= {"down": randn(experts, width, hidden, seed=8, dtype=dtype), "down_scale": None}

    def times(rows: Tensor, name: str, e: int) -> Tensor:
        weight, scale = given[name], given[f"{name}_scale"]
        assert weight is not None
        return OPS.linear(rows, weight[e]) if scale is None else OPS.linear_int8(rows, weight[e], scale[e])

    wanted = torch.zeros(num_rows, hidden)
    for t in range(num_rows):
        for k in sorted(range(3), key=lambda k: int(ids[t, k])):
            if ids[t, k] < experts:
                e = int(ids[t, k])
                product = times(OPS.swiglu(times(x[t : t + 1], "gate_up", e)), "down", e)
                wanted[t] += product[0].float() * weights[t, k]
    got = OPS.grouped_experts(x, ids, weights=weights, **given)  # type: ignore[arg-type]
    assert torch.equal(got, wanted)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("width", "columns"), [(96, 64), (1024, 1024), (33, 3)])
def test_a_row_has_the_same_bits_in_every_batch(width: int, columns: int, dtype: torch.dtype) -> None:
    x, weight, scale = randn(300, width, dtype=dtype), weights_of(columns, width, seed=1), scales_of(columns, seed=2)
    whole = OPS.linear_int8(x, weight, scale)
    for start, end in [(0, 1), (7, 8), (3, 8), (100, 117), (0, 64), (250, 300)]:
        assert torch.equal(OPS.linear_int8(x[start:end], weight, scale), whole[start:end]), (start, end)


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")  # inductor's own import
def test_a_compiled_execution_gives_the_same_bits() -> None:
    """Fused, other vectors, another exponential, another order of sums: nothing of it may reach what is quantised."""
    steady = kernels.load("cpu", is_steady=True)
    width = 999
    x, delta, weight, bias = (
        randn(*shape, seed=s) for s, shape in enumerate([(60, width), (60, width), (width,), (width,)])
    )
    gates, logits, heads = randn(60, 2 * width, seed=4) * 3, randn(60, 37, seed=5) * 2, randn(60, 3, 10, seed=6)
    cos, sin = randn(60, 5, seed=7).cos(), randn(60, 5, seed=7).sin()
    rotation = torch.stack((torch.stack((cos, cos), -1), torch.stack((-sin, sin), -1)))

    def execute() -> list[Tensor]:
        total, normed = steady.add_rms_norm(x, delta, weight=weight, eps=1e-5)
        ids, weights = steady.route_topk(logits, logits[0] * 0.01, topk=6, factor=2.5, is_normalized=True)
        alone = steady.rms_norm(x, weight, 1e-5)
        layer = steady.layer_norm(total, weight, bias=bias, eps=1e-5)
        turned = [steady.rope(heads, rotation, is_interleaved=how) for how in (True, False)]
        inner = steady.swiglu(gates)
        quantised = [part for rows in (normed, inner) for part in int8.quantise(rows)]
        return [total, normed, ids, weights, alone, layer, *turned, inner, *quantised]

    compiled = torch.compile(execute, backend="inductor", dynamic=False)
    for number, (got, wanted) in enumerate(zip(compiled(), execute(), strict=True)):
        assert torch.equal(got, wanted), f"result {number}: {int((got != wanted).sum())} of {wanted.numel()} differ"


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_converted_model_says_nearly_what_the_float_model_says(
    variant: str, tiny: MakeCheckpoint, int8_of: Callable[[str], Path]
) -> None:
    tokens = some_tokens(120, seed=1)
    plain, small = SingleProcess(tiny(variant)), SingleProcess(int8_of(variant))
    wanted, got = (single.step((single.admit(tokens), len(tokens)))[0] for single in (plain, small))
    assert not torch.equal(got, wanted)
    distance, agreed = (
        float((got - wanted).norm() / wanted.norm()),
        float((got.argmax(-1) == wanted.argmax(-1)).float().mean()),
    )
    assert distance < FAR[variant], distance
    assert agreed >= AGREED, agreed


def test_a_scale_decides(tiny: MakeCheckpoint, int8_of: Callable[[str], Path]) -> None:
    """Without its scales the model would say something else altogether: they are not a detail that a bound hides."""
    _, tensors = read_checkpoint(int8_of("chat"))
    single = SingleProcess(int8_of("chat"))
    tokens = some_tokens(20)
    before = single.step((single.admit(tokens), 20))[0]
    experts = next(layer.moe for layer in single.model.stack.layers)
    assert torch.equal(experts.down_scale[3], tensors["model.layers.0.mlp.experts.3.down_proj.weight_scale"][:, 0])
    with torch.inference_mode():
        experts.down_scale.mul_(1.5)
    after = single.step((single.admit(tokens), 20))[0]
    assert float((after - before).norm() / before.norm()) > 0.05


def test_pipeline_and_context_ranks_say_what_one_says(int8_of: Callable[[str], Path]) -> None:
    check_equal(int8_of("2.0"), ParallelConfig(pp_size=2, cp_size=2, layers_per_stage=(1, 2)), 0)


@pytest.mark.parametrize("variant", ["2.0", "chat"])
def test_decode_ranks_say_what_one_says(int8_of: Callable[[str], Path], variant: str) -> None:
    check_equal(int8_of(variant), ParallelConfig(kvp_size=2, attn_tp_size=2), NUM_DECODED)


@pytest.mark.parametrize("variant", ["2.0", "lite"])
def test_company_and_chunks_do_not_matter(int8_of: Callable[[str], Path], variant: str) -> None:
    check_alone(int8_of(variant))
