"""The front of an attention by the NPU's table, fused and composed, against the reference's."""

import pytest
import torch
from torch import Tensor

from longcat_pd.kernels import NpuSettings, Ops, load
from longcat_pd.kernels.npu import operators, prolog
from longcat_pd.kernels.ops import PrologScales, PrologWeights
from longcat_pd.kernels.reference import table as reference_table
from longcat_pd.kernels.refusal import Unsupported
from tests.npu import device
from tests.npu.paged import noise

device.install()
OPS, REFERENCE = load("npu", npu=NpuSettings(dtype=torch.float32)), reference_table()
HEADS, HIDDEN, RANK, BLOCKS, BLOCK = 2, 1024, 1536, 5, 16
SCALES = PrologScales(eps=1e-2, kv=2.0**0.5)
FREQUENCIES = 1e4 ** -(torch.arange(0, 64, 2, dtype=torch.float64) / 64)
SLOTS = torch.tensor([33, 47, 16, 7, 3])  # the last two are padding's
CLOSE = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.bfloat16: {"rtol": 3e-2, "atol": 6e-2}}


def weights_of(dtype: torch.dtype, *, hidden: int = HIDDEN, rank: int = RANK, heads: int = HEADS) -> PrologWeights:
    return PrologWeights(
        down=noise(hidden, rank + 576, seed=1, dtype=dtype, scale=hidden**-0.5),
        q_norm=1 + noise(rank, seed=2, dtype=dtype, scale=0.1),
        q_up=noise(rank, heads * 192, seed=3, dtype=dtype, scale=rank**-0.5),
        key_up=noise(heads, 128, 512, seed=4, dtype=dtype, scale=128**-0.5),
        kv_norm=1 + noise(512, seed=5, dtype=dtype, scale=0.1),
    )


def run(
    ops: Ops, loaded: PrologWeights, dtype: torch.dtype, *, store: bool = False, scales: PrologScales = SCALES
) -> tuple[Tensor, ...]:
    """Queries, their latents, and both caches."""
    positions = torch.tensor([40, 100_000, 7, 0, 1])
    prepared = ops.prepare_prolog(loaded, scales)
    rotation = ops.rotation(positions, ops.prepare_rotation(FREQUENCIES, magnitude=1.1, dtype=dtype))
    cache = torch.zeros(BLOCKS, BLOCK, 1, 512, dtype=dtype), torch.zeros(BLOCKS, BLOCK, 1, 64, dtype=dtype)
    x = noise(5, loaded.down.shape[0], seed=6, dtype=dtype)
    given = {"weights": prepared, "slots": SLOTS, "cache": cache, "scales": scales}
    if store:
        ops.mla_store(x, rotation, **given)
        return cache
    return *ops.mla_prolog(x, rotation, **given), *cache


def apart(x: Tensor) -> Tensor:
    """Rope parts as this table keeps them: even elements, then odd ones."""
    rope = x[..., -64:]
    return torch.cat((x[..., :-64], rope[..., ::2], rope[..., 1::2]), -1)


@pytest.fixture(params=["fused", "composed"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "composed":
        monkeypatch.setattr(prolog, "has", lambda name: name != "npu_mla_prolog_v3" and operators.has(name))
    return str(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_front(form: str, dtype: torch.dtype) -> None:
    loaded = weights_of(dtype)
    q, q_lora, latent, rope = run(OPS, loaded, dtype)
    expected = run(REFERENCE, loaded, dtype)
    torch.testing.assert_close(
        (q, q_lora, latent, rope), (apart(expected[0]), expected[1], expected[2], apart(expected[3])), **CLOSE[dtype]
    )
    assert q.dtype == q_lora.dtype == dtype
    assert rope.view(-1, 64)[SLOTS].any(-1).all()
    assert not latent[BLOCKS - 1].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writing_alone(form: str, dtype: torch.dtype) -> None:
    loaded = weights_of(dtype)
    latent, rope = run(REFERENCE, loaded, dtype, store=True)
    torch.testing.assert_close(run(OPS, loaded, dtype, store=True), (latent, apart(rope)), **CLOSE[dtype])


def test_scores_of_queries_and_keys_are_those_of_pairs_in_place(form: str) -> None:
    """Whatever the order in the cache, it is that of the queries."""
    loaded = weights_of(torch.float32)
    scores = []
    for ops in (OPS, REFERENCE):
        q, _, _, rope = run(ops, loaded, torch.float32)
        scores.append(torch.einsum("thr,sr->ths", q[..., 512:], rope.view(-1, 64)[SLOTS]))
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("hidden", "rank", "heads"), [(1536, 1536, 2), (1024, 768, 2), (1024, 1536, 3)])
def test_sizes_that_the_fused_operator_refuses_are_composed(hidden: int, rank: int, heads: int) -> None:
    loaded = weights_of(torch.float32, hidden=hidden, rank=rank, heads=heads)
    assert len(OPS.prepare_prolog(loaded, SCALES)) == 7
    assert len(OPS.prepare_prolog(weights_of(torch.float32), SCALES)) == 6
    q, q_lora, latent, _ = run(OPS, loaded, torch.float32)
    expected = run(REFERENCE, loaded, torch.float32)
    torch.testing.assert_close((q, q_lora, latent), (apart(expected[0]), *expected[1:3]), rtol=1e-4, atol=1e-4)


def test_a_prolog_that_is_not_to_be_fused_is_composed() -> None:
    ops = load("npu", unfused=("prolog",), npu=NpuSettings(dtype=torch.float32))
    loaded = weights_of(torch.float32)
    assert len(ops.prepare_prolog(loaded, SCALES)) == 7
    q, q_lora, latent, rope = run(ops, loaded, torch.float32)
    expected = run(REFERENCE, loaded, torch.float32)
    wanted = (apart(expected[0]), expected[1], expected[2], apart(expected[3]))
    torch.testing.assert_close((q, q_lora, latent, rope), wanted, **CLOSE[torch.float32])


@pytest.mark.parametrize("part", ["attention", "experts", "norms"])
def test_twins_that_want_weights_and_rotations_as_they_are_loaded_are_refused(part: str) -> None:
    with pytest.raises(Unsupported, match=rf"engine\.unfused=\['{part}'\]") as found:
        load("npu", unfused=("prolog", part))
    assert found.value.param == "engine.unfused"


@pytest.mark.parametrize("number", [2, 4])
def test_other_widths_are_refused_at_start(number: int) -> None:
    loaded = list(weights_of(torch.float32))
    loaded[3] = torch.zeros(HEADS, 64, 512)
    with pytest.raises(Unsupported, match="nope 64"):
        OPS.prepare_prolog(PrologWeights(*loaded), SCALES)


def test_no_rows(form: str) -> None:
    prepared = OPS.prepare_prolog(weights_of(torch.float32), SCALES)
    cache = torch.zeros(BLOCKS, BLOCK, 1, 512), torch.zeros(BLOCKS, BLOCK, 1, 64)
    given = {"weights": prepared, "slots": SLOTS[:0], "cache": cache, "scales": SCALES}
    rotation = torch.zeros(4, 0, 64)
    q, q_lora = OPS.mla_prolog(torch.zeros(0, HIDDEN), rotation, **given)
    assert (q.shape, q_lora.shape) == ((0, HEADS, 576), (0, RANK))
    OPS.mla_store(torch.zeros(0, HIDDEN), rotation, **given)
