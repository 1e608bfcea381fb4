"""Spellings of the quantisation, of which :func:`choose_quant` picks one for each step of a program."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from gdn_backend.ops import fp8_quant  # noqa: F401  (registers the op)
from gdn_backend.ops.call import encode_quant
from gdn_backend.ops.spec import QuantSpec
from tests.graph import quant_ops  # registers stand-ins for other projects' ops
from tests.graph.program import LOW, Pick, Program
from tests.graph.sites import FP8, UNQUANTISED, Step
from tests.graph.tracing import call

FLOOR = 1.0 / (448.0 * 512.0)
aten = torch.ops.aten


def choose_quant(program: Program, pick: Pick) -> None:
    """Every step after ``rows``: decomposed, our own op, or another project's."""
    kind = pick(["decomposed"] * 6 + ["own op"] * 2 + ["other op"])
    if kind == "own op":
        _choose_own_op(program, pick)
    elif kind == "other op" and program.options["group"] == 128:
        _choose_other_op(program, pick)
    else:
        _choose_decomposed(program, pick)


def _choose_decomposed(program: Program, pick: Pick) -> None:
    group, hidden = program.options["group"], program.hidden
    if not program.dynamic and pick([False] * 7 + [True]):
        _go_through_a_padded_buffer(program)
    flat = pick([False, False, True])  # scales [rows, groups] that are unsqueezed where the data is divided
    program.choose("magnitude", pick(_MAGNITUDES))
    program.choose("amax", pick(_FLAT_MAXIMA if flat else _MAXIMA))
    narrow = pick([True, False]) if program.dtype in LOW else False
    program.choose("wide", ("narrow", lambda c: c.amax) if narrow else ("float", lambda c: c.amax.float()))
    kind, formula = pick(_FORMULAS)
    for name in ("unfloored", "scale"):
        program.choose(name, (kind, formula[name]))
    divide = formula.get("scaled") or pick(_DIVISIONS)
    at_use = pick(_UNSQUEEZED if flat else _AT_USE)
    program.choose("scaled", (f"{kind}, {divide[0]}, {at_use[0]}", lambda c: divide[1](c, at_use[1](c, c.scale))))
    wide = pick([True, True, False])
    program.choose("data", ("float", lambda c: c.groups.float()) if wide else ("as it is", lambda c: c.groups))
    program.choose("clamped", pick(_CLAMPS))
    name, cast = pick(_CASTS)
    program.choose("codes", (name, lambda c: cast(c.clamped)))
    results: list[tuple[str, Step]] = [
        ("codes, scale", lambda c: (c.codes, c.scale)),
        ("rows", lambda c: (c.codes.view(-1, hidden), c.scale.reshape(-1, hidden // group))),
        ("codes alone", lambda c: (c.codes.flatten(),)),
        ("scale twice", lambda c: (c.scale.squeeze(-1), c.codes, c.scale * 2)),
        ("both scales", lambda c: (c.codes, c.scale, c.unfloored)),
        ("columns", lambda c: (c.codes, c.scale.reshape(-1, hidden // group).t().contiguous().t())),
        ("columns by permute", lambda c: (c.codes, _permuted(c.scale.reshape(-1, hidden // group)))),
        ("transposed scales", lambda c: (c.codes.view(-1, hidden), c.scale.view(-1, hidden // group).t())),
        ("first codes", lambda c: (c.codes.view(-1, hidden)[:1], c.scale)),
    ]
    program.choose("result", pick(results))


def _permuted(scales: Any) -> Any:
    return scales.permute(-1, -2).contiguous().permute(-1, -2)


def _go_through_a_padded_buffer(program: Program) -> None:
    """As DeepGEMM's cast does, whose padding is none here."""
    tokens, hidden, groups = program.tokens, program.hidden, program.steps["groups"]

    def padded(c: Any) -> Any:
        rows = c.rows
        buffer = rows.new_empty((tokens, hidden)).fill_(0)
        call(operator.setitem, buffer, (slice(None), slice(None, hidden)), rows.view(tokens, hidden))
        c.rows = buffer
        value = groups(c)
        c.rows = rows
        return value

    program.choose("groups", (f"padded, {program.names['groups']}", padded))


def _choose_own_op(program: Program, pick: Pick) -> None:
    group, hidden = program.options["group"], program.hidden
    token = group == hidden and pick([True, False])
    spec = encode_quant(pick(_OWN_SPECS), FP8)

    def call_op(c: Any) -> tuple[Any, Any]:
        results = torch.ops.gdn_backend.fp8_quant(c.rows, -1 if token else group, spec)
        return results[0], results[1]

    _end_in_an_op(program, pick, f"own op, per token: {token}, {spec}", call_op)


def _choose_other_op(program: Program, pick: Pick) -> None:
    ops = torch.ops
    tokens, hidden = program.tokens, program.hidden

    def write(c: Any, column: bool = False, ue8m0: bool = False) -> tuple[Any, Any]:
        rows = c.rows.view(tokens, hidden)
        codes = torch.empty_like(rows, dtype=FP8)
        if column:
            scales = rows.new_empty((hidden // 128, tokens), dtype=torch.float32).permute(-1, -2)
        else:
            scales = rows.new_empty((tokens, hidden // 128), dtype=torch.float32)
        ops._C.per_token_group_fp8_quant(rows, codes, scales, 128, 1e-10, -448.0, 448.0, ue8m0)
        return codes, scales

    def write_tokens(c: Any) -> tuple[Any, Any]:
        rows = c.rows.view(tokens, hidden)
        codes, scales = rows.new_empty((tokens, hidden), dtype=FP8), rows.new_empty((tokens, 1), dtype=torch.float32)
        ops._C.dynamic_per_token_scaled_fp8_quant(codes, rows, scales, None)
        return codes, scales

    choices: list[tuple[str, Step]] = [
        ("vLLM's Triton op", lambda c: ops.vllm.triton_per_token_group_quant_fp8(c.rows, 128)),
        ("AITER's op", lambda c: ops.vllm.rocm_aiter_group_fp8_quant.default(c.rows, 128)),
        ("the hub's op", lambda c: ops.finegrained_fp8_0a1b2c3.fp8_act_quant(c.rows, 128)),
    ]
    if not program.dynamic:
        choices += [
            ("vLLM's writer", write),
            ("vLLM's writer, columns", lambda c: write(c, column=True)),
            ("vLLM's writer, UE8M0", lambda c: write(c, ue8m0=True)),
            ("vLLM's writer, tokens", write_tokens),
        ]
    name, op = pick(choices)

    def call_op(c: Any) -> tuple[Any, Any]:
        results = op(c)
        return results[0], results[1]

    _end_in_an_op(program, pick, name, call_op)


def _end_in_an_op(program: Program, pick: Pick, name: str, op: Callable[[Any], tuple[Any, Any]]) -> None:
    for step in UNQUANTISED:
        program.steps[step] = lambda c: None
        program.names.pop(step, None)
    group = program.options["group"]
    results: list[tuple[str, Step]] = [
        ("both", lambda c: c.codes),
        ("codes alone", lambda c: (c.codes[0],)),
        ("views", lambda c: (c.codes[0].view(-1, group), c.codes[1].flatten())),
    ]
    program.choose("codes", (name, op))
    program.choose("result", pick(results))


_OWN_SPECS = [
    QuantSpec(),
    QuantSpec(scale_steps=(("max", 1e-4), ("div", 448.0)), factor_steps=(("reciprocal",),), operation="multiply"),
    QuantSpec(scale_steps=(("div", 448.0), ("max", 1e-10), ("exp2_ceil_log2",)), clamp=448.0),
]

_MAGNITUDES: list[tuple[str, Step]] = [
    ("abs()", lambda c: c.groups.abs()),
    ("torch.abs", lambda c: torch.abs(c.groups)),
    ("float().abs()", lambda c: c.groups.float().abs()),
    ("abs().float()", lambda c: c.groups.abs().float()),
    ("absolute", lambda c: torch.absolute(c.groups)),
    ("aten.abs", lambda c: aten.abs.default(c.groups)),
]

_MAXIMA: list[tuple[str, Step]] = [
    ("amax(-1, keepdim)", lambda c: c.magnitude.amax(-1, keepdim=True)),
    ("amax(dim=(-1,), keepdim)", lambda c: c.magnitude.amax(dim=(-1,), keepdim=True)),
    ("amax(axis=)", lambda c: c.magnitude.amax(axis=-1, keepdims=True)),
    ("aten.amax", lambda c: aten.amax.default(c.magnitude, [-1], True)),
    ("torch.amax unsqueeze", lambda c: torch.amax(c.magnitude, -1).unsqueeze(-1)),
    ("amax[..., None]", lambda c: c.magnitude.amax(dim=-1)[..., None]),
    ("max(dim, keepdim)[0]", lambda c: c.magnitude.max(dim=-1, keepdim=True)[0]),
    ("torch.max()[0] unsqueeze", lambda c: torch.max(c.magnitude, -1)[0].unsqueeze(-1)),
]

_FLAT_MAXIMA: list[tuple[str, Step]] = [
    ("flat amax(-1)", lambda c: c.magnitude.amax(-1)),
    ("flat max(-1)[0]", lambda c: c.magnitude.max(-1)[0]),
    ("flat amax squeezed", lambda c: c.magnitude.amax(-1, keepdim=True).squeeze(-1)),
]

_AT_USE: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("as it is", lambda c, s: s),
    ("as it is", lambda c, s: s),
    ("expanded", lambda c, s: s.expand_as(c.data)),
]

_UNSQUEEZED: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("unsqueezed", lambda c, s: s.unsqueeze(-1)),
    ("[..., None]", lambda c, s: s[..., None]),
    ("unsqueezed and expanded", lambda c, s: s.unsqueeze(-1).expand_as(c.data)),
]

_DIVISIONS: list[tuple[str, Callable[[Any, Any], Any]]] = [
    ("data / s", lambda c, s: c.data / s),
    ("torch.div", lambda c, s: torch.div(c.data, s)),
    ("true_divide", lambda c, s: torch.true_divide(c.data, s)),
    ("div(other=)", lambda c, s: c.data.div(other=s)),
    ("clone div_", lambda c, s: c.data.clone().div_(s)),
    ("data * (1.0 / s)", lambda c, s: c.data * (1.0 / s)),
    ("(1 / s) * data", lambda c, s: (1 / s) * c.data),
    ("reciprocal()", lambda c, s: torch.mul(s.reciprocal(), c.data)),
    ("torch.reciprocal", lambda c, s: c.data * torch.reciprocal(s)),
]

_FORMULAS: list[tuple[str, dict[str, Any]]] = [
    ("s = clamp(m / 448)", {"unfloored": lambda c: c.wide / 448.0, "scale": lambda c: c.unfloored.clamp(min=FLOOR)}),
    ("s = clamp(m) / 448", {"unfloored": lambda c: c.wide.clamp(min=1e-4), "scale": lambda c: c.unfloored / 448.0}),
    ("clamp(1e-4)", {"unfloored": lambda c: c.wide.clamp(1e-4), "scale": lambda c: c.unfloored / 448.0}),
    ("no floor", {"unfloored": lambda c: c.wide / 448.0, "scale": lambda c: c.unfloored}),
    ("m * (1 / 448)", {"unfloored": lambda c: c.wide * (1 / 448.0), "scale": lambda c: c.unfloored.clamp_min(1e-10)}),
    ("m + eps", {"unfloored": lambda c: (c.wide + 1e-8) / 448.0, "scale": lambda c: c.unfloored}),
    (
        "div_ clamp_",
        {"unfloored": lambda c: c.wide.clone().div_(448.0), "scale": lambda c: c.unfloored.clone().clamp_(min=FLOOR)},
    ),
    ("clamp_min_", {"unfloored": lambda c: c.wide.clone(), "scale": lambda c: (c.unfloored / 448.0).clamp_min_(FLOOR)}),
    (
        "torch.div clip",
        {"unfloored": lambda c: torch.div(c.wide, 448.0), "scale": lambda c: torch.clip(c.unfloored, FLOOR, 1e4)},
    ),
    (
        "power of two",
        {
            "unfloored": lambda c: c.wide.float() / 448.0,
            "scale": lambda c: c.unfloored.clamp(min=1e-10).log2().ceil().exp2(),
        },
    ),
    (
        "power of two by bits",
        {
            "unfloored": lambda c: c.wide.float().clamp(1e-4) / 448.0,
            "scale": lambda c: quant_ops.ceil_to_ue8m0(c.unfloored),
        },
    ),
    (
        "448 / m",
        {
            "unfloored": lambda c: c.wide.float().clamp(min=1e-4),
            "scale": lambda c: 448.0 / c.unfloored,
            "scaled": ("data * s", lambda c, s: c.data * s),
        },
    ),
    (
        "stored before the floor",
        {
            "unfloored": lambda c: c.wide.float() / 448.0,
            "scale": lambda c: c.unfloored * 1.0,
            "scaled": ("data / clamp(s)", lambda c, s: c.data / s.clamp(min=1e-12)),
        },
    ),
]

_CLAMPS: list[tuple[str, Step]] = [
    ("clamp", lambda c: c.scaled.clamp(-448.0, 448.0)),
    ("none", lambda c: c.scaled),
    ("clamp_", lambda c: c.scaled.clamp_(-448.0, 448.0)),
    ("torch.clamp(min=, max=)", lambda c: torch.clamp(c.scaled, min=-448.0, max=448.0)),
    ("two halves", lambda c: c.scaled.clamp(min=-448.0).clamp(max=448.0)),
    ("clamp_max, clamp_min", lambda c: c.scaled.clamp_max(448.0).clamp_min(-448.0)),
    ("ints", lambda c: c.scaled.clamp(-448, 448)),
    ("aten.clamp", lambda c: aten.clamp.default(c.scaled, -448.0, 448.0)),
]

_CASTS: list[tuple[str, Callable[[Any], Any]]] = [
    ("to", lambda v: v.to(FP8)),
    ("to(dtype=)", lambda v: v.to(dtype=FP8)),
    ("type", lambda v: v.type(FP8)),
    ("copy_ into a buffer", lambda v: torch.empty_like(v, dtype=FP8).copy_(v)),
]
