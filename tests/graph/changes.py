"""Single changes to a generated program, which may change its meaning: what then fuses still has to be eager's."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from tests.graph.program import Pick, Program
from tests.graph.sites import Step
from tests.graph.tracing import call

#: What one step's value may be turned into: some keep the meaning, most do not.
_WRAPS: list[tuple[str, Callable[[Any], Any]]] = [
    ("clone", lambda v: v.clone()),
    ("contiguous", lambda v: v.contiguous()),
    ("negated", lambda v: -v),
    ("abs", lambda v: v.abs()),
    ("abs_", lambda v: v.abs_()),
    ("+ 0.0", lambda v: v + 0.0),
    ("* 1.0", lambda v: v * 1.0),
    ("* 2.0", lambda v: v * 2.0),
    ("+ 1", lambda v: v + 1),
    ("mul_(2)", lambda v: v.mul_(2)),
    ("clamp", lambda v: v.clamp(-1.0, 1.0)),
    ("clamp(min=0)", lambda v: v.clamp(min=0.0)),
    ("bfloat16", lambda v: v.to(torch.bfloat16)),
    ("float16", lambda v: v.to(torch.float16)),
    ("through bfloat16", lambda v: v.to(torch.bfloat16).float()),
    ("through float16", lambda v: v.to(torch.float16).to(torch.float32)),
    ("float64", lambda v: v.double()),
    ("through int", lambda v: v.to(torch.int32).float()),
    ("square", lambda v: v * v),
    ("sqrt", lambda v: v.abs().sqrt()),
    ("flip", lambda v: v.flip(-1)),
    ("flip rows", lambda v: v.flip(0)),
    ("roll", lambda v: v.roll(1, -1)),
    ("transposed", lambda v: v.transpose(0, 1).reshape(v.shape)),
    ("transposed back", lambda v: v.transpose(0, 1).transpose(0, 1)),
    ("column-major", lambda v: v.transpose(0, 1).contiguous().transpose(0, 1)),
    ("row order kept", lambda v: v.reshape(-1).view(v.shape)),
    ("first value", lambda v: v[:1].expand(v.shape)),
    ("gelu", F.gelu),
    ("tanh", torch.tanh),
    ("detach", lambda v: v.detach()),
    ("mean of rows", lambda v: v.mean(0, keepdim=True).expand(v.shape)),
    ("nan_to_num", torch.nan_to_num),
    ("masked", lambda v: torch.where(v > 0, v, v * 0)),
]

#: Writes to the memory of an earlier value, between two steps.
_WRITES: list[tuple[str, Callable[[Any], Any]]] = [
    ("mul_", lambda v: v.mul_(2)),
    ("zero_", lambda v: v.zero_()),
    ("add_ in a view", lambda v: v.view(-1)[:3].add_(1)),
    ("view of a view", lambda v: v.unsqueeze(0).squeeze(0)[0].mul_(3)),
    ("copy_", lambda v: v.copy_(v * 2)),
    ("setitem", lambda v: call(operator.setitem, v, 0, 1.0)),
    ("setitem all", lambda v: call(operator.setitem, v, slice(None), v + 1)),
    ("out=", lambda v: torch.add(v, 1.0, out=v)),
    ("silu inplace", lambda v: F.silu(v, inplace=True)),
    ("isub", lambda v: call(operator.isub, v, 1)),
    ("foreach", lambda v: torch._foreach_add_([v], 1.0)),
    ("detached", lambda v: v.detach().add_(1)),
    ("fill_diagonal_", lambda v: v.fill_diagonal_(0.5)),
    ("aten", lambda v: torch.ops.aten.mul_.Tensor(v, v)),
]

_INPUTS = ("x", "z", "w")


def changed(program: Program, pick: Pick) -> Program:
    """``program`` with one thing done to it; it may or may not mean the same: eager decides."""
    kind = pick(["wrap", "wrap", "write", "write", "return", "reread", "swap", "keep"])
    names = [name for name in program.steps if name != "result"]
    if kind == "wrap":
        step, (what, wrap) = pick(names), pick(_WRAPS)
        inner = program.steps[step]
        program.steps[step] = lambda c: _apply(wrap, inner(c))
        program.change = f"{what} of {step}"
    elif kind == "write":
        after, (what, write) = pick(names), pick(_WRITES)
        target = pick([*_INPUTS, *names[: names.index(after) + 1]])
        _write_after(program, after, target, write)
        program.change = f"{what} on {target} after {after}"
    elif kind == "return":
        extra, result = pick([*_INPUTS, *names]), program.steps["result"]
        program.steps["result"] = lambda c: (*result(c), _alive(getattr(c, extra)))
        program.change = f"{extra} returned"
    elif kind == "keep":  # an earlier view or copy of a value, returned
        step, result = pick(names), program.steps["result"]
        inner, kept = program.steps[step], pick([lambda v: v.view(-1), lambda v: v * 1, lambda v: v.detach()])

        def keeping(c: Any) -> Any:
            value = inner(c)
            c.kept = None if value is None or isinstance(value, tuple) else kept(value)
            return value

        program.steps[step] = keeping
        program.steps["result"] = lambda c: (*result(c), _alive(c.kept))
        program.change = f"a view or copy of {step} returned"
    elif kind == "reread":  # a step that reads another value than it should
        step = pick(names[1:])
        wrong, right = pick([*_INPUTS, *names[: names.index(step)]]), pick([*_INPUTS, *names[: names.index(step)]])
        inner = program.steps[step]
        program.steps[step] = lambda c: _with(c, right, getattr(c, wrong), inner)
        program.change = f"{step} reads {wrong} for {right}"
    else:  # two inputs or values take each other's place from here on
        step = pick(names)
        one, other = pick([("x", "z"), ("z", "x"), ("w", "x"), ("groups", "data"), ("unfloored", "scale")])
        inner = program.steps[step]
        program.steps[step] = lambda c: _with(c, one, getattr(c, other, None), inner)
        program.change = f"{step} takes {other} for {one}"
    return program


def _apply(wrap: Callable[[Any], Any], value: Any) -> Any:
    return value if value is None or isinstance(value, tuple) else wrap(value)


def _alive(value: Any) -> Any:
    return value[0] if isinstance(value, tuple) else value


def _write_after(program: Program, after: str, target: str, write: Callable[[Any], Any]) -> None:
    inner = program.steps[after]

    def step(c: Any) -> Any:
        value = inner(c)
        written = value if target == after else getattr(c, target)
        if written is not None and not isinstance(written, tuple):
            write(written)
        return value

    program.steps[after] = step


def _with(c: Any, name: str, value: Any, step: Step) -> Any:
    """``step`` run while ``c.name`` is ``value``."""
    saved = getattr(c, name, None)
    setattr(c, name, value)
    result = step(c)
    setattr(c, name, saved)
    return result
