"""Programs made at random: equivalent spellings of one site. ``changes.py`` then changes what they mean.

Every choice goes through ``pick``, a function from options to one of them: a random generator's ``choice`` in
``scripts/fuzz.py``, hypothesis' ``draw`` in the tests, which then shrinks what fails.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional as F

from gdn_backend.ops import fp8_quant  # noqa: F401  (registers the op)
from gdn_backend.ops.call import encode_quant
from gdn_backend.ops.spec import QuantSpec
from tests.graph.sites import BASE, Step, run_steps
from tests.graph.tracing import call

Pick = Callable[[Sequence[Any]], Any]

FP8 = torch.float8_e4m3fn
FLOOR = 1.0 / (448.0 * 512.0)
LOW = (torch.bfloat16, torch.float16)


@dataclass
class Program:
    """A site over x, z [T * H, D], a weight [D] and a bias [D]; ``names`` say which spelling each step has.

    Where T is dynamic the inputs are [T, H, D] and are flattened first, as models do it.
    """

    steps: dict[str, Step]
    names: dict[str, str]
    heads: int
    head_dim: int
    tokens: int
    dtype: torch.dtype
    gate_dtype: torch.dtype
    weight_dtype: torch.dtype
    strides: str  # "contiguous", "transposed", "packed": how x and z lie in memory
    values: str = "normal"
    dynamic: bool = False
    change: str = ""  # what was done to it to change its meaning
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rounds_otherwise(self) -> bool:
        """True where the last ulp of exp or rsqrt may differ from the fused op's."""
        return self.strides == "transposed" or self.names.get("root") in ("1/sqrt", "sqrt.reciprocal", "pow(-0.5)")

    def __call__(self, x: Any, z: Any, w: Any, b: Any) -> Any:
        if self.dynamic:
            x, z = x.reshape(-1, self.head_dim), z.flatten(0, 1)
        return run_steps(self.steps, x, z, w, b)

    def make_inputs(self, seed: int = 0) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        rows, width = self.tokens * self.heads, self.head_dim
        values = [_values(torch.randn(rows, width, generator=generator), self.values) for _ in range(2)]
        x, z = (
            _lay_out(value.to(dtype), self.strides)
            for value, dtype in zip(values, (self.dtype, self.gate_dtype), strict=False)
        )
        if self.dynamic:
            x, z = (value.view(self.tokens, self.heads, width) for value in (x, z))
        w, b = (torch.rand(width, generator=generator) for _ in range(2))
        return [x, z, (w + 0.5).to(self.weight_dtype), b.to(self.weight_dtype)]

    def describe(self) -> str:
        facts = (self.heads, self.head_dim, self.tokens, self.dtype, self.gate_dtype, self.weight_dtype, self.strides)
        return f"{facts} {self.values} dynamic={self.dynamic} change={self.change!r} {self.names}"


def _values(tensor: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "tiny":
        return tensor * 1e-4
    if kind == "large":
        return tensor * 300.0
    if kind == "zeros" and tensor.numel():
        tensor[::2] = 0.0
        tensor[:, ::3] = -0.0
    if kind == "not finite" and tensor.numel():
        tensor.view(-1)[0], tensor.view(-1)[-1] = float("nan"), float("inf")
    return tensor


def _lay_out(tensor: torch.Tensor, strides: str) -> torch.Tensor:
    if strides == "transposed":
        return tensor.t().contiguous().t()
    if strides == "packed":
        return torch.cat([tensor, tensor + 1], dim=-1)[:, tensor.shape[-1] :]
    return tensor


def _to(
    value: Any, dtype: torch.dtype, pick: Pick, like: Callable[[Any], Any]
) -> tuple[str, Callable[[Any, Any], Any]]:
    """A spelling of a cast to ``dtype``; ``like`` gives a tensor of that dtype."""
    return pick(
        [
            ("to", lambda c, v: v.to(dtype)),
            ("to(dtype=)", lambda c, v: v.to(dtype=dtype)),
            ("type", lambda c, v: v.type(dtype)),
            ("type_as", lambda c, v: v.type_as(like(c))),
            ("to then contiguous", lambda c, v: v.to(dtype).contiguous()),
        ]
    )


def equivalent(pick: Pick) -> Program:
    """A program that has to fuse."""
    head_dim = pick([128, 128, 64, 96, 256, 192])
    heads = pick([4, 6, 8, 2]) if head_dim % 128 == 0 else {64: 4, 96: 4, 192: 2}[head_dim] * pick([1, 2])
    dtype = pick([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    program = Program(
        steps=dict(BASE),
        names={},
        heads=heads,
        head_dim=head_dim,
        tokens=pick([1, 2, 3, 5, 0]),
        dtype=dtype,
        gate_dtype=pick([dtype, dtype, torch.float32, torch.bfloat16]),
        weight_dtype=pick([dtype, torch.float32, torch.bfloat16]),
        strides=pick(["contiguous", "contiguous", "transposed", "packed"]),
        values=pick(["normal", "normal", "tiny", "large", "zeros", "not finite"]),
    )
    program.dynamic = pick([False, program.strides != "transposed"])
    _choose_norm(program, pick)
    _choose_layout(program, pick)
    _choose_quant(program, pick)
    return program


def _set(program: Program, name: str, choice: tuple[str, Step]) -> None:
    program.names[name], program.steps[name] = choice


def _choose_norm(program: Program, pick: Pick) -> None:
    width, dtype = program.head_dim, program.dtype
    gate_first = pick([False, False, False, True])
    options = {
        "h": [
            ("float()", lambda c: c.x.float()),
            ("to(float32)", lambda c: c.x.to(torch.float32)),
            ("type", lambda c: c.x.type(torch.float32)),
            ("contiguous().float()", lambda c: c.x.contiguous().float()),
            ("reshaped", lambda c: c.x.view(-1, 1, width).squeeze(1).to(torch.float32)),
        ],
        "square": [
            ("pow(2)", lambda c: c.h.pow(2)),
            ("h*h", lambda c: c.h * c.h),
            ("square", lambda c: torch.square(c.h)),
            ("**2.0", lambda c: c.h**2.0),
            ("torch.mul", lambda c: torch.mul(c.h, c.h)),
            ("aten.pow", lambda c: torch.ops.aten.pow.Tensor_Scalar(c.h, 2)),
        ],
        "mean": [
            ("mean(-1, keepdim)", lambda c: c.square.mean(-1, keepdim=True)),
            ("mean((-1,), True)", lambda c: c.square.mean((-1,), True)),
            ("torch.mean(dim=[1])", lambda c: torch.mean(c.square, dim=[1], keepdim=True)),
            ("mean unsqueeze", lambda c: c.square.mean(-1).unsqueeze(-1)),
            ("mean[..., None]", lambda c: c.square.mean(dim=1)[..., None]),
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
        ],
        "root": [
            ("torch.rsqrt", lambda c: torch.rsqrt(c.variance)),
            ("rsqrt()", lambda c: c.variance.rsqrt()),
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
        ],
        "gate": [
            ("float()", lambda c: c.z.float()),
            ("to", lambda c: c.z.to(torch.float32)),
            ("as it is", lambda c: c.z),
            ("reshaped", lambda c: c.z.unflatten(0, (-1, 1)).flatten(0, 1).float()),
        ],
        "activated": [
            ("F.silu", lambda c: F.silu(c.gate)),
            ("torch sigmoid", lambda c: torch.sigmoid(c.gate)),
            ("sigmoid()", lambda c: c.gate.sigmoid()),
            ("silu rounded", lambda c: F.silu(c.gate.float()).to(torch.bfloat16)),
            ("aten.silu", lambda c: torch.ops.aten.silu(c.gate)),
            ("clone sigmoid_", lambda c: c.gate.clone().sigmoid_()),
        ],
    }
    if dtype is torch.float32:  # whose last ulp is to be eager's
        options["root"] = [choice for choice in options["root"] if "rsqrt" in choice[0]]
    for name, choices in options.items():
        _set(program, name, pick(choices))
    if gate_first:
        _put_gate_first(program, pick)
    _choose_weight(program, pick)
    if gate_first:
        _set(program, "product", ("gate was first", lambda c: c.weighted))
        program.names["activated"] += " in h"
    else:
        _set(
            program,
            "product",
            pick(
                [
                    ("weighted * activated", lambda c: c.weighted * c.activated),
                    ("activated * weighted", lambda c: c.activated * c.weighted),
                    ("torch.mul", lambda c: torch.mul(c.activated, c.weighted)),
                ]
            ),
        )
    out = dtype if dtype in LOW else pick([torch.bfloat16, torch.float32])
    name, cast = _to(None, out, pick, lambda c: c.x.to(out))
    _set(program, "y", (f"{name} {out}", lambda c: cast(c, c.product)))


def _put_gate_first(program: Program, pick: Pick) -> None:
    gate, activated, widen = program.steps["gate"], program.steps["activated"], program.steps["h"]
    rounds = pick([False, True]) and program.dtype in LOW

    def h(c: Any) -> Any:
        c.gate = gate(c)
        product = widen(c) * activated(c)
        return product.to(program.dtype).float() if rounds else product.float()

    _set(program, "h", (f"gate first, rounded: {rounds}", h))
    program.steps["gate"] = program.steps["activated"] = lambda c: None


def _choose_weight(program: Program, pick: Pick) -> None:
    dtype = program.dtype
    rounds = dtype in LOW and pick([True, False])
    name, cast = _to(None, dtype, pick, lambda c: c.x)
    _set(program, "narrow", (name, lambda c: cast(c, c.norm)) if rounds else ("fp32", lambda c: c.norm))
    weighted = [
        ("w * n", lambda c: c.w * c.narrow),
        ("n * w", lambda c: c.narrow * c.w),
        ("torch.mul", lambda c: torch.mul(c.w, c.narrow)),
        ("w.float()", lambda c: c.w.float() * c.narrow),
        ("(1 + w) * n", lambda c: (1.0 + c.w) * c.narrow),
        ("n * (w.float() + 1)", lambda c: c.narrow * (c.w.float() + 1.0)),
        ("w.view", lambda c: c.w.view(1, -1) * c.narrow),
        ("no weight", lambda c: c.narrow),
        ("bias", lambda c: c.w * c.narrow + c.more[0]),
        ("bias first", lambda c: torch.add(c.more[0].float(), c.narrow * c.w)),
        ("bias + 0.5", lambda c: c.narrow * c.w + (c.more[0] + 0.5)),
    ]
    _set(program, "weighted", pick(weighted))


def _choose_layout(program: Program, pick: Pick) -> None:
    heads, width = program.heads, program.head_dim
    hidden = heads * width
    program.options["group"] = group = pick([128, 128, 128, hidden, 64 if hidden % 64 == 0 else 128])
    count = hidden // group
    rows = [
        ("reshape", lambda c: c.y.reshape(-1, hidden)),
        ("reshaped twice", lambda c: c.y.reshape(-1, heads, width).reshape(-1, hidden)),
        ("unflatten flatten", lambda c: c.y.unflatten(0, (-1, heads)).flatten(1)),
        ("contiguous", lambda c: c.y.contiguous().view(-1, heads, width).reshape(-1, heads * width)),
        ("unsqueezed", lambda c: c.y.reshape(1, -1, hidden).squeeze(0)),
        ("clone", lambda c: c.y.reshape(-1, hidden).clone()),
        ("[None]", lambda c: c.y.reshape(-1, hidden)[None][0:1].squeeze(0)),
    ]
    groups = [
        ("view", lambda c: c.rows.view(-1, count, group)),
        ("reshape", lambda c: c.rows.reshape(-1, count, group)),
        ("unflatten", lambda c: c.rows.unflatten(-1, (count, group))),
        ("unflatten -1", lambda c: c.rows.unflatten(1, (-1, group))),
        ("4-D", lambda c: c.rows.view(-1, 1, count, group)),
        ("flat", lambda c: c.rows.reshape(-1, group)),
        ("[:]", lambda c: c.rows.view(-1, count, group)[:]),
    ]
    if group == hidden:
        groups.append(("rows", lambda c: c.rows))
    _set(program, "rows", pick(rows))
    _set(program, "groups", pick(groups))


def _choose_quant(program: Program, pick: Pick) -> None:
    if pick([False, False, False, True]):
        return _choose_own_op(program, pick)
    for name, choices in _MEASURES.items():
        _set(program, name, pick(choices))
    narrow = pick([True, False]) if program.dtype in LOW else False
    _set(program, "wide", ("narrow", lambda c: c.amax) if narrow else ("float", lambda c: c.amax.float()))
    kind = pick(_FORMULAS)
    for name in ("unfloored", "scale", "scaled"):
        _set(program, name, (kind[0], kind[1][name]))
    wide = pick([True, True, False])
    _set(program, "data", ("float", lambda c: c.groups.float()) if wide else ("as it is", lambda c: c.groups))
    _set(program, "clamped", pick(_CLAMPS))
    name, cast = pick(
        [
            ("to", lambda v: v.to(FP8)),
            ("to(dtype=)", lambda v: v.to(dtype=FP8)),
            ("type", lambda v: v.type(FP8)),
        ]
    )
    _set(program, "codes", (name, lambda c: cast(c.clamped)))
    hidden = program.heads * program.head_dim
    _set(
        program,
        "result",
        pick(
            [
                ("codes, scale", lambda c: (c.codes, c.scale)),
                ("rows", lambda c: (c.codes.view(-1, hidden), c.scale.reshape(-1, hidden // program.options["group"]))),
                ("codes alone", lambda c: (c.codes.flatten(),)),
                ("scale twice", lambda c: (c.scale.squeeze(-1), c.codes, c.scale * 2)),
                ("both scales", lambda c: (c.codes, c.scale, c.unfloored)),
            ]
        ),
    )
    return None


def _choose_own_op(program: Program, pick: Pick) -> None:
    group, hidden = program.options["group"], program.heads * program.head_dim
    token = group == hidden and pick([True, False])
    spec = encode_quant(pick(_OWN_SPECS), FP8)
    result = pick(
        [
            ("both", lambda op: op),
            ("codes alone", lambda op: (op[0],)),
            ("views", lambda op: (op[0].view(-1, group), op[1].flatten())),
        ]
    )

    def call(c: Any) -> tuple[Any, Any]:
        results = torch.ops.gdn_backend.fp8_quant(c.rows, -1 if token else group, spec)
        return results[0], results[1]

    for name in ("groups", "magnitude", "amax", "wide", "unfloored", "scale", "data", "scaled", "clamped", "codes"):
        program.steps[name] = lambda c: None
        program.names.pop(name, None)
    _set(
        program,
        "codes",
        (f"own op, per token: {token}, {spec}", call),
    )
    _set(program, "result", (result[0], lambda c: result[1](c.codes)))


_OWN_SPECS = [
    QuantSpec(),
    QuantSpec(scale_steps=(("max", 1e-4), ("div", 448.0)), factor_steps=(("reciprocal",),), operation="multiply"),
    QuantSpec(scale_steps=(("div", 448.0), ("max", 1e-10), ("exp2_ceil_log2",)), clamp=448.0),
]

_MEASURES: dict[str, list[tuple[str, Step]]] = {
    "magnitude": [
        ("abs()", lambda c: c.groups.abs()),
        ("torch.abs", lambda c: torch.abs(c.groups)),
        ("float().abs()", lambda c: c.groups.float().abs()),
        ("abs().float()", lambda c: c.groups.abs().float()),
    ],
    "amax": [
        ("amax(-1, keepdim)", lambda c: c.magnitude.amax(-1, keepdim=True)),
        ("amax(dim=(-1,), keepdim)", lambda c: c.magnitude.amax(dim=(-1,), keepdim=True)),
        ("torch.amax unsqueeze", lambda c: torch.amax(c.magnitude, -1).unsqueeze(-1)),
        ("amax[..., None]", lambda c: c.magnitude.amax(dim=-1)[..., None]),
        ("max(dim, keepdim)[0]", lambda c: c.magnitude.max(dim=-1, keepdim=True)[0]),
        ("torch.max()[0] unsqueeze", lambda c: torch.max(c.magnitude, -1)[0].unsqueeze(-1)),
    ],
}


def _formula(unfloored: Step, scale: Step, multiplies: bool = False) -> dict[str, Step]:
    def divide(c: Any) -> Any:
        return c.data / c.scale

    def multiply(c: Any) -> Any:
        return c.data * (1.0 / c.scale)

    return {"unfloored": unfloored, "scale": scale, "scaled": multiply if multiplies else divide}


_FORMULAS: list[tuple[str, dict[str, Step]]] = [
    ("s = clamp(m / 448)", _formula(lambda c: c.wide / 448.0, lambda c: c.unfloored.clamp(min=FLOOR))),
    ("s = clamp(m) / 448", _formula(lambda c: c.wide.clamp(min=1e-4), lambda c: c.unfloored / 448.0)),
    ("no floor", _formula(lambda c: c.wide / 448.0, lambda c: c.unfloored)),
    ("m * (1 / 448)", _formula(lambda c: c.wide * (1 / 448.0), lambda c: c.unfloored.clamp_min(1e-10))),
    ("m + eps", _formula(lambda c: (c.wide + 1e-8) / 448.0, lambda c: c.unfloored)),
    ("div_ clamp_", _formula(lambda c: c.wide.clone().div_(448.0), lambda c: c.unfloored.clone().clamp_(min=FLOOR))),
    ("clamp_min_", _formula(lambda c: c.wide.clone(), lambda c: (c.unfloored / 448.0).clamp_min_(FLOOR))),
    ("torch.div clip", _formula(lambda c: torch.div(c.wide, 448.0), lambda c: torch.clip(c.unfloored, FLOOR, 1e4))),
    (
        "power of two",
        _formula(lambda c: c.wide.float() / 448.0, lambda c: c.unfloored.clamp(min=1e-10).log2().ceil().exp2()),
    ),
    ("reciprocal", _formula(lambda c: c.wide.clamp(min=1e-4), lambda c: c.unfloored / 448.0, multiplies=True)),
    (
        "448 / m",
        {
            "unfloored": lambda c: c.wide.float().clamp(min=1e-4),
            "scale": lambda c: 448.0 / c.unfloored,
            "scaled": lambda c: c.data * c.scale,
        },
    ),
    (
        "stored before the floor",
        {
            "unfloored": lambda c: c.wide.float() / 448.0,
            "scale": lambda c: c.unfloored * 1.0,
            "scaled": lambda c: c.data / c.scale.clamp(min=1e-12),
        },
    ),
    (
        "reciprocal()",
        {
            "unfloored": lambda c: c.wide.float() / 448.0,
            "scale": lambda c: torch.clamp(c.unfloored, min=FLOOR),
            "scaled": lambda c: torch.mul(c.scale.reciprocal(), c.data),
        },
    ),
]

_CLAMPS: list[tuple[str, Step]] = [
    ("clamp", lambda c: c.scaled.clamp(-448.0, 448.0)),
    ("none", lambda c: c.scaled),
    ("clamp_", lambda c: c.scaled.clamp_(-448.0, 448.0)),
    ("torch.clamp(min=, max=)", lambda c: torch.clamp(c.scaled, min=-448.0, max=448.0)),
    ("two halves", lambda c: c.scaled.clamp(min=-448.0).clamp(max=448.0)),
    ("ints", lambda c: c.scaled.clamp(-448, 448)),
]
