from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longcat_pd.models.batch import Rows
from longcat_pd.models.moe import MixtureOfExperts
from tests.unit.stage import make_context


def experts(*overrides: str, favoured: slice) -> MixtureOfExperts:
    """Random weights; the router's bias makes every row choose among ``favoured``."""
    made = MixtureOfExperts(make_context("chat", *overrides), "m")
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=draw))
        made.router.bias.fill_(-10.0)[favoured] = 10.0
    return made


ZERO = slice(16, 20)  # of 16 routed and 4 zero experts, all 4 are chosen
X = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
ROWS = Rows.even(5, 1)


def weights(made: MixtureOfExperts) -> Tensor:
    return torch.softmax(X @ made.router.classifier.weight, -1)


def test_zero_experts_return_their_input_times_weight_times_factor() -> None:
    made = experts(favoured=ZERO)
    wanted = X * 2.5 * weights(made)[:, ZERO].sum(-1, keepdim=True)
    torch.testing.assert_close(made(X, ROWS), wanted)


def test_the_bias_decides_the_choice_but_not_the_weight() -> None:
    made = experts("moe_topk=2", favoured=slice(3, 5))
    wanted = torch.zeros_like(X)
    for e in (3, 4):
        gate, up = (X @ made.gate_up[e]).chunk(2, -1)
        wanted += 2.5 * weights(made)[:, e : e + 1] * ((gate * torch.sigmoid(gate) * up) @ made.down[e])
    torch.testing.assert_close(made(X, ROWS), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kind", "times"), [("copy", 4.0), ("drop", 0.0)])
def test_zero_experts_of_older_releases(kind: str, times: float) -> None:
    torch.testing.assert_close(experts(f"zero_expert_type={kind}", favoured=ZERO)(X, ROWS), X * times)


def test_renormalised_weights_sum_to_the_factor() -> None:
    torch.testing.assert_close(experts("norm_topk_prob=true", favoured=ZERO)(X, ROWS), X * 2.5)


def test_no_rows() -> None:
    assert experts(favoured=ZERO)(X[:0], Rows.even(0, 1)).shape == (0, 96)
    assert experts(favoured=slice(0, 4))(X[:0], Rows.even(0, 1)).shape == (0, 96)


def test_the_router_computes_in_fp32_for_a_bf16_model() -> None:
    made = MixtureOfExperts(make_context("chat", dtype=torch.bfloat16), "m")
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.zero_()
        made.router.classifier.weight[0] = torch.linspace(1.0, 1.001, 20)  # equal in bf16
    x = torch.zeros(1, 96, dtype=torch.bfloat16)
    x[0, 0] = 1.0
    ids, _ = made.router(x)
    assert sorted(ids[0].tolist()) == [16, 17, 18, 19]
    assert made(x, Rows.even(1, 1)).dtype == torch.bfloat16
