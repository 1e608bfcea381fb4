"""The one builder of the graph tests: a site as a list of named steps, of which a test replaces those it is about.

Each step is a function of the values so far and returns the next; ``site(root=lambda c: c.v.pow(-0.5))`` is the base
with one fact changed. ``c`` holds the inputs ``x``, ``z``, ``w`` and every earlier step's value under the step's name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

HEADS, HEAD_DIM, GROUP = 4, 128, 128
HIDDEN = HEADS * HEAD_DIM
FP8 = torch.float8_e4m3fn

Step = Callable[[Any], Any]

#: Qwen3-Next's norm and a quantisation in groups, as F-rows' BASE: x, z [T * H, D]; codes [T, H * D]; scales [T, G].
BASE: dict[str, Step] = {
    "h": lambda c: c.x.float(),
    "square": lambda c: c.h.pow(2),
    "mean": lambda c: c.square.mean(-1, keepdim=True),
    "variance": lambda c: c.mean + 1e-6,
    "root": lambda c: torch.rsqrt(c.variance),
    "norm": lambda c: c.h * c.root,
    "narrow": lambda c: c.norm.to(c.x.dtype),
    "weighted": lambda c: c.w * c.narrow,
    "gate": lambda c: c.z.float(),
    "activated": lambda c: F.silu(c.gate),
    "product": lambda c: c.weighted * c.activated,
    "y": lambda c: c.product.to(c.x.dtype),
    "rows": lambda c: c.y.reshape(-1, HIDDEN),
    "groups": lambda c: c.rows.view(-1, HIDDEN // GROUP, GROUP),
    "magnitude": lambda c: c.groups.abs(),
    "amax": lambda c: c.magnitude.amax(-1, keepdim=True),
    "wide": lambda c: c.amax.float(),
    "unfloored": lambda c: c.wide / 448.0,
    "scale": lambda c: c.unfloored.clamp(min=1.0 / (448.0 * 512.0)),
    "data": lambda c: c.groups.float(),
    "scaled": lambda c: c.data / c.scale,
    "clamped": lambda c: c.scaled.clamp(-448.0, 448.0),
    "codes": lambda c: c.clamped.to(FP8),
    "result": lambda c: (c.codes.view(-1, HIDDEN), c.scale.squeeze(-1)),
}

#: The base up to ``rows``, for a ``result`` that quantises them itself.
UNQUANTISED: dict[str, Step] = dict.fromkeys(list(BASE)[list(BASE).index("rows") + 1 : -1], lambda c: None)

#: One fp32 chain with one rounding, as vLLM's forward_static and Kimi have it.
ONE_ROUNDING: dict[str, Step] = {"narrow": lambda c: c.norm, "weighted": lambda c: c.norm * c.w.float()}

#: The gate first, as Mamba2 has it: the product is normed.
GATE_FIRST: dict[str, Step] = {
    "h": lambda c: c.x.float() * F.silu(c.z.float()),
    "activated": lambda c: c.weighted,
    "product": lambda c: c.weighted,
}


class Values:
    """The inputs and every step's value by name (a class of our own: Dynamo cannot trace ``types.SimpleNamespace``)."""

    result: Any

    def __init__(self, x: Any, z: Any, w: Any, more: tuple[Any, ...]) -> None:
        self.x, self.z, self.w, self.more = x, z, w, more


def run_steps(steps: dict[str, Step], x: Any, z: Any, w: Any, *more: Any) -> Any:
    c = Values(x, z, w, more)
    for name, step in steps.items():
        setattr(c, name, step(c))
    return c.result


class Site(nn.Module):
    """``site(x, z, *more)``: the steps in order; ``more`` are further inputs, ``c.more``."""

    def __init__(self, steps: dict[str, Step], weight: torch.Tensor) -> None:
        super().__init__()
        self.steps = steps
        self.weight = nn.Parameter(weight, requires_grad=weight.is_floating_point())

    def forward(self, x: torch.Tensor, z: torch.Tensor, *more: Any) -> Any:
        return run_steps(self.steps, x, z, self.weight, *more)


def site(
    *changes: dict[str, Step], weight: torch.Tensor | None = None, dtype: torch.dtype = torch.bfloat16, **steps: Step
) -> Site:
    """The base with ``changes`` and ``steps`` in place of its own; an unknown step is an error."""
    changed = {name: step for change in (*changes, steps) for name, step in change.items()}
    unknown = changed.keys() - BASE.keys()
    assert not unknown, f"unknown steps {unknown}"
    return Site({**BASE, **changed}, make_weight(dtype=dtype) if weight is None else weight)


def make_weight(size: int = HEAD_DIM, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.rand(size) + 0.5).to(dtype)


def make_inputs(
    tokens: int = 3,
    dtype: torch.dtype = torch.bfloat16,
    gate_dtype: torch.dtype | None = None,
    head_dim: int = HEAD_DIM,
    heads: int = HEADS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x and z ``[T * H, D]``."""
    x, z = (torch.randn(tokens * heads, head_dim) for _ in range(2))
    return x.to(dtype), z.to(gate_dtype or dtype)
