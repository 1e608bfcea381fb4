"""Every form of dynamic FP8 quantisation in plain torch, and our own op: fused, with eager's bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gdn_backend.ops.fp8_quant import fp8_quant
from gdn_backend.ops.spec import QuantSpec
from tests.graph.harness import Outcome, assert_fused, run
from tests.graph.sites import FP8, make_inputs, make_weight, site

BOTH = {"result": lambda c: (c.codes, c.scale)}
FNUZ = torch.float8_e4m3fnuz
MULTIPLIED = {"scaled": lambda c: c.data * (1.0 / c.scale)}

FORMS: dict[str, dict[str, Any]] = {
    "max(dim)[0]": {"amax": lambda c: c.magnitude.max(dim=-1, keepdim=True)[0]},
    "max(dim).values": {"amax": lambda c: c.magnitude.max(-1, keepdim=True).values},
    "torch.max without keepdim": {"amax": lambda c: torch.max(c.magnitude, -1)[0].unsqueeze(-1)},
    "amax(dim=2)[..., None]": {"amax": lambda c: c.magnitude.amax(dim=2)[..., None]},
    "amax((-1,), True)": {"amax": lambda c: torch.amax(c.magnitude, (-1,), True)},
    "float().abs()": {"magnitude": lambda c: c.groups.float().abs()},
    "abs().float()": {"magnitude": lambda c: torch.abs(c.groups).float()},
    "in bf16 up to the scale": {"wide": lambda c: c.amax, "scale": lambda c: c.unfloored.clamp(min=1e-10).float()},
    "a bf16 scale": {"wide": lambda c: c.amax, "scale": lambda c: c.unfloored},
    "a bf16 scale and quotient": {"wide": lambda c: c.amax, "scale": lambda c: c.unfloored, "data": lambda c: c.groups},
    "narrow data": {"data": lambda c: c.groups},
    "floor on the amax": {"unfloored": lambda c: c.wide.clamp(min=1e-4), "scale": lambda c: c.unfloored / 448.0},
    "floor in bf16": {"wide": lambda c: c.amax.clamp(min=1e-10).float()},
    "clamp_min": {"scale": lambda c: c.unfloored.clamp_min(1e-12)},
    "clip": {"scale": lambda c: torch.clip(c.unfloored, 1e-12)},
    "clamp(min, max)": {"scale": lambda c: c.unfloored.clamp(1e-6, 1e-3)},
    "no floor": {"scale": lambda c: c.unfloored},
    "amax + eps": {"scale": lambda c: c.unfloored, "unfloored": lambda c: (c.wide + 1e-8) / 448.0},
    "amax * (1 / 448)": {"unfloored": lambda c: c.wide * (1.0 / 448.0)},
    "torch.div": {"unfloored": lambda c: torch.div(c.wide, 448.0), "scaled": lambda c: c.data.div(c.scale)},
    "aten": {"unfloored": lambda c: torch.ops.aten.div.Scalar(c.wide, 448.0)},
    "times 1 / s": MULTIPLIED,
    "times reciprocal()": {"scaled": lambda c: c.scale.reciprocal() * c.data},
    "448 / amax, returned": {
        "unfloored": lambda c: c.wide.clamp(min=1e-4),
        "scale": lambda c: 448.0 / c.unfloored,
        "scaled": lambda c: c.data * c.scale,
    },
    "divided by a floored scale, the unfloored stored": {
        "scale": lambda c: c.unfloored,
        "scaled": lambda c: c.data / c.scale.clamp(min=1e-12),
    },
    "power of two": {"scale": lambda c: torch.exp2(torch.ceil(torch.log2(c.unfloored.clamp(min=1e-10))))},
    "no clamp": {"clamped": lambda c: c.scaled},
    "clamp in two halves": {"clamped": lambda c: c.scaled.clamp(min=-448.0).clamp_max(448.0)},
    "clamp by keywords": {"clamped": lambda c: torch.clamp(c.scaled, max=448, min=-448)},
    "clamp_": {"clamped": lambda c: c.scaled.clamp_(-448.0, 448.0)},
    ".type(fp8)": {"codes": lambda c: c.clamped.type(FP8)},
    ".to(dtype=fp8)": {"codes": lambda c: c.clamped.to(dtype=FP8)},
    "div_ and clamp_min_": {
        "unfloored": lambda c: c.wide.div_(448.0),
        "scale": lambda c: c.unfloored.clamp_min_(1e-12),
    },
    "all in place": {"scaled": lambda c: c.data.div_(c.scale), "clamped": lambda c: c.scaled.clamp_(-448.0, 448.0)},
    "clamp(min=1e-12) in place, read by its first name": {
        "scale": lambda c: (c.unfloored.clamp_(min=1e-12), c.unfloored)[1],
    },
    "the scale expanded": {"scaled": lambda c: c.data / c.scale.expand_as(c.data)},
    "1 / the scale expanded": {"scaled": lambda c: c.data * (1.0 / c.scale.expand(-1, -1, 128))},
    "the scale expanded, and clamped then": {"scaled": lambda c: c.data / c.scale.expand_as(c.data).clamp(min=1e-12)},
    "the expanded scale is read too": {
        "scaled": lambda c: c.data * c.scale.expand_as(c.data).reciprocal(),
        "result": lambda c: (c.codes, c.scale.expand(-1, -1, 128).reciprocal()),
    },
    "flat groups": {"groups": lambda c: c.rows.reshape(-1, 128)},
    "unflatten": {"groups": lambda c: c.rows.unflatten(-1, (-1, 128))},
    "4-D groups": {"groups": lambda c: c.rows.view(-1, 1, 4, 128)},
    "straight from the heads": {"rows": lambda c: c.y, "groups": lambda c: c.y.view(-1, 4, 128)},
    "a long chain of reshapes": {
        "rows": lambda c: c.y.view(-1, 4, 128).flatten(1).unsqueeze(0).reshape(-1, 512).contiguous(),
    },
    "axes of one moved": {"rows": lambda c: c.y.reshape(-1, 1, 512).transpose(0, 1).squeeze(0)},
    "codes and scales as [1, T, ...]": {"result": lambda c: (c.codes.unsqueeze(0), c.scale.squeeze(-1)[None])},
    "codes alone": {"result": lambda c: c.codes},
    "two scales": {"result": lambda c: (c.codes, c.scale, c.unfloored)},
    "shapes are read": {"result": lambda c: (c.codes.view(c.y.size(0) // 4, c.rows.shape[-1]), c.scale)},
    "e4m3fnuz at 240": {
        "unfloored": lambda c: c.wide / 240.0,
        "clamped": lambda c: c.scaled.clamp(-240.0, 240.0),
        "codes": lambda c: c.clamped.to(FNUZ),
    },
    "e4m3fnuz at 224": {
        "unfloored": lambda c: c.wide / 224.0,
        "clamped": lambda c: c.scaled.clamp(-224.0, 224.0),
        "codes": lambda c: c.clamped.to(FNUZ),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    assert_fused(run(site(BOTH, FORMS[name]), *make_inputs()))


NARROW_SCALES: dict[str, Any] = {
    "+ 1e-3": lambda m: m + 1e-3,
    "- 1e-3": lambda m: m - 1e-3,
    "* (1 / 448)": lambda m: m * (1 / 448.0),
    "/ 447": lambda m: m / 447.0,
    "clamp(1e-10)": lambda m: m.clamp(min=1e-10),
    "clamp(1e-3, 3.3)": lambda m: m.clamp(1e-3, 3.3),
    "reciprocal": lambda m: m.reciprocal(),
    "447 / m": lambda m: 447.0 / m,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NARROW_SCALES)
def test_a_step_in_a_narrow_dtype_rounds_as_eager_does(name: str, dtype: torch.dtype) -> None:
    narrow = {
        "wide": lambda c: c.amax,
        "unfloored": lambda c: NARROW_SCALES[name](c.amax),
        "scale": lambda c: c.unfloored,
        "scaled": lambda c: c.data / c.scale.float(),
    }
    assert_fused(run(site(BOTH, narrow, dtype=dtype), *make_inputs(8, dtype=dtype)))


@pytest.mark.parametrize(("heads", "head_dim"), [(8, 64), (4, 96), (2, 256), (30, 192), (1, 128), (3, 128), (1, 512)])
def test_heads_and_groups_of_any_sizes(heads: int, head_dim: int) -> None:
    hidden = heads * head_dim
    sizes = {"rows": lambda c: c.y.reshape(-1, hidden), "groups": lambda c: c.rows.view(-1, hidden // 128, 128)}
    outcome = run(site(BOTH, sizes, weight=make_weight(head_dim)), *make_inputs(2, head_dim=head_dim, heads=heads))
    assert_fused(outcome)
    spec = outcome.match.spec
    assert (spec.hidden_size, spec.norm_size, spec.group_size, spec.granularity) == (hidden, head_dim, 128, "group")


@pytest.mark.parametrize("group_size", [32, 64, 256, 512])
def test_group_sizes_that_are_enabled(group_size: int) -> None:
    groups = {"groups": lambda c: c.rows.view(-1, 512 // group_size, group_size)}
    assert_fused(run(site(BOTH, groups), *make_inputs(), group_sizes=(128, group_size)))


@pytest.mark.parametrize("tokens", [1, 3, 0])
def test_one_scale_a_token(tokens: int) -> None:
    outcome = run(site(BOTH, groups=lambda c: c.rows), *make_inputs(tokens))
    assert_fused(outcome)
    spec = outcome.match.spec
    assert (spec.granularity, spec.group_size, spec.hidden_size) == ("token", 512, 512)


def own_op(group_size: int | None, quant: QuantSpec = QuantSpec(), only_codes: bool = False) -> Outcome:
    """The site with our op behind its rows."""
    unused = ("groups", "magnitude", "amax", "wide", "unfloored", "scale", "data", "scaled", "clamped", "codes")

    def result(c: Any) -> Any:
        codes, scales = fp8_quant(c.rows, group_size, quant, FP8)
        return codes if only_codes else (codes, scales)

    return run(site(dict.fromkeys(unused, lambda c: None), result=result), *make_inputs(), group_sizes=(128, 64))


@pytest.mark.parametrize("only_codes", [False, True])
@pytest.mark.parametrize("group_size", [128, 64, None])
def test_own_op(group_size: int | None, only_codes: bool) -> None:
    outcome = own_op(group_size, only_codes=only_codes)
    assert_fused(outcome)
    assert outcome.match.quant.sink == "gdn_backend::fp8_quant"
    assert outcome.match.spec.granularity == ("token" if group_size is None else "group")


def test_own_op_with_a_formula_of_its_own() -> None:
    steps = (("max", 1e-4), ("div", 448.0))
    quant = QuantSpec(scale_steps=steps, factor_steps=(("reciprocal",),), operation="multiply")
    outcome = own_op(128, quant)
    assert_fused(outcome)
    assert outcome.match.spec.quant == quant
