"""Faults that were met in the field in work like this, each with its kind; the id stands before the test's name.

Those that a graph cannot show are tested where they belong, under ``pytest.mark.field_case("F16")`` and so on: options,
disk caches, AITER's import, GPUs. ``test_every_case_has_a_test`` knows them all.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gdn_backend
from gdn_backend.fusion.match import Reason
from tests.graph.harness import Outcome, assert_equals_eager, assert_fused, assert_missed, run
from tests.graph.sites import BASE, FP8, GATE_FIRST, ONE_ROUNDING, Site, Values, make_inputs, make_weight, site

FIELD_CASES = (1, 2, 3, 4, 5, 7, 8, 9, 10, 11, 13, 14, 15, 16, 18, 20, 22, 23, 24, 25, 26, 28, 30, 32, 34)
FNUZ = torch.float8_e4m3fnuz

field_case = pytest.mark.field_case


def test_every_case_has_a_test() -> None:
    files = Path(__file__).parents[1].rglob("test_*.py")
    found = {int(number) for file in files for number in re.findall(r'field_case\("F(\d+)"\)', file.read_text())}
    assert found == set(FIELD_CASES)


def fuse(*changes: dict[str, Any], tokens: int = 3, heads: int = 4, head_dim: int = 128, **steps: Any) -> Outcome:
    """A variation of the base that has to fuse, to eager's bytes."""
    inputs = make_inputs(tokens, heads=heads, head_dim=head_dim)
    outcome = run(site(*changes, weight=make_weight(head_dim), **steps), *inputs)
    assert_fused(outcome)
    return outcome


def miss(reason: Reason, at: str, *changes: dict[str, Any], tokens: int = 3, **steps: Any) -> None:
    """A variation of the base that has to be missed, for a reason that names a node."""
    assert_missed(run(site(*changes, **steps), *make_inputs(tokens)), reason, at)


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


class WithState(Site):
    """The base between writes whose results nobody uses."""

    def __init__(self, write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__(BASE, make_weight())
        self.register_buffer("state", torch.zeros(12, 128))
        self.register_buffer("count", torch.zeros(12, 128))
        self.write = write

    def forward(self, x: torch.Tensor, z: torch.Tensor, *more: Any) -> Any:
        self.write(self.state, x.float())
        results = super().forward(x, z, *more)
        self.write(self.count, z.float())
        return results


def _set_rows(tensor: torch.Tensor, value: Any) -> None:
    tensor[:2] = value


UNUSED_WRITES: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "copy_": lambda state, new: state.copy_(new),
    "add_": lambda state, new: state.add_(1),
    "mul_ of a view": lambda state, new: state[1:].view(-1).mul_(2).add_(1),
    "setitem": lambda state, new: _set_rows(state, new[:2]),
    "+=": operator.iadd,
    "out=": lambda state, new: torch.mul(new, 2.0, out=state),
    "silu(inplace)": lambda state, new: F.silu(state.add_(new), inplace=True),
    "foreach": lambda state, new: torch._foreach_add_([state], 1.0),
}


@field_case("F1")
@pytest.mark.parametrize("name", UNUSED_WRITES)
def test_f1_writes_whose_results_nobody_uses_stay(name: str) -> None:
    outcome = run(WithState(UNUSED_WRITES[name]), *make_inputs())
    assert_fused(outcome, keeps=("silu",))  # and the buffers, which are compared with eager's too
    assert sum(node.op == "placeholder" for node in outcome.nodes()) == 5


WRITES: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_(0)": lambda t: t.mul_(0),
    "a view": lambda t: t.view(-1)[3:200].zero_(),
    "a view of a view": lambda t: t.unsqueeze(0).transpose(0, -1)[:5].squeeze(-1).add_(1),
    "copy_": lambda t: t.copy_(t.flip(0)),
    "setitem": lambda t: _set_rows(t, 1.0),
    "out=": lambda t: torch.add(t, 1, out=t),
    "detached": lambda t: t.detach().neg_(),
    "foreach": lambda t: torch._foreach_mul_([t], 2.0),
}
#: The tensor written to, and the step behind which; the site reads it again, or its old value, behind that.
PLACES = (("x", "h"), ("x", "narrow"), ("z", "weighted"), ("z", "activated"), ("w", "narrow"), ("y", "rows"))


def _written(target: str, after: str, write: Callable[[torch.Tensor], Any]) -> dict[str, Any]:
    def step(c: Values) -> Any:
        value = BASE[after](c)
        write(getattr(c, target))
        return value

    return {after: step}


@field_case("F2")
@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize(("target", "after"), PLACES)
def test_f2_a_write_inside_the_site(name: str, target: str, after: str) -> None:
    weight = make_weight().requires_grad_(False)
    outcome = run(site(_written(target, after, WRITES[name]), weight=weight), *make_inputs())
    assert_equals_eager(outcome)
    for found in outcome.passes.misses:
        assert found.reason in (Reason.MUTATION, Reason.SHARED_INTERMEDIATE)
        assert found.node is not None
        assert found.advice
    assert len(outcome.passes.matches) + len(outcome.passes.misses) <= 1


@field_case("F2")
def test_f2_the_write_is_named() -> None:
    outcome = run(site(_written("z", "narrow", WRITES["mul_(0)"])), *make_inputs())
    assert_equals_eager(outcome)
    outcome = run(site(_written("z", "activated", WRITES["mul_(0)"])), *make_inputs())
    assert_missed(outcome, Reason.MUTATION, "mul_")


@field_case("F3")
def test_f3_every_rounding_is_repeated() -> None:
    outcome = fuse(tokens=64)
    assert outcome.match.spec.roundings == ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")


@field_case("F4")
@pytest.mark.parametrize("changes", [{}, {"weighted": lambda c: (c.w.float() + 1) * c.narrow}], ids=["w", "w + 1"])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.bfloat16)])
def test_f4_each_in_its_own_dtype(changes: Any, weight_dtype: torch.dtype, dtypes: tuple[Any, Any]) -> None:
    model = site(changes, weight=make_weight(dtype=torch.float32).add(1e-3).to(weight_dtype))
    outcome = run(model, *make_inputs(3, *dtypes))
    assert_fused(outcome)
    for node in outcome.nodes():
        assert node.name != "w" or node.meta["example_value"].dtype == weight_dtype


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the end of a packed projection": lambda t: torch.cat([t + 1, t - 1, t], -1)[..., 256:],
    "every other row": lambda t: torch.stack([t, t + 1], 1)[:, 0],
    "transposed": lambda t: t.t().contiguous().t(),
    "one row for all": lambda t: t[:1].expand(t.shape),
}


@field_case("F5")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["x", "z", "both"])
def test_f5_inputs_that_are_not_contiguous(layout: str, which: str) -> None:
    x, z = make_inputs()
    lay_out = LAYOUTS[layout]
    x, z = lay_out(x) if which != "z" else x, lay_out(z) if which != "x" else z
    assert_fused(run(site(rows=lambda c: c.y.reshape(-1, 512)), x, z))


@field_case("F5")
def test_f5_a_gate_inside_a_packed_projection() -> None:
    def model(x: torch.Tensor, packed: torch.Tensor, w: torch.Tensor) -> Any:
        z = packed[..., 1536:].reshape(-1, 128)
        c = Values(x.reshape(-1, 128), z, w, ())
        for name, step in BASE.items():
            setattr(c, name, step(c))
        return c.result

    x, packed = torch.randn(2, 5, 4, 128).bfloat16(), torch.randn(2, 5, 2048).bfloat16()
    assert_fused(run(model, x, packed, make_weight()))


@field_case("F7")
@pytest.mark.parametrize(
    ("activated", "activation", "rounding"),
    [
        (lambda c: torch.sigmoid(c.gate), "sigmoid", None),
        (lambda c: nn.Sigmoid()(c.gate), "sigmoid", None),
        (lambda c: nn.SiLU()(c.gate), "silu", None),
        (lambda c: F.silu(c.z), "silu", "activation:bfloat16"),
        (lambda c: torch.sigmoid(c.z), "sigmoid", "activation:bfloat16"),
    ],
    ids=["sigmoid", "nn.Sigmoid", "nn.SiLU", "silu in bf16", "sigmoid in bf16"],
)
def test_f7_the_activation_is_its_own(activated: Any, activation: str, rounding: str | None) -> None:
    spec = fuse(activated=activated).match.spec
    assert spec.activation == activation
    assert (rounding in spec.roundings) is (rounding is not None)


@field_case("F7")
@pytest.mark.parametrize(
    ("activated", "at"),
    [
        (lambda c: c.gate * torch.sigmoid(c.gate), "mul"),  # rounds otherwise than silu, in the last bit
        (lambda c: F.gelu(c.gate), "gelu"),
        (lambda c: F.hardswish(c.gate), "hardswish"),
        (lambda c: F.softplus(c.gate), "softplus"),
    ],
    ids=["z * sigmoid(z)", "gelu", "hardswish", "softplus"],
)
def test_f7_another_activation_is_named(activated: Any, at: str) -> None:
    miss(Reason.ACTIVATION, at, activated=activated)


class InBatches(nn.Module):
    """x, z [B, S, H, D], flattened and merged in one of several spellings."""

    def __init__(self, flatten: Callable[[Any], Any], merge: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(make_weight())
        self.flatten, self.merge = flatten, merge

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        c = Values(self.flatten(x), self.flatten(z), self.weight, ())
        c.result = None
        for name, step in BASE.items():
            if name == "rows":
                c.rows = self.merge(c.y, x)
            elif name == "groups":
                c.groups = c.rows.unflatten(-1, (-1, 128))
            elif name == "result":
                c.result = c.codes.flatten(-2), c.scale.squeeze(-1)
            else:
                setattr(c, name, step(c))
        return c.result


FLATTENS: dict[str, Callable[[Any], Any]] = {
    "reshape(-1, D)": lambda t: t.reshape(-1, 128),
    "flatten(0, 2)": lambda t: t.flatten(0, 2),
    "view with sizes": lambda t: t.view(t.shape[0] * t.size(1) * t.shape[2], t.size(-1)),
    "left as it is": lambda t: t,
}
MERGES: dict[str, Callable[[Any, Any], Any]] = {
    "B, S, -1": lambda y, x: y.reshape(x.shape[0], x.shape[1], -1),
    "twice": lambda y, x: y.reshape(x.shape).reshape(x.size(0), x.size(1), -1),
    "-1, H * D": lambda y, x: y.reshape(-1, x.shape[-2] * x.shape[-1]),
    "flatten(-2)": lambda y, x: y.view(x.shape).flatten(-2),
    "unflatten, flatten": lambda y, x: y.reshape(-1, 4, 128).flatten(1).unflatten(0, (x.shape[0], -1)),
    "view_as": lambda y, x: y.view_as(x).reshape(*x.shape[:2], -1),
}


@field_case("F8")
@pytest.mark.parametrize(
    ("flatten", "merge"),
    [("reshape(-1, D)", merge) for merge in MERGES] + [(flatten, "B, S, -1") for flatten in list(FLATTENS)[1:]],
)
def test_f8_symbolic_sizes_in_every_spelling(flatten: str, merge: str) -> None:
    """Sizes 1 and 0 are graphs of their own for Dynamo; the others are one, which every batch goes through."""

    def inputs(batch: int, length: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.randn(batch, length, 4, 128).bfloat16() for _ in range(2))

    model = InBatches(FLATTENS[flatten], MERGES[merge])
    sizes = [(2, 3), (3, 5), (1, 4), (4, 1), *([(0, 3)] if merge == "flatten(-2)" else [])]  # where eager takes none
    first, *more = (inputs(*size) for size in sizes)
    outcome = run(model, *first, dynamic=True, also=more)
    captures = outcome.passes.captures
    assert 1 < captures <= len(sizes)
    assert not outcome.passes.misses, [found.render() for found in outcome.passes.misses]
    assert len(outcome.passes.matches) == captures
    assert_equals_eager(outcome)


def _scaled(scale: Any, unfloored: Any = BASE["unfloored"], multiply: bool = False) -> dict[str, Any]:
    scaled = (lambda c: c.data * c.scale) if multiply else BASE["scaled"]
    return {"unfloored": unfloored, "scale": scale, "scaled": scaled}


FORMULAS: dict[str, dict[str, Any]] = {
    "amax.float() / 448": _scaled(lambda c: c.unfloored),
    "amax * (1 / 448)": _scaled(lambda c: c.unfloored, lambda c: c.wide * (1.0 / 448.0)),
    "bf16 amax / 448, then float": _scaled(lambda c: c.unfloored.float(), lambda c: c.amax / 448.0),
    "y * (1 / s)": {"scaled": lambda c: c.data * (1.0 / c.scale)},
    "y * s.reciprocal()": {"scaled": lambda c: c.data * c.scale.reciprocal()},
    "448 / amax, stored so": _scaled(lambda c: 448.0 / c.unfloored, lambda c: c.wide.clamp(min=1e-4), multiply=True),
}


@field_case("F9")
def test_f9_every_formula_keeps_its_own_arithmetic() -> None:
    specs = {name: fuse(changes, tokens=16).match.spec.quant for name, changes in FORMULAS.items()}
    written = [(quant.scale_steps, quant.factor_steps, quant.operation) for quant in specs.values()]
    same = {"y * (1 / s)", "y * s.reciprocal()"}  # eager's reciprocal and its 1 / s are one operation
    assert len(set(written)) == len(specs) - len(same) + 1


def _by_bits(c: Any) -> Any:
    bits = c.unfloored.clamp(min=1e-10).view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


@field_case("F10")
def test_f10_powers_of_two_of_both_kinds() -> None:
    by_log = fuse(scale=lambda c: torch.exp2(torch.ceil(torch.log2(c.unfloored.clamp(min=1e-10)))), tokens=16)
    by_bits = fuse(scale=_by_bits, tokens=16)
    for outcome in (by_log, by_bits):
        mantissas, _ = torch.frexp(outcome.actual[1])
        assert bool((mantissas == 0.5).all())
        assert outcome.match.spec.quant.scale_format == "ue8m0"
    steps = [outcome.match.spec.quant.scale_steps for outcome in (by_log, by_bits)]
    assert steps[0] != steps[1]


@field_case("F11")
@pytest.mark.parametrize(("heads", "head_dim"), [(16, 256), (64, 64), (32, 96), (30, 192), (2, 64), (4, 96)])
def test_f11_heads_and_groups_of_different_sizes(heads: int, head_dim: int) -> None:
    hidden = heads * head_dim
    steps = {
        "rows": lambda c: c.y.reshape(-1, hidden),
        "groups": lambda c: c.rows.view(-1, hidden // 128, 128),
        "result": lambda c: (c.codes, c.scale),
    }
    spec = fuse(steps, heads=heads, head_dim=head_dim).match.spec
    assert (spec.hidden_size, spec.norm_size, spec.group_size) == (hidden, head_dim, 128)


@field_case("F11")
def test_f11_what_does_not_map() -> None:
    miss(Reason.GROUP_SIZE, "to", groups=lambda c: c.rows.view(-1, 8, 64))
    pad_and_slice = {
        "rows": lambda c: F.pad(c.y.reshape(-1, 512), (0, 64)),
        "groups": lambda c: c.rows.view(-1, 9, 64),
        "result": lambda c: (c.codes.view(-1, 576)[:, :512], c.scale),
    }
    miss(Reason.LAYOUT, "pad", pad_and_slice)


@field_case("F11")
def test_f11_a_merged_width_of_192() -> None:
    """A token of 192 values holds no whole number of groups of 128; two tokens do."""
    model = site(
        rows=lambda c: c.y.reshape(-1, 192),
        groups=lambda c: c.rows.view(-1, 128),
        result=lambda c: (c.codes, c.scale),
        weight=make_weight(192),
    )
    outcome = run(model, *make_inputs(4, heads=1, head_dim=192))
    assert_equals_eager(outcome)
    assert len(outcome.passes.matches) + len(outcome.passes.misses) == 1


def _maximum(most: float, clamp: float, dtype: torch.dtype) -> dict[str, Any]:
    return {
        "unfloored": lambda c: c.wide / most,
        "clamped": lambda c: c.scaled.clamp(-clamp, clamp),
        "codes": lambda c: c.clamped.to(dtype),
    }


@field_case("F13")
@pytest.mark.parametrize(("most", "dtype"), [(448.0, FP8), (240.0, FNUZ), (224.0, FNUZ)])
def test_f13_maximum_clamp_and_dtype_are_the_graphs(most: float, dtype: torch.dtype) -> None:
    spec = fuse(_maximum(most, most, dtype)).match.spec
    assert spec.torch_fp8_dtype == dtype
    assert spec.quant.clamp == most
    assert ("div", most) in (spec.quant.scale_steps or ())


@field_case("F13")
@pytest.mark.parametrize(("most", "clamp", "dtype"), [(448.0, 240.0, FP8), (448.0, 448.0, FNUZ), (240.0, 448.0, FNUZ)])
def test_f13_an_impossible_trio(most: float, clamp: float, dtype: torch.dtype) -> None:
    miss(Reason.FP8_FORMAT, "to", _maximum(most, clamp, dtype))


FLOORS: dict[str, dict[str, Any]] = {
    "amax >= 1e-4": _scaled(lambda c: c.unfloored, lambda c: c.wide.clamp(1e-4) / 448.0),
    "amax >= 1e-10": _scaled(lambda c: c.unfloored, lambda c: c.wide.clamp(1e-10) / 448.0),
    "scale >= 1e-12": _scaled(lambda c: c.unfloored.clamp(min=1e-12)),
    "amax + eps": _scaled(lambda c: c.unfloored, lambda c: (c.wide + 1e-10) / 448.0),
    "in bf16": _scaled(lambda c: c.unfloored, lambda c: c.amax.clamp(min=1e-10).float() / 448.0),
    "none": _scaled(lambda c: c.unfloored),
    "of the divisor alone": {
        "scale": lambda c: c.unfloored,
        "scaled": lambda c: c.data / c.scale.clamp(min=1e-12),
    },
}
GATES: dict[str, Any] = {
    "values about 1e-6": lambda c: c.z.float() * 1e-6,
    "values about 1e-12": lambda c: c.z.float() * 1e-12,
    "a group of zeros": lambda c: c.z.float() * (torch.arange(12)[:, None] % 4 != 1),
    "a closed gate": lambda c: c.z.float() * 0.0 - 1e4,
}


@field_case("F14")
@field_case("F15")
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("floor", FLOORS)
def test_f14_f15_floors_where_they_count(floor: str, gate: str) -> None:
    outcome = fuse(FLOORS[floor], gate=GATES[gate])
    if "zeros" in gate and floor == "scale >= 1e-12":
        codes, scales = outcome.actual[:2]
        assert bool((scales[:, 1] == torch.tensor(1e-12)).all())
        assert bool((codes.float().view(3, 4, 128)[:, 1] == 0).all())


@field_case("F20")
def test_f20_gate_before_the_norm_and_norms_of_other_widths() -> None:
    first = fuse(GATE_FIRST, ONE_ROUNDING).match.spec
    assert (first.norm_before_gate, first.norm_size) == (False, 128)
    wide = {
        "h": lambda c: c.x.float().view(-1, 512),
        "gate": lambda c: c.z.float().view(-1, 512),
        "result": lambda c: (c.codes.view(-1, 512), c.scale.squeeze(-1)),
    }
    outcome = run(site(wide, weight=make_weight(512)), *make_inputs())
    assert_fused(outcome)
    assert (outcome.match.spec.norm_size, outcome.match.spec.group_size) == (512, 128)


@field_case("F20")
def test_f20_a_mean_along_another_axis() -> None:
    miss(Reason.NORM_AXIS, "mean", mean=lambda c: c.square.mean(-2, keepdim=True))
    miss(Reason.NORM_AXIS, "mean", mean=lambda c: c.square.mean(-1, keepdim=False), tokens=32)


@field_case("F22")
@torch.enable_grad()
def test_f22_gradients_are_eagers() -> None:
    def model(x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        codes, scales = base(x, z)
        return (codes.float().view(-1, 4, 128).detach() * scales.unsqueeze(-1)).sum()

    base = site()
    gradients = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="gdn_rocm", options={"gdn.report": "off"})):
        torch.manual_seed(1)
        x, z = (tensor.requires_grad_() for tensor in make_inputs())
        with torch._inductor.config.patch(emulate_precision_casts=True):
            wrap(model)(x.mul(1), z.mul(1)).backward()
        gradients.append((x.grad, z.grad))
    report = gdn_backend.last_report()
    assert report is not None
    assert [found.reason for found in report.sites] == ["REQUIRES_GRAD"]
    assert "no_grad" in report.alert
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-4)
