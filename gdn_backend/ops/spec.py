"""What one fused op computes: a frozen, hashable, JSON-ready description, shared by matcher, op and kernels.

The arithmetic, for one token whose heads are merged into a row of ``hidden_size = H * D`` values (all steps in fp32
unless a rounding point says otherwise; ``|p`` marks the rounding point ``p``)::

    a = act(gate)|activation                                    act is silu or sigmoid
    norm before gate:   n = (x * rsqrt(mean(x²) + eps))|norm
                        m = (n * (weight + weight_offset)|offset)|weight
                        y = ((m + bias)|bias * a)|output
    gate before norm:   g = (x * a)|gated
                        n = (g * rsqrt(mean(g²) + eps))|norm
                        m = (n * (weight + weight_offset)|offset)|weight
                        y = ((m + bias)|bias)|output

``mean`` runs over consecutive pieces of ``norm_size`` values of the row; ``weight`` and ``bias`` repeat along the row
with their own length. Then, for each consecutive piece of ``group_size`` values of the row::

    scale  = scale_steps(max(|y|))                              stored, fp32
    factor = factor_steps(scale)
    codes  = clamp(y / factor  or  y * factor)|quotient  cast to FP8
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

Activation = Literal["silu", "sigmoid"]
Step = tuple[str, float | str] | tuple[str]

#: Memory of the scales ``[T, G]``: strides ``(G, 1)``, ``(1, T)``, or ``(1, T')`` with T' the next multiple of 4, for
#: which a column starts at 16 bytes, as the TMA of NVIDIA's matmuls wants it.
ScaleLayout = Literal["row", "column", "column_tma"]

#: How values become codes: divided by the factor, correctly rounded or by Triton's ``/``, or multiplied by it.
Operation = Literal["divide", "divide_triton", "multiply"]

#: Rounding points in the order of the chain; an entry of ``roundings`` is ``"point:dtype"``, e.g. ``"norm:bfloat16"``.
ROUNDING_POINTS = ("activation", "gated", "norm", "offset", "weight", "bias", "output")

#: Steps that turn a group's largest magnitude into its scale, and the scale into the factor that codes are made with.
#: Each works on fp32; all but ``ceil_pow2_bits`` pass NaN on.
#:
#: ``("max", v)``: raise to at least v. ``("min", v)``: lower to at most v. ``("add", v)``, ``("mul", v)``: as named.
#: ``("div", v)``: what eager does for tensor / Python number: a division on the CPU, a product with fp32(1/v) on a GPU
#: (``div_true_kernel_cuda``). ``("div_rn", v)``: a division, correctly rounded, as in CUDA kernels.
#: ``("div_triton", v)``: Triton's ``/``, which is not correctly rounded on a GPU.
#: ``("reciprocal",)``: 1/value. ``("round", dtype)``: to that dtype and back.
#: ``("exp2_ceil_log2",)``: UE8M0 by logarithm. ``("ceil_pow2_bits",)``: UE8M0 by exponent bits, held to 2^-126 .. 2^127
#: (zero, infinity and NaN too), as DeepGEMM does it.
DIVISION_STEPS = ("div", "div_rn", "div_triton")
STEP_NAMES = ("max", "min", "add", "mul", *DIVISION_STEPS, "reciprocal", "round", "exp2_ceil_log2", "ceil_pow2_bits")
UE8M0_STEPS = ("exp2_ceil_log2", "ceil_pow2_bits")

FP8_DTYPES: dict[str, torch.dtype] = {
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e4m3fnuz": torch.float8_e4m3fnuz,
}


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> ``"bfloat16"``."""
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    """``"bfloat16"`` -> ``torch.bfloat16``; ValueError for anything that is not a torch dtype."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is not the name of a torch dtype")
    return dtype


@dataclass(frozen=True)
class QuantSpec:
    """How a group's magnitude becomes its scale, and the values become codes.

    ``scale_steps=None`` stands for the formula of vLLM and AITER, ``max(amax / fp8_max, 1 / (fp8_max * 512))``, and
    ``clamp=None`` with ``scale_steps=None`` for ``fp8_max``; :meth:`resolve` writes both out.
    """

    scale_steps: tuple[Step, ...] | None = None
    factor_steps: tuple[Step, ...] = ()
    operation: Operation = "divide"
    clamp: float | None = None  # codes' input is held to [-clamp, clamp]; None: not clamped
    quotient: str | None = None  # dtype that y / factor is rounded to before the FP8 cast; None: fp32
    scale_layout: ScaleLayout = "row"

    def __post_init__(self) -> None:
        for step in (*(self.scale_steps or ()), *self.factor_steps):
            if step[0] not in STEP_NAMES:
                raise ValueError(f"unknown scale step {step!r}; known steps: {', '.join(STEP_NAMES)}")
        for name, kinds in (("operation", get_args(Operation)), ("scale_layout", get_args(ScaleLayout))):
            if getattr(self, name) not in kinds:
                raise ValueError(f"{name}={getattr(self, name)!r}: expected one of {', '.join(kinds)}")

    def resolve(self, fp8_dtype: torch.dtype) -> QuantSpec:
        """The same spec with the default formula written out for ``fp8_dtype``."""
        if self.scale_steps is not None:
            return self
        fp8_max = float(torch.finfo(fp8_dtype).max)
        steps: tuple[Step, ...] = (("div", fp8_max), ("max", 1.0 / (fp8_max * 512.0)))
        return dataclasses.replace(self, scale_steps=steps, clamp=self.clamp or fp8_max)

    def arguments(self) -> tuple[Any, ...]:
        """``QuantSpec(*arguments)`` is this spec; for torch.compile, which passes plain values on but not objects."""
        return (self.scale_steps, self.factor_steps, self.operation, self.clamp, self.quotient, self.scale_layout)

    @staticmethod
    def from_fields(fields: dict[str, Any]) -> QuantSpec:
        """The spec whose ``dataclasses.asdict`` went through JSON, which makes lists of tuples."""
        scale, factor = fields["scale_steps"], fields["factor_steps"]
        frozen = {
            "scale_steps": None if scale is None else tuple(tuple(step) for step in scale),
            "factor_steps": tuple(tuple(step) for step in factor),
        }
        return QuantSpec(**{**fields, **frozen})

    @property
    def scale_format(self) -> Literal["fp32", "ue8m0"]:
        steps = self.scale_steps or ()
        return "ue8m0" if any(step[0] in UE8M0_STEPS for step in steps) else "fp32"


DEFAULT_QUANT = QuantSpec()


@dataclass(frozen=True)
class FusedSpec:
    """Everything about a fused gated RMSNorm + FP8 quantisation but its tensors and eps.

    Sizes are Python ints (the row is static even where the token count is not). ``group_size == hidden_size`` with
    ``granularity="token"`` is one scale a token.
    """

    hidden_size: int  # H·D, the width of one quantised row
    head_dim: int  # D as the graph had it; only the report reads it
    norm_size: int  # values that share one mean
    group_size: int  # values that share one scale
    granularity: Literal["group", "token"] = "group"
    activation: Activation = "silu"
    norm_before_gate: bool = True
    weight_offset: float = 0.0
    roundings: tuple[str, ...] = ()
    quant: QuantSpec = DEFAULT_QUANT
    fp8_dtype: str = "float8_e4m3fn"

    def __post_init__(self) -> None:
        for name, size in (("norm_size", self.norm_size), ("group_size", self.group_size)):
            if size <= 0 or self.hidden_size % size:
                raise ValueError(f"{name}={size} does not divide the row of {self.hidden_size} values")
        if self.activation not in ("silu", "sigmoid"):
            raise ValueError(f"activation={self.activation!r}: expected 'silu' or 'sigmoid'")
        if self.fp8_dtype not in FP8_DTYPES:
            raise ValueError(f"fp8_dtype={self.fp8_dtype!r}: expected one of {', '.join(FP8_DTYPES)}")
        check_roundings(self.roundings)

    @property
    def num_groups(self) -> int:
        """Scales in one row."""
        return self.hidden_size // self.group_size

    @property
    def torch_fp8_dtype(self) -> torch.dtype:
        return FP8_DTYPES[self.fp8_dtype]

    def rounding(self, point: str) -> torch.dtype | None:
        """The dtype that the value at ``point`` is rounded to, or None where it stays fp32."""
        return rounding_dtype(self.roundings, point)

    @property
    def shows_summation_order(self) -> bool:
        """True where the last bit of a sum of squares reaches the scales: nothing is rounded away behind it."""
        is_fp32 = all(self.rounding(point) in (None, torch.float32) for point in ("norm", "weight", "bias", "output"))
        return is_fp32 and not any(step[0] in ("round", *UE8M0_STEPS) for step in self.quant.scale_steps or ())

    def encode(self) -> str:
        """A canonical string: equal specs give equal strings. :meth:`decode` reads it."""
        return json.dumps(dataclasses.asdict(self), separators=(",", ":"))

    @staticmethod
    @functools.cache
    def decode(text: str) -> FusedSpec:
        """The spec that :meth:`encode` wrote."""
        fields: dict[str, Any] = json.loads(text)
        quant = QuantSpec.from_fields(fields.pop("quant"))
        return FusedSpec(quant=quant, **{**fields, "roundings": tuple(fields["roundings"])})


def check_roundings(roundings: tuple[str, ...]) -> None:
    """ValueError unless every entry is ``"point:dtype"`` with a known point, each point once."""
    points = [entry.partition(":")[0] for entry in roundings]
    for entry, point in zip(roundings, points, strict=True):
        if point not in ROUNDING_POINTS or points.count(point) > 1:
            points_text = ", ".join(ROUNDING_POINTS)
            raise ValueError(
                f"rounding {entry!r}: expected 'point:dtype' with each point of {points_text} at most once"
            )
        dtype_from_name(entry.partition(":")[2])


def rounding_dtype(roundings: tuple[str, ...], point: str) -> torch.dtype | None:
    """The dtype that ``roundings`` names for ``point``, or None."""
    for entry in roundings:
        name, _, dtype = entry.partition(":")
        if name == point:
            return dtype_from_name(dtype)
    return None
