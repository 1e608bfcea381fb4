"""Every reason for which a site is missed: the reason, the node it names, and the graph as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import return_and_correct_aliasing

from gdn_backend.fusion.match import Reason
from tests.graph.harness import assert_missed, run
from tests.graph.sites import FP8, make_inputs, make_weight, site

#: Reasons of forms that are not the base with a fact changed, and the files with their cases.
CASES_ELSEWHERE = {
    Reason.KERNEL: "test_planning.py",
    Reason.DISABLED: "test_planning.py",
    Reason.OPAQUE_NORM: "test_norm_ops.py",
}


@dataclass(frozen=True)
class Case:
    """The base with one fact changed: why it is missed, and the node (its name or operation) that the miss names."""

    reason: Reason
    at: str
    steps: dict[str, Any] = field(default_factory=dict)
    tokens: int = 3
    heads: int = 4
    head_dim: int = 128
    more: Callable[[], tuple[Any, ...]] = tuple
    weight: Callable[[], torch.Tensor] = make_weight
    grad: bool = False
    dynamic: bool = False
    group_sizes: tuple[int, ...] = (128,)


def _divided_by(maximum: float, codes: torch.dtype, clamp: float | None) -> dict[str, Any]:
    steps: dict[str, Any] = {"unfloored": lambda c: c.wide / maximum, "codes": lambda c: c.clamped.to(codes)}
    return {**steps, "clamped": lambda c: c.scaled.clamp(-clamp, clamp) if clamp else c.scaled}


def _in_autocast(enabled: bool = True) -> Callable[[Any], Any]:
    def step(c: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            return torch.rsqrt(c.variance)

    return step


def _without_gradients(c: Any) -> Any:
    with torch.no_grad():
        return (c.w * c.narrow * c.activated).to(torch.bfloat16)


def _inside_vmap(c: Any) -> Any:
    def one(x: torch.Tensor, z: torch.Tensor) -> Any:
        h = x.float()
        y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * F.silu(z.float())).to(torch.bfloat16)
        scale = (y.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-6)
        return (y.float() / scale).to(FP8).view(torch.uint8), scale

    return torch.vmap(one)(c.x.view(3, 4, 128), c.z.view(3, 4, 128))


def _clear(c: Any, value: Any, written: Any) -> Any:
    written.mul_(0)
    return value


_OTHER = lambda: (torch.randn(12, 128),)  # noqa: E731
_R = Reason
CASES: dict[str, Case] = {
    "groups of 64": Case(_R.GROUP_SIZE, "to", {"groups": lambda c: c.rows.view(-1, 8, 64)}),
    "groups of 256": Case(_R.GROUP_SIZE, "to", {"groups": lambda c: c.rows.view(-1, 2, 256)}),
    "groups of 128 turned off": Case(_R.GROUP_SIZE, "to", group_sizes=(64,)),
    "blocks of 2 x 128": Case(
        _R.GROUP_SHAPE,
        "amax",
        {
            "groups": lambda c: c.rows.view(2, 2, 4, 128),
            "amax": lambda c: c.magnitude.amax((1, 3), keepdim=True),
        },
        tokens=4,
    ),
    "groups across the heads": Case(_R.GROUP_SHAPE, "amax", {"amax": lambda c: c.magnitude.amax(-2, keepdim=True)}),
    "groups of two axes": Case(_R.GROUP_SHAPE, "amax", {"amax": lambda c: c.magnitude.amax((-2, -1), keepdim=True)}),
    "factor on another axis by luck": Case(
        _R.GROUP_SHAPE,
        "clamp",
        {"rows": lambda c: c.y, "groups": lambda c: c.y, "amax": lambda c: c.magnitude.amax(-1)},
        tokens=32,
    ),
    "max()": Case(_R.PER_TENSOR, "max", {"amax": lambda c: c.magnitude.max()}),
    "amax()": Case(_R.PER_TENSOR, "amax", {"amax": lambda c: c.magnitude.amax()}),
    "amax of all axes": Case(_R.PER_TENSOR, "amax", {"amax": lambda c: c.magnitude.amax((0, 1, 2))}),
    "a scale that is an input": Case(
        _R.STATIC_SCALE, "l_more_0_", {"scale": lambda c: c.more[0]}, more=lambda: (torch.rand(3, 4, 1),)
    ),
    "a scale that is a number": Case(_R.STATIC_SCALE, "truediv", {"scaled": lambda c: c.data / 0.02}),
    "no scale": Case(
        _R.STATIC_SCALE, "to", {"scaled": lambda c: c.y, "clamped": lambda c: c.y, "result": lambda c: c.codes}
    ),
    "no scale but a clamp": Case(_R.STATIC_SCALE, "to", {"scaled": lambda c: c.y, "result": lambda c: c.codes}),
    "codes turned back": Case(
        _R.FAKE_QUANT, "float", {"result": lambda c: (c.codes.float() * c.scale).to(torch.bfloat16)}
    ),
    "codes turned back behind a reshape": Case(
        _R.FAKE_QUANT, "to", {"result": lambda c: c.codes.view(-1, 512).to(torch.bfloat16)}
    ),
    "weight behind the gate": Case(
        _R.NORM_ORDER, "mul", {"weighted": lambda c: c.narrow, "product": lambda c: (c.narrow * c.activated) * c.w}
    ),
    "mean over the heads": Case(_R.NORM_AXIS, "mean", {"mean": lambda c: c.square.mean(0, keepdim=True)}),
    "mean over everything": Case(_R.NORM_AXIS, "mean", {"mean": lambda c: c.square.mean()}),
    "mean not kept, broadcast by luck": Case(_R.NORM_AXIS, "mean", {"mean": lambda c: c.square.mean(-1)}, tokens=32),
    "mean of a transposed square": Case(
        _R.NORM_AXIS, "mean", {"mean": lambda c: c.square.mean(0).unsqueeze(-1)}, tokens=32
    ),
    "a weight for each token": Case(_R.WEIGHT_SHAPE, "l_self_parameters_weight_", weight=lambda: torch.rand(12, 1)),
    "a weight for each row of a square": Case(
        _R.WEIGHT_SHAPE, "l_self_parameters_weight_", weight=lambda: torch.rand(128, 1), tokens=32
    ),
    "eps is a tensor": Case(
        _R.EPS, "mean", {"variance": lambda c: c.mean + c.more[0]}, more=lambda: (torch.tensor(1e-6),)
    ),
    "eps is a tensor of one value": Case(
        _R.EPS, "mean", {"variance": lambda c: c.more[0] + c.mean}, more=lambda: (torch.tensor([1e-6]),)
    ),
    "eps is a floor": Case(_R.EPS, "clamp", {"variance": lambda c: c.mean.clamp(min=1e-6)}),
    "gelu": Case(_R.ACTIVATION, "gelu", {"activated": lambda c: F.gelu(c.gate)}),
    "tanh": Case(_R.ACTIVATION, "tanh", {"activated": lambda c: torch.tanh(c.gate)}),
    "relu": Case(_R.ACTIVATION, "relu", {"activated": lambda c: F.relu(c.gate)}),
    "z * sigmoid(z)": Case(_R.ACTIVATION, "mul", {"activated": lambda c: c.gate * torch.sigmoid(c.gate)}),
    "h / sqrt": Case(_R.ROUNDING, "sqrt", {"norm": lambda c: c.h / torch.sqrt(c.variance)}),
    "statistics in bfloat16": Case(_R.ROUNDING, "pow", {"h": lambda c: c.x}),
    "statistics in float64": Case(_R.ROUNDING, "pow", {"h": lambda c: c.x.double()}),
    "a mean in float64": Case(
        _R.ROUNDING, "mean", {"mean": lambda c: c.square.mean(-1, keepdim=True, dtype=torch.float64).float()}
    ),
    "two roundings in a row": Case(_R.ROUNDING, "mul", {"y": lambda c: c.product.half().bfloat16()}),
    "a gate in float64": Case(_R.ROUNDING, "silu", {"gate": lambda c: c.z.double()}),
    "a sum times 1 / 96": Case(
        _R.ROUNDING,
        "mul",
        {
            "mean": lambda c: c.square.sum(-1, keepdim=True) * (1 / 96),
            "rows": lambda c: c.y.reshape(-1, 384),
            "groups": lambda c: c.rows.view(-1, 3, 128),
            "result": lambda c: (c.codes, c.scale),
        },
        head_dim=96,
        weight=lambda: make_weight(96),
    ),
    "1 / sqrt and no rounding behind it": Case(
        _R.ROUNDING,
        "truediv",
        {
            "root": lambda c: 1.0 / torch.sqrt(c.variance),
            "narrow": lambda c: c.norm,
            "weighted": lambda c: c.norm * c.w.float(),
            "y": lambda c: c.product,
        },
    ),
    "a quotient rounded twice": Case(_R.ROUNDING, "truediv", {"clamped": lambda c: c.scaled.half().bfloat16()}),
    "codes through integers": Case(
        _R.ROUNDING, "clamp", {"clamped": lambda c: c.scaled.clamp(-448.0, 448.0).int().float()}
    ),
    "a quotient in float64": Case(_R.ROUNDING, "clamp", {"scaled": lambda c: c.data.double() / c.scale}),
    "a scale in float64": Case(_R.SCALE_FORMULA, "truediv", {"unfloored": lambda c: (c.wide.double() / 448.0).float()}),
    "a scale through integers": Case(_R.SCALE_FORMULA, "int", {"wide": lambda c: c.amax.int().float()}),
    "a limit that bfloat16 lacks": Case(
        _R.ROUNDING,
        "truediv",
        {
            "unfloored": lambda c: c.wide / 400.0,
            "scaled": lambda c: (c.data / c.scale).bfloat16(),
            "clamped": lambda c: c.scaled.clamp(-431.0, 431.0),
        },
    ),
    "amax of another value": Case(
        _R.SCALE_FORMULA, "amax", {"magnitude": lambda c: c.more[0].view(3, 4, 128).abs()}, more=_OTHER
    ),
    "amax of the unrounded value": Case(
        _R.SCALE_FORMULA, "amax", {"magnitude": lambda c: c.product.view(-1, 4, 128).abs()}
    ),
    "max of the signed values": Case(_R.SCALE_FORMULA, "amax", {"magnitude": lambda c: c.groups}),
    "scale rounded down": Case(
        _R.SCALE_FORMULA, "div", {"unfloored": lambda c: torch.div(c.wide, 448.0, rounding_mode="floor")}
    ),
    "codes rounded to integers": Case(
        _R.SCALE_FORMULA, "div", {"scaled": lambda c: torch.div(c.data, c.scale, rounding_mode="trunc")}
    ),
    "torch.div(448, amax), a true division": Case(
        _R.SCALE_FORMULA,
        "div",
        {
            "unfloored": lambda c: torch.div(448.0, c.wide),
            "scale": lambda c: c.unfloored,
            "scaled": lambda c: c.data * c.scale,
        },
    ),
    "square root of the amax": Case(_R.SCALE_FORMULA, "sqrt", {"unfloored": lambda c: c.wide.sqrt()}),
    "a clamp between tensors": Case(
        _R.SCALE_FORMULA,
        "clamp",
        {"clamped": lambda c: c.scaled.clamp(-c.more[0], c.more[0])},
        more=lambda: (torch.tensor(448.0),),
    ),
    "float8_e5m2": Case(_R.FP8_FORMAT, "to", {"codes": lambda c: c.clamped.to(torch.float8_e5m2)}),
    "448 for e4m3fnuz": Case(_R.FP8_FORMAT, "to", _divided_by(448.0, torch.float8_e4m3fnuz, 448.0)),
    "448 for e4m3fnuz, not clamped": Case(_R.FP8_FORMAT, "to", _divided_by(448.0, torch.float8_e4m3fnuz, None)),
    "448 clamped to 240": Case(_R.FP8_FORMAT, "to", _divided_by(448.0, FP8, 240.0)),
    "a clamp to unequal limits": Case(_R.FP8_FORMAT, "truediv", {"clamped": lambda c: c.scaled.clamp(-448.0, 440.0)}),
    "a clamp from below alone": Case(_R.FP8_FORMAT, "truediv", {"clamped": lambda c: c.scaled.clamp(min=-448.0)}),
    "a clamp at zero from below": Case(_R.FP8_FORMAT, "truediv", {"clamped": lambda c: c.scaled.clamp(min=0.0)}),
    "a clamp at zero from above": Case(_R.FP8_FORMAT, "truediv", {"clamped": lambda c: c.scaled.clamp(max=0.0)}),
    "a clamp to zero": Case(_R.FP8_FORMAT, "truediv", {"clamped": lambda c: c.scaled.clamp(0.0, 0.0)}),
    "an integer weight": Case(_R.DTYPE, "l_self_parameters_weight_", weight=lambda: torch.ones(128, dtype=torch.int32)),
    "an integer gate": Case(
        _R.DTYPE,
        "l_more_0_",
        {"activated": lambda c: torch.sigmoid(c.more[0])},
        more=lambda: (torch.randint(-3, 3, (12, 128)),),
    ),
    "heads and values change places": Case(
        _R.LAYOUT, "transpose", {"rows": lambda c: c.y.view(-1, 4, 128).transpose(1, 2).reshape(-1, 512)}
    ),
    "tokens and heads change places, as many of each": Case(
        _R.LAYOUT, "transpose", {"rows": lambda c: c.y.view(4, 4, 128).transpose(0, 1).reshape(-1, 512)}, tokens=4
    ),
    "a square transposed": Case(_R.LAYOUT, "t", {"rows": lambda c: c.y.t().reshape(-1, 512)}, tokens=32),
    "x.mT": Case(_R.LAYOUT, "mT", {"rows": lambda c: c.y.mT.reshape(-1, 512)}, tokens=32),
    "padded": Case(
        _R.LAYOUT,
        "pad",
        {
            "rows": lambda c: F.pad(c.y.reshape(-1, 512), (0, 128)),
            "groups": lambda c: c.rows.view(-1, 5, 128),
            "result": lambda c: (c.codes, c.scale),
        },
    ),
    "half of it": Case(
        _R.LAYOUT,
        "getitem",
        {
            "rows": lambda c: c.y.reshape(-1, 512)[:, :256],
            "groups": lambda c: c.rows.reshape(-1, 2, 128),
            "result": lambda c: (c.codes, c.scale),
        },
    ),
    "a gate for each token": Case(_R.LAYOUT, "mul", {"gate": lambda c: c.z[:, :1].float()}),
    "a gate for two batches": Case(
        _R.LAYOUT, "mul", {"gate": lambda c: c.more[0].float()}, more=lambda: (torch.randn(2, 12, 128),)
    ),
    "codes that eager leaves column-major": Case(
        _R.LAYOUT,
        "to",
        {
            "h": lambda c: c.x.t().contiguous().t().float(),
            "gate": lambda c: c.z.t().contiguous().t().float(),
            "rows": lambda c: c.y,
            "groups": lambda c: c.y,
            "result": lambda c: (c.codes, c.scale),
        },
    ),
    "rows that hold no whole norm and group": Case(
        _R.LAYOUT,
        "abs",
        {"rows": lambda c: c.y, "groups": lambda c: c.y.view(-1, 128), "result": lambda c: (c.codes, c.scale)},
        tokens=4,
        heads=1,
        dynamic=True,
        head_dim=320,
        weight=lambda: make_weight(320),
    ),
    "y is returned": Case(_R.SHARED_INTERMEDIATE, "to", {"result": lambda c: (c.codes, c.scale, c.y)}),
    "the mean is returned": Case(_R.SHARED_INTERMEDIATE, "mean", {"result": lambda c: (c.codes, c.scale, c.mean)}),
    "a residual reads the rows": Case(
        _R.SHARED_INTERMEDIATE, "to", {"result": lambda c: (c.codes, c.scale, c.rows + 1)}
    ),
    "the quotient is returned": Case(
        _R.SHARED_INTERMEDIATE, "clamp", {"result": lambda c: (c.codes, c.scale, c.clamped)}
    ),
    "the maxima's places are read": Case(
        _R.SHARED_INTERMEDIATE,
        "max",
        {
            "amax": lambda c: (setattr(c, "found", c.magnitude.max(-1, keepdim=True)), c.found[0])[1],
            "result": lambda c: (c.codes, c.scale, c.found[1]),
        },
    ),
    "the gate is cleared before the codes": Case(
        _R.MUTATION, "mul_", {"rows": lambda c: _clear(c, c.y.reshape(-1, 512), c.z)}
    ),
    "x.requires_grad": Case(_R.REQUIRES_GRAD, "to", grad=True),
    "the norm alone under no_grad": Case(
        _R.REQUIRES_GRAD,
        "clamp",
        {"weighted": lambda c: c.narrow, "product": lambda c: c.weighted, "y": _without_gradients},
        grad=True,
    ),
    "rsqrt in autocast": Case(_R.AUTOCAST, "rsqrt", {"root": _in_autocast()}),
    "inside vmap": Case(_R.SUBCLASS, "_add_batch_dim", {"result": _inside_vmap}),
}


@pytest.mark.parametrize("name", CASES)
def test_miss(name: str) -> None:
    case = CASES[name]
    inputs = make_inputs(case.tokens, heads=case.heads, head_dim=case.head_dim)
    if name == "x.requires_grad":
        inputs[0].requires_grad_()
    steps = dict(case.steps)
    if name == "inside vmap":  # the site in the map is the only one
        unused = [step for step in site().steps if step != "result"]
        steps = {**dict.fromkeys(unused, lambda c: None), **steps}
    outcome = run(
        site(steps, weight=case.weight()),
        *inputs,
        *case.more(),
        dynamic=case.dynamic,
        group_sizes=case.group_sizes,
        grad=case.grad,
    )
    assert_missed(outcome, case.reason, case.at)


def test_every_reason_has_a_case() -> None:
    assert {case.reason for case in CASES.values()} | CASES_ELSEWHERE.keys() == set(Reason)
    for reason, file in CASES_ELSEWHERE.items():
        assert f"Reason.{reason.name}" in Path(__file__).with_name(file).read_text()


class Wrapped(torch.Tensor):
    """A tensor subclass that wraps a plain tensor, as DTensor does."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any) -> Wrapped:
        return Wrapped(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(Wrapped, lambda tensor: tensor.inner, (args, kwargs or {}))
        result = pytree.tree_map_only(torch.Tensor, Wrapped, func(*plain[0], **plain[1]))
        return return_and_correct_aliasing(func, args, kwargs, result)


def test_tensor_subclass() -> None:
    x, z = make_inputs()
    passes = run(_whole_site, Wrapped(x), Wrapped(z)).passes
    assert [miss.reason for miss in passes.misses] == [Reason.SUBCLASS]
    assert passes.misses[0].actual == "Wrapped"


def _whole_site(x: torch.Tensor, z: torch.Tensor) -> Any:
    h = x.float()
    y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * F.silu(z.float())).to(torch.bfloat16)
    scale = (y.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-6)
    return (y.float() / scale).to(FP8), scale


NOT_ANCHORS: dict[str, Any] = {
    "no gate": {"product": lambda c: c.weighted},
    "an l2 norm": {"mean": lambda c: c.square.sum(-1, keepdim=True)},
    "a mean of something else": {"square": lambda c: c.x.float().sin().pow(2)},
    "codes of something else": {"data": lambda c: c.groups.float().sin()},
    "a dropout": {"rows": lambda c: F.dropout(c.y, 0.1, True).reshape(-1, 512) * 0},
    "a residual added": {"rows": lambda c: (c.y + c.x).reshape(-1, 512)},
    "a mean of cubes": {"square": lambda c: c.h.pow(3)},
    "a root of the fourth power": {"root": lambda c: c.variance.pow(-0.25)},
}


@pytest.mark.parametrize("name", NOT_ANCHORS)
def test_what_is_no_gated_norm_is_no_site(name: str) -> None:
    passes = run(site(NOT_ANCHORS[name]), *make_inputs()).passes
    assert (passes.matches, passes.misses) == ([], [])


def test_messages_name_sizes_option_and_place() -> None:
    miss = run(site(groups=lambda c: c.rows.view(-1, 8, 64)), *make_inputs()).miss
    assert miss.render("model.py:88") == (
        f"expected groups of 128, got 64 at {miss.node.name} (model.py:88); enable it with "  # type: ignore[union-attr]
        'options={"gdn.group_sizes": [64, 128]} or GDN_GROUP_SIZES'
    )
    miss = run(site(result=lambda c: (c.codes, c.y)), *make_inputs()).miss
    assert (miss.actual, miss.node.name) == ("the graph's output", "to_1")  # type: ignore[union-attr]
