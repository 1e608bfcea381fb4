"""The fused op in plain PyTorch: what every other kernel is compared with, and what runs on the CPU.

It holds eager's own operations in eager's order, so that its bytes are those of the modules it stands for. Every value
is fp32 between two rounding points (:mod:`gdn_backend.ops.spec`); a rounding is a cast down and up again. That is the
same as doing the step in the narrow dtype: PyTorch computes bf16 and fp16 arithmetic in fp32 and rounds the result.

Nothing here writes to a tensor, and nothing looks at a value, so the functions trace with symbolic sizes and Inductor
turns a call on the CPU into one C++ kernel. For that kernel to keep the roundings, Inductor has to be told to
(``torch._inductor.config.emulate_precision_casts``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gdn_backend.ops.outputs import pad_for_tma
from gdn_backend.ops.spec import (
    Activation,
    FusedSpec,
    QuantSpec,
    ScaleLayout,
    Step,
    check_roundings,
    dtype_from_name,
    rounding_dtype,
)


def rms_norm_gated(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    activation: Activation = "silu",
    norm_before_gate: bool = True,
    norm_size: int | None = None,
    weight_offset: float = 0.0,
    bias: Tensor | None = None,
    roundings: tuple[str, ...] = (),
) -> Tensor:
    """The gated RMSNorm of Gated DeltaNet and Mamba2 layers, in plain PyTorch; differentiable.

    The formula is that of :mod:`gdn_backend.ops.spec`. Qwen3-Next's ``Qwen3NextRMSNormGated`` on bf16 tensors is
    ``roundings=("norm:bfloat16", "weight:bfloat16", "output:bfloat16")``; vLLM's ``RMSNormGated.forward_static`` and
    Kimi's sigmoid gate are ``("output:bfloat16",)``; Mamba2's gate-first norm is ``norm_before_gate=False`` with
    ``norm_size = intermediate_size // n_groups``.

    Args:
        x: ``[..., H, D]`` or ``[..., I]``, bf16, fp16 or fp32, any strides.
        gate: like ``x``, in a dtype of its own.
        weight: ``[W]`` in its own dtype, or None; repeats along the row.
        eps: added to the mean square.
        activation: of the gate, ``"silu"`` or ``"sigmoid"``.
        norm_before_gate: False multiplies by the gate first and norms the product.
        norm_size: values that share a mean; the last dimension if None. A divisor of the last dimension, or a
            multiple of it that divides the last two dimensions together.
        weight_offset: added to the weight (1.0 for weights stored around zero).
        bias: ``[W]`` like ``weight``, added after it.
        roundings: rounding points, ``"point:dtype"``; none keeps fp32 throughout.

    Returns:
        The shape of ``x``; the dtype of the ``"output"`` rounding, fp32 where there is none.

    Raises:
        ValueError: shapes, sizes, activation or roundings that do not fit together.
    """
    if x.shape != gate.shape or x.dim() == 0:
        raise ValueError(f"x and gate have to have one shape of at least one dimension: got {x.shape} and {gate.shape}")
    if activation not in ("silu", "sigmoid"):
        raise ValueError(f"activation={activation!r}: expected 'silu' or 'sigmoid'")
    check_roundings(roundings)
    row_size = _row_size(x, norm_size)
    norm_size = norm_size or row_size
    pieces = (x.numel() // row_size, row_size // norm_size, norm_size)
    y = _gated_norm(
        x.reshape(pieces),
        gate.reshape(pieces),
        _along_row(weight, "weight", row_size, norm_size),
        _along_row(bias, "bias", row_size, norm_size),
        eps,
        activation,
        norm_before_gate,
        weight_offset,
        roundings,
    )
    return y.to(rounding_dtype(roundings, "output") or torch.float32).reshape(x.shape)


def quantise(y: Tensor, group_size: int, quant: QuantSpec, fp8_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Dynamic FP8 quantisation of rows, one scale for each ``group_size`` consecutive values.

    Args:
        y: ``[T, K]``, bf16, fp16 or fp32; K a multiple of ``group_size``.
        quant: the formula; see :class:`~gdn_backend.ops.spec.QuantSpec`.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``.

    Returns:
        codes ``[T, K]`` in ``fp8_dtype``, contiguous; scales ``[T, K / group_size]`` fp32 in ``quant.scale_layout``.
    """
    rows, row_size = y.shape
    num_groups = row_size // group_size
    quant = quant.resolve(fp8_dtype)
    groups = y.reshape(rows, num_groups, group_size)
    # y widens itself in the division: written out, Inductor would keep its fp32 form between the two passes over it.
    scales = _apply_steps(groups.float().abs().amax(dim=-1, keepdim=True), quant.scale_steps or ())
    factor = _apply_steps(scales, quant.factor_steps)
    scaled = groups * factor if quant.operation == "multiply" else groups / factor
    if quant.quotient is not None:
        scaled = scaled.to(dtype_from_name(quant.quotient)).float()
    if quant.clamp is not None:
        scaled = scaled.clamp(-quant.clamp, quant.clamp)
    # Elementwise operations keep the strides of what they read, which need not be row-major.
    codes = scaled.to(fp8_dtype).reshape(rows, row_size).contiguous()
    scales = scales.reshape(rows, num_groups).contiguous()
    return codes, _in_layout(scales, quant.scale_layout)


def reference(
    x: Tensor, gate: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, spec: FusedSpec
) -> tuple[Tensor, Tensor]:
    """The fused op: :func:`rms_norm_gated` and :func:`quantise` of the merged rows.

    Args:
        x, gate: any shape whose values in row-major order are rows of ``spec.hidden_size``.
        weight, bias: ``[W]`` with W a divisor of ``spec.hidden_size``, or None.

    Returns:
        codes ``[T, hidden_size]`` and scales ``[T, num_groups]``, as :func:`quantise`.
    """
    shape = (x.numel() // spec.hidden_size, spec.hidden_size)
    y = rms_norm_gated(
        x.reshape(shape),
        gate.reshape(shape),
        weight,
        eps,
        activation=spec.activation,
        norm_before_gate=spec.norm_before_gate,
        norm_size=spec.norm_size,
        weight_offset=spec.weight_offset,
        bias=bias,
        roundings=spec.roundings,
    )
    return quantise(y, spec.group_size, spec.quant, spec.torch_fp8_dtype)


def _gated_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    activation: Activation,
    norm_before_gate: bool,
    weight_offset: float,
    roundings: tuple[str, ...],
) -> Tensor:
    """The chain of spec.py in fp32, on pieces ``[T, pieces, norm_size]`` that share a mean; the output unrounded."""

    def rounded(value: Tensor, point: str) -> Tensor:
        dtype = rounding_dtype(roundings, point)
        return value if dtype is None else value.to(dtype).float()

    act = torch.sigmoid if activation == "sigmoid" else torch.nn.functional.silu
    h = x.float()
    a = rounded(act(gate.float()), "activation")
    if not norm_before_gate:
        h = rounded(h * a, "gated")
    h = rounded(h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps), "norm")
    if weight is not None:
        w = weight.float()
        w = rounded(w + weight_offset, "offset") if weight_offset else w
        h = rounded(w * h, "weight")
    if bias is not None:
        h = rounded(h + bias.float(), "bias")
    return h * a if norm_before_gate else h


def _apply_steps(value: Tensor, steps: tuple[Step, ...]) -> Tensor:
    """Run scale or factor steps on fp32; each is the operation eager has for it."""
    for name, *arguments in steps:
        match name, *arguments:
            case "max", float() | int() as bound:
                value = value.clamp(min=bound)
            case "min", float() | int() as bound:
                value = value.clamp(max=bound)
            case "add", float() | int() as term:
                value = value + term
            case "mul", float() | int() as factor:
                value = value * factor
            case "div", float() | int() as divisor:
                value = value / divisor
            case "div_rn" | "div_triton", float() | int() as divisor:
                value = value / torch.full((), divisor, dtype=torch.float32, device=value.device)
            case ("reciprocal",):
                value = value.reciprocal()
            case "round", str() as dtype:
                value = value.to(dtype_from_name(dtype)).float()
            case ("exp2_ceil_log2",):
                value = value.log2().ceil().exp2()
            case ("ceil_pow2_bits",):
                value = _ceil_to_power_of_two(value)
            case _:
                raise ValueError(f"scale step {(name, *arguments)!r}: wrong arguments")
    return value


def _in_layout(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """Contiguous ``[T, G]`` in the memory layout that the output contract names."""
    if layout == "row":
        return scales
    columns = scales.t().clone(memory_format=torch.contiguous_format)
    if layout == "column_tma":
        rows = scales.shape[0]
        columns = torch.nn.functional.pad(columns, (0, pad_for_tma(rows) - rows))[:, :rows]
    return columns.t()


def _ceil_to_power_of_two(value: Tensor) -> Tensor:
    """The next power of two by exponent bits, as DeepGEMM does for UE8M0 scales; clamped to 2^-126 .. 2^127.

    Unlike every other step it does not pass NaN on: NaN has the largest exponent, which the clamp turns into 2^127.
    """
    bits = value.view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def _row_size(x: Tensor, norm_size: int | None) -> int:
    """Width of the rows that the norm's pieces divide: the last dimension, or the last two merged."""
    last = x.shape[-1]
    if norm_size is None or (norm_size > 0 and last % norm_size == 0):
        return last
    merged = last * x.shape[-2] if x.dim() > 1 else last
    if norm_size > 0 and norm_size % last == 0 and merged % norm_size == 0:
        return merged
    raise ValueError(f"norm_size={norm_size} divides neither the last dimension of {tuple(x.shape)} nor the last two")


def _along_row(parameter: Tensor | None, name: str, row_size: int, norm_size: int) -> Tensor | None:
    """A weight or bias ``[W]`` in a shape that broadcasts against pieces ``[T, row_size / norm_size, norm_size]``."""
    if parameter is None:
        return None
    width = parameter.numel()
    if parameter.dim() != 1 or width == 0 or row_size % width:
        raise ValueError(f"{name} of shape {tuple(parameter.shape)} does not repeat along a row of {row_size} values")
    if width == norm_size:
        return parameter
    if width < row_size:
        parameter = parameter.repeat(row_size // width)
    return parameter.reshape(row_size // norm_size, norm_size)
