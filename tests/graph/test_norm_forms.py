"""Every spelling of the gated norm that means the same has to fuse, with eager's bytes (F18)."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.graph.harness import assert_fused, run
from tests.graph.sites import GATE_FIRST, ONE_ROUNDING, make_inputs, make_weight, site

RETURNED = {"result": lambda c: (c.codes, c.scale)}

#: One step of the base in another spelling.
SPELLINGS: dict[str, dict[str, Any]] = {
    "x.to(float32)": {"h": lambda c: c.x.to(torch.float32)},
    "x.to(dtype=float32)": {"h": lambda c: c.x.to(dtype=torch.float32)},
    "x.type(float32)": {"h": lambda c: c.x.type(torch.float32)},
    "x.to(other tensor)": {"h": lambda c: c.x.to(torch.zeros(1))},
    "x.contiguous().float()": {"h": lambda c: c.x.contiguous().float()},
    "h * h": {"square": lambda c: c.h * c.h},
    "torch.square": {"square": lambda c: torch.square(c.h)},
    "h.square()": {"square": lambda c: c.h.square()},
    "h ** 2": {"square": lambda c: c.h**2},
    "torch.pow(h, 2.0)": {"square": lambda c: torch.pow(c.h, 2.0)},
    "Tensor.mul(h, h)": {"square": lambda c: torch.Tensor.mul(c.h, c.h)},
    "aten.pow": {"square": lambda c: torch.ops.aten.pow.Tensor_Scalar(c.h, 2)},
    "aten.mul packet": {"square": lambda c: torch.ops.aten.mul(c.h, c.h)},
    "square of x widened twice": {"square": lambda c: c.x.float().pow(2)},
    "mean((-1,), True)": {"mean": lambda c: c.square.mean((-1,), True)},
    "mean(dim=[1])": {"mean": lambda c: torch.mean(c.square, dim=[1], keepdim=True)},
    "mean(axis=, keepdims=)": {"mean": lambda c: c.square.mean(axis=-1, keepdims=True)},
    "mean then unsqueeze": {"mean": lambda c: c.square.mean(-1).unsqueeze(-1)},
    "mean then [:, None]": {"mean": lambda c: c.square.mean(-1)[:, None]},
    "sum / 128": {"mean": lambda c: c.square.sum(-1, keepdim=True) / 128},
    "sum * (1 / 128)": {"mean": lambda c: c.square.sum(-1, keepdim=True) * (1 / 128)},
    "eps + mean": {"variance": lambda c: 1e-6 + c.mean},
    "torch.add": {"variance": lambda c: torch.add(c.mean, 1e-6)},
    "mean.add_(eps)": {"variance": lambda c: c.mean.add_(1e-6)},
    "mean += eps": {"variance": lambda c: operator.iadd(c.mean, 1e-6)},
    "mean - (-eps)": {"variance": lambda c: c.mean - (-1e-6)},
    "variance.rsqrt()": {"root": lambda c: c.variance.rsqrt()},
    "variance.rsqrt_()": {"root": lambda c: c.variance.rsqrt_()},
    "pow(-0.5)": {"root": lambda c: c.variance.pow(-0.5)},
    "1 / sqrt": {"root": lambda c: 1.0 / torch.sqrt(c.variance)},
    "torch.div(1, sqrt)": {"root": lambda c: torch.div(1.0, torch.sqrt(c.variance))},
    "sqrt().reciprocal()": {"root": lambda c: c.variance.sqrt().reciprocal()},
    "pow(0.5).pow(-1)": {"root": lambda c: c.variance.pow(0.5).pow(-1)},
    "root * h": {"norm": lambda c: c.root * c.h},
    "torch.mul(h, root)": {"norm": lambda c: torch.mul(c.h, c.root)},
    "h.multiply(root)": {"norm": lambda c: c.h.multiply(c.root)},
    "root expanded": {"norm": lambda c: c.h * c.root.expand_as(c.h)},
    "root expanded by sizes": {"norm": lambda c: c.root.expand(-1, 128) * c.h},
    "h.mul_(root)": {"norm": lambda c: c.h.mul_(c.root)},
    "x in bfloat16 times root": {"norm": lambda c: c.x * c.root},
    "norm.bfloat16()": {"narrow": lambda c: c.norm.bfloat16()},
    "norm.type_as(x)": {"narrow": lambda c: c.norm.type_as(c.x)},
    "n * w": {"weighted": lambda c: c.narrow * c.w},
    "w expanded": {"weighted": lambda c: c.w.expand_as(c.narrow) * c.narrow},
    "w broadcast": {"weighted": lambda c: torch.broadcast_to(c.w, (12, 128)) * c.narrow},
    "w.view(1, -1)": {"weighted": lambda c: c.w.view(1, -1) * c.narrow},
    "(w * n) in fp32 rounded once": {
        "narrow": lambda c: c.norm,
        "weighted": lambda c: (c.w * c.norm).to(torch.bfloat16),
    },
    "w.float()": {"weighted": lambda c: c.w.float() * c.narrow},
    "1 + w": {"weighted": lambda c: (1 + c.w) * c.narrow},
    "(w + 1) in fp32": {"weighted": lambda c: c.narrow * (c.w.float() + 1.0)},
    "no weight": {"weighted": lambda c: c.narrow},
    "bias": {"weighted": lambda c: c.w * c.narrow + c.more[0]},
    "bias + 1": {"weighted": lambda c: (c.more[0] + 1.0) + c.narrow * c.w},
    "activated * weighted": {"product": lambda c: c.activated * c.weighted},
    "weighted.mul_(activated)": {
        "weighted": lambda c: c.w.float() * c.narrow,
        "product": lambda c: c.weighted.mul_(c.activated),
    },
    "nn.Dropout() in eval mode": {"y": lambda c: nn.Dropout(0.1).eval()(c.product.to(c.x.dtype))},
    "nn.SiLU()": {"activated": lambda c: nn.SiLU()(c.gate)},
    "aten.silu": {"activated": lambda c: torch.ops.aten.silu.default(c.gate)},
    "silu of a copy in place": {"activated": lambda c: F.silu(c.gate.clone(), inplace=True)},
    "silu in bfloat16": {"gate": lambda c: c.z},
    "silu rounded": {"activated": lambda c: F.silu(c.gate).to(torch.bfloat16)},
    "sigmoid": {"activated": lambda c: torch.sigmoid(c.gate)},
    "gate.sigmoid()": {"activated": lambda c: c.gate.sigmoid()},
    "nn.Sigmoid()": {"activated": lambda c: nn.Sigmoid()(c.gate)},
    "no rounding at the end": {"y": lambda c: c.product},
    "y.type_as(x)": {"y": lambda c: c.product.type_as(c.x)},
    "one rounding": ONE_ROUNDING,
    "gate first": GATE_FIRST,
    "gate first, rounded": {**GATE_FIRST, "h": lambda c: (c.x * F.silu(c.z.float())).to(torch.bfloat16).float()},
    "gate first, sigmoid": {**GATE_FIRST, "h": lambda c: torch.sigmoid(c.z.float()) * c.x.float()},
    "detached": {"h": lambda c: c.x.detach().float(), "gate": lambda c: c.z.detach().float()},
    "x is also the gate": {"gate": lambda c: c.x.float()},
    "the norm is also the gate": {"gate": lambda c: c.narrow.float()},
}  # fmt: skip


@pytest.mark.field_case("F18")
@pytest.mark.parametrize("name", SPELLINGS)
def test_spelling(name: str) -> None:
    keeps = ("rsqrt", "mean") if name == "the norm is also the gate" else ()
    outcome = run(site(RETURNED, SPELLINGS[name]), *make_inputs(), torch.rand(128).bfloat16())
    assert_fused(outcome, keeps=keeps)


def test_a_rounding_that_differs_is_its_own_flag() -> None:
    base = run(site(), *make_inputs()).match.spec.roundings
    assert base == ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
    assert run(site(ONE_ROUNDING), *make_inputs()).match.spec.roundings == ("output:bfloat16",)
    narrow_gate = run(site(gate=lambda c: c.z), *make_inputs()).match.spec
    assert narrow_gate.roundings == ("activation:bfloat16", *base)
    offset = run(site(weighted=lambda c: (1 + c.w) * c.narrow), *make_inputs()).match.spec
    assert (offset.weight_offset, offset.roundings) == (1.0, (base[0], "offset:bfloat16", *base[1:]))
    fp32_offset = run(site(weighted=lambda c: (1 + c.w.float()) * c.narrow), *make_inputs()).match.spec
    assert (fp32_offset.weight_offset, fp32_offset.roundings) == (1.0, ("norm:bfloat16", "output:bfloat16"))


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes(dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    gate_dtype = torch.bfloat16 if dtype is torch.float16 else None
    assert_fused(run(site(weight=make_weight(dtype=weight_dtype)), *make_inputs(dtype=dtype, gate_dtype=gate_dtype)))


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1e-2, 3.0, -1e-9, 1])
def test_eps(eps: float) -> None:
    outcome = run(site(variance=lambda c: c.mean + eps), *make_inputs())
    assert_fused(outcome)
    assert outcome.match.norm.eps == eps


def test_no_eps_is_zero() -> None:
    outcome = run(site(variance=lambda c: c.mean), *make_inputs())
    assert_fused(outcome)
    assert outcome.match.norm.eps == 0.0


@pytest.mark.parametrize("shape", [(1, 128), (128,), (1, 1, 128)])
def test_weights_of_any_shape_that_repeats_along_the_row(shape: tuple[int, ...]) -> None:
    widened = {"h": lambda c: c.x.view(-1, 4, 128).float(), "gate": lambda c: c.z.view(-1, 4, 128).float()}
    assert_fused(run(site(widened, weight=make_weight().view(shape)), *make_inputs()))


def test_a_weight_for_each_head() -> None:
    widened = {"h": lambda c: c.x.view(-1, 4, 128).float(), "gate": lambda c: c.z.view(-1, 4, 128).float()}
    assert_fused(run(site(widened, weight=make_weight(512).view(4, 128)), *make_inputs()))


@pytest.mark.parametrize(
    "weighted", [lambda w, n: w.view(1, 1, 4, 128) * n, lambda w, n: n * (1 + w.view(1, 1, 4, 128))]
)
def test_a_weight_for_each_head_of_the_only_token(weighted: Any) -> None:
    widened = {"h": lambda c: c.x.view(1, -1, 4, 128).float(), "gate": lambda c: c.z.view(1, -1, 4, 128).float()}
    outcome = run(site(widened, weight=make_weight(512), weighted=lambda c: weighted(c.w, c.narrow)), *make_inputs(1))
    assert_fused(outcome)
    assert outcome.match.spec.hidden_size == 512


def test_a_weight_for_each_head_where_reshapes_lead_back_to_the_heads() -> None:
    """The rows of 512 are all that tells how often the weight repeats."""
    shape = -1, 4, 128
    steps = {
        "h": lambda c: c.x.view(shape).float() * F.silu(c.z.view(shape).float()),
        "weighted": lambda c: c.w.view(4, 128) * c.narrow,
        "activated": lambda c: None,
        "product": lambda c: c.weighted,
    }
    outcome = run(site(steps, weight=make_weight(512)), *make_inputs(), dynamic=True)
    assert_fused(outcome)
    assert outcome.match.spec.hidden_size == 512


def test_a_weight_of_the_shape_of_the_only_row() -> None:
    row = {"rows": lambda c: c.y, "groups": lambda c: c.y.view(1, 1, 128), "result": lambda c: (c.codes, c.scale)}
    assert_fused(run(site(row, weight=make_weight().view(1, 128)), *make_inputs(1, heads=1)))


def test_as_many_tokens_as_values_in_a_head() -> None:
    assert_fused(run(site(), *make_inputs(32)))  # [128, 128]: nothing tells the axes apart by their sizes


def test_negative_zeros_of_a_weight_survive() -> None:
    weight = torch.cat([torch.full((64,), -0.0), torch.ones(64)]).bfloat16()
    for weighted in (lambda c: c.w * c.narrow, lambda c: (c.w + 0.0) * c.narrow):
        assert_fused(run(site(weight=weight, weighted=weighted), *make_inputs()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e30, 1e-30])
def test_values_at_the_ends(value: float) -> None:
    x, z = make_inputs()
    x[0], z[5] = value, -1e4
    assert_fused(run(site(), x, z))


def test_two_sites_with_one_gate_and_one_weight() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = site()
            self.second = site(gate=lambda c: c.z.float())
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> Any:
            return self.first(x, z), self.second(y, z)

    x, z = make_inputs()
    assert_fused(run(Two(), x, x + 1, z), count=2)


def test_a_site_that_reads_the_scales_of_another() -> None:
    def model(x: torch.Tensor, z: torch.Tensor) -> Any:
        codes, scales = first(x, z)
        return codes, second(x, scales.view(-1, 4, 1).expand(-1, 4, 128).reshape(-1, 128))

    first, second = site(), site()
    assert_fused(run(model, *make_inputs()), count=2)
