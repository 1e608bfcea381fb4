"""Spellings of the gated norm, of which :func:`choose_norm` picks one for each step of a program."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn import functional as F

from tests.graph.program import LOW, Pick, Program
from tests.graph.sites import Step
from tests.graph.tracing import call

aten = torch.ops.aten


def cast_to(dtype: torch.dtype, like: Step, pick: Pick) -> tuple[str, Any]:
    """A spelling of a cast to ``dtype``, a function of ``c`` and the value; ``like`` gives a tensor of that dtype."""
    return pick(
        [
            ("to", lambda c, v: v.to(dtype)),
            ("to(dtype=)", lambda c, v: v.to(dtype=dtype)),
            ("to(other)", lambda c, v: v.to(like(c))),
            ("type", lambda c, v: v.type(dtype)),
            ("type_as", lambda c, v: v.type_as(like(c))),
            ("to then contiguous", lambda c, v: v.to(dtype).contiguous()),
            ("to(copy=True)", lambda c, v: v.to(dtype, copy=True)),
            ("to(memory_format=)", lambda c, v: v.to(dtype, memory_format=torch.contiguous_format)),
            ("copy_ into a buffer", lambda c, v: torch.empty_like(v, dtype=dtype).copy_(v)),
            ("setitem into a buffer", lambda c, v: _stored(torch.empty_like(v, dtype=dtype), v)),
        ]
    )


def _stored(buffer: Any, value: Any) -> Any:
    call(operator.setitem, buffer, slice(None), value)
    return buffer


def choose_norm(program: Program, pick: Pick) -> None:
    """Every step up to ``y``."""
    gate_first = pick([False, False, False, True])
    plain = not gate_first and not program.per_head_weight and program.weight_dtype is program.dtype
    one_call = plain and pick([False] * 5 + [True])
    for name, choices in _steps(program).items():
        program.choose(name, pick(choices))
    if gate_first:
        _put_gate_first(program, pick)
    if one_call:
        _call_rms_norm(program, pick)
    else:
        _choose_weight(program, pick)
    if gate_first:
        program.choose("product", ("gate was first", lambda c: c.weighted))
        program.names["activated"] += " in h"
    else:
        program.choose("product", pick(_PRODUCTS))
    dtype = program.dtype
    out = dtype if dtype in LOW else pick([torch.bfloat16, torch.float32])
    name, cast = cast_to(out, lambda c: c.x.to(out), pick)
    program.choose("y", (f"{name} {out}", lambda c: cast(c, c.product)))


_PRODUCTS: list[tuple[str, Step]] = [
    ("weighted * activated", lambda c: c.weighted * c.activated),
    ("activated * weighted", lambda c: c.activated * c.weighted),
    ("torch.mul", lambda c: torch.mul(c.activated, c.weighted)),
    ("aten.mul", lambda c: aten.mul.Tensor(c.weighted, c.activated)),
    ("input=, other=", lambda c: torch.mul(input=c.activated, other=c.weighted)),
]


def _steps(program: Program) -> dict[str, list[tuple[str, Step]]]:
    heads, width = program.heads, program.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "heads": (-1, heads, width), "batch": (1, -1, heads, width), "groups": (-1, heads // 2, 2, width),
    }  # fmt: skip
    shape = shapes.get(program.shape)

    def shaped(value: Any) -> Any:
        return value if shape is None else value.reshape(shape)

    steps: dict[str, list[tuple[str, Step]]] = {
        "h": [
            ("float()", lambda c: shaped(c.x).float()),
            ("to(float32)", lambda c: shaped(c.x).to(torch.float32)),
            ("type", lambda c: shaped(c.x.type(torch.float32))),
            ("contiguous().float()", lambda c: shaped(c.x.contiguous().float())),
            ("reshaped", lambda c: shaped(c.x.view(-1, 1, width).squeeze(1)).to(torch.float32)),
            ("to(copy=True)", lambda c: shaped(c.x.to(torch.float32, copy=True))),
        ],
        "square": [
            ("pow(2)", lambda c: c.h.pow(2)),
            ("h*h", lambda c: c.h * c.h),
            ("square", lambda c: torch.square(c.h)),
            ("**2.0", lambda c: c.h**2.0),
            ("torch.mul", lambda c: torch.mul(c.h, c.h)),
            ("aten.pow", lambda c: aten.pow.Tensor_Scalar(c.h, 2)),
            ("pow(exponent=)", lambda c: torch.pow(c.h, exponent=2)),
        ],
        "mean": [
            ("mean(-1, keepdim)", lambda c: c.square.mean(-1, keepdim=True)),
            ("mean((-1,), True)", lambda c: c.square.mean((-1,), True)),
            ("torch.mean(dim=[-1])", lambda c: torch.mean(c.square, dim=[-1], keepdim=True)),
            ("mean(axis=)", lambda c: c.square.mean(axis=-1, keepdims=True)),
            ("aten.mean", lambda c: aten.mean.dim(c.square, [-1], True)),
            ("mean unsqueeze", lambda c: c.square.mean(-1).unsqueeze(-1)),
            ("mean[..., None]", lambda c: c.square.mean(dim=-1)[..., None]),
            ("sum / N", lambda c: c.square.sum(-1, keepdim=True) / width),
            ("sum.div_(N)", lambda c: c.square.sum(-1, keepdim=True).div_(width)),
        ],
        "variance": [
            ("mean + eps", lambda c: c.mean + 1e-6),
            ("eps + mean", lambda c: 1e-5 + c.mean),
            ("torch.add", lambda c: torch.add(c.mean, 1e-6)),
            ("add_", lambda c: c.mean.add_(1e-6)),
            ("iadd", lambda c: call(operator.iadd, c.mean, 1e-2)),
            ("minus", lambda c: c.mean - (-1e-6)),
            ("add(other=)", lambda c: c.mean.add(other=1e-6)),
        ],
        "root": [
            ("torch.rsqrt", lambda c: torch.rsqrt(c.variance)),
            ("rsqrt()", lambda c: c.variance.rsqrt()),
            ("aten.rsqrt", lambda c: aten.rsqrt.default(c.variance)),
            ("pow(-0.5)", lambda c: c.variance.pow(-0.5)),
            ("1/sqrt", lambda c: 1.0 / torch.sqrt(c.variance)),
            ("sqrt.reciprocal", lambda c: c.variance.sqrt().reciprocal()),
            ("rsqrt_", lambda c: c.variance.rsqrt_()),
        ],
        "norm": [
            ("h * root", lambda c: c.h * c.root),
            ("root * h", lambda c: c.root * c.h),
            ("torch.mul", lambda c: torch.mul(c.root, c.h)),
            ("h.mul", lambda c: c.h.mul(c.root)),
            ("h.multiply", lambda c: c.h.multiply(c.root)),
            ("root expanded", lambda c: c.h * c.root.expand_as(c.h)),
        ],
        "gate": [
            ("float()", lambda c: shaped(c.z).float()),
            ("to", lambda c: shaped(c.z).to(torch.float32)),
            ("as it is", lambda c: shaped(c.z)),
            ("reshaped", lambda c: shaped(c.z.unflatten(0, (-1, 1)).flatten(0, 1)).float()),
        ],
        "activated": [
            ("F.silu", lambda c: F.silu(c.gate)),
            ("torch sigmoid", lambda c: torch.sigmoid(c.gate)),
            ("sigmoid()", lambda c: c.gate.sigmoid()),
            ("silu rounded", lambda c: F.silu(c.gate.float()).to(torch.bfloat16)),
            ("aten.silu", lambda c: aten.silu(c.gate)),
            ("F.sigmoid", lambda c: F.sigmoid(c.gate)),
            ("clone sigmoid_", lambda c: c.gate.clone().sigmoid_()),
            ("silu in place", lambda c: F.silu(c.gate.clone(), inplace=True)),
        ],
    }  # fmt: skip
    if program.dtype is torch.float32:  # whose last ulp is to be eager's
        steps["root"] = [choice for choice in steps["root"] if "rsqrt" in choice[0]]
    return steps


def _put_gate_first(program: Program, pick: Pick) -> None:
    gate, activated, widen = program.steps["gate"], program.steps["activated"], program.steps["h"]
    rounds = pick([False, True]) and program.dtype in LOW

    def h(c: Any) -> Any:
        c.gate = gate(c)
        product = widen(c) * activated(c)
        return product.to(program.dtype).float() if rounds else product.float()

    program.choose("h", (f"gate first, rounded: {rounds}", h))
    program.steps["gate"] = program.steps["activated"] = lambda c: None


def _call_rms_norm(program: Program, pick: Pick) -> None:
    """``nn.RMSNorm`` as Dynamo shows it, in the dtype of x."""
    width, widen = program.head_dim, program.steps["h"]
    for name in ("h", "square", "mean", "variance", "root", "norm", "narrow"):
        program.steps[name] = lambda c: None
        program.names.pop(name, None)
    calls: list[tuple[str, Step]] = [
        ("torch.rms_norm", lambda c: torch.rms_norm(c.h, [width], c.w, 1e-6)),
        ("torch.rms_norm(eps=)", lambda c: torch.rms_norm(c.h, (width,), weight=c.w, eps=1e-5)),
        ("torch.rms_norm, no weight", lambda c: torch.rms_norm(c.h, (width,), None, 1e-6)),
        ("torch.rms_norm, weight behind", lambda c: c.w * torch.rms_norm(c.h, (width,), None, 1e-6)),
    ]
    program.choose("h", ("as it is", lambda c: widen(c).to(program.dtype)))
    program.choose("weighted", pick(calls))


def _choose_weight(program: Program, pick: Pick) -> None:
    dtype = program.dtype
    rounds = dtype in LOW and pick([True, False])
    name, cast = cast_to(dtype, lambda c: c.x, pick)
    program.choose("narrow", (name, lambda c: cast(c, c.norm)) if rounds else ("fp32", lambda c: c.norm))
    if program.per_head_weight:
        shape = program.heads, program.head_dim
        weighted: list[tuple[str, Step]] = [
            ("w.view(H, D) * n", lambda c: c.w.view(shape) * c.narrow),
            ("n * w.unflatten", lambda c: c.narrow * c.w.unflatten(0, shape)),
            ("w.view(H, D).float()", lambda c: c.w.view(shape).float() * c.narrow),
        ]
        if program.shape == "batch":
            weighted.append(("w.view(1, 1, H, D)", lambda c: c.narrow * c.w.view(1, 1, *shape)))
    else:
        weighted = [
            ("w * n", lambda c: c.w * c.narrow),
            ("n * w", lambda c: c.narrow * c.w),
            ("torch.mul", lambda c: torch.mul(c.w, c.narrow)),
            ("w.float()", lambda c: c.w.float() * c.narrow),
            ("(1 + w) * n", lambda c: (1.0 + c.w) * c.narrow),
            ("n * (w.float() + 1)", lambda c: c.narrow * (c.w.float() + 1.0)),
            ("w.view", lambda c: c.w.view(1, -1) * c.narrow),
            ("w[None]", lambda c: c.w[None] * c.narrow),
            ("w expanded", lambda c: c.narrow * c.w.expand_as(c.narrow)),
            ("no weight", lambda c: c.narrow),
            ("bias", lambda c: c.w * c.narrow + c.more[0]),
            ("bias first", lambda c: torch.add(c.more[0].float(), c.narrow * c.w)),
            ("bias + 0.5", lambda c: c.narrow * c.w + (c.more[0] + 0.5)),
        ]
    program.choose("weighted", pick(weighted))
