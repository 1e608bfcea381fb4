"""A generated program: its inputs, its steps, and what they are called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.graph.sites import Step, run_steps

Pick = Callable[[Sequence[Any]], Any]

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
    shape: str = (
        "flat"  # of the norm: "flat" [T * H, D], "heads" [T, H, D], "batch" [1, T, H, D], "groups" [T, H/2, 2, D]
    )
    per_head_weight: bool = False  # the weight is [H * D]
    values: str = "normal"
    dynamic: bool = False
    change: str = ""  # what was done to it to change its meaning
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def rounds_otherwise(self) -> bool:
        """True where the last ulp of exp or rsqrt may differ from the fused op's."""
        return self.strides == "transposed" or self.names.get("root") in ("1/sqrt", "sqrt.reciprocal", "pow(-0.5)")

    @property
    def hidden(self) -> int:
        return self.heads * self.head_dim

    def choose(self, name: str, choice: tuple[str, Step]) -> None:
        """Sets the step ``name`` to a spelling."""
        self.names[name], self.steps[name] = choice

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
        size = self.hidden if self.per_head_weight else width
        w, b = (torch.rand(size, generator=generator) for _ in range(2))
        return [x, z, (w + 0.5).to(self.weight_dtype), b.to(self.weight_dtype)]

    def describe(self) -> str:
        facts = (self.heads, self.head_dim, self.tokens, self.dtype, self.gate_dtype, self.weight_dtype, self.strides)
        weight = " a weight for each head," if self.per_head_weight else ""
        return f"{facts} {self.shape},{weight} {self.values} dynamic={self.dynamic} change={self.change!r} {self.names}"


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
