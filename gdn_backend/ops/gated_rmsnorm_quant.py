"""The fused op: gated RMSNorm and dynamic FP8 quantisation of its merged rows.

``gdn_backend::gated_rmsnorm_fp8_quant`` is what a compiled graph calls. It is a ``triton_op``: Inductor sees the
Triton kernel in it on a GPU, and plain PyTorch, which it fuses, on the CPU. What it must not look into (AITER's
launcher, and on a GPU the reference, whose roundings it would skip) is in ops of its own that stay opaque.
:func:`gated_rmsnorm_fp8_quant` is the same for users: it checks its arguments and chooses the kernel.

Importing this module registers the ops, which imports Triton where it is installed.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any

import torch
from torch.types import Number  # "Scalar" in a schema; a symbolic float passed to a "float" would be guarded on

from gdn_backend import environment
from gdn_backend.kernels.reference import reference
from gdn_backend.ops.call import decode_call, encode_call
from gdn_backend.ops.dispatch import INPUT_DTYPES, Choice, Operands, choose_kernel
from gdn_backend.ops.outputs import allocate_outputs
from gdn_backend.ops.spec import DEFAULT_QUANT, Activation, FusedSpec, QuantSpec, dtype_name


@torch.library.triton_op("gdn_backend::gated_rmsnorm_fp8_quant", mutates_args=())
def gated_rmsnorm_fp8_quant_op(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: Number,
    call: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The op in graphs. On the CPU it is the reference, whatever kernel ``call`` names: open to Inductor where Inductor
    keeps its bytes, and else one opaque call.

    Args:
        x, gate: any shape and strides whose values in row-major order are T rows of ``spec.hidden_size``.
        weight, bias: ``[W]`` with W a divisor of ``spec.hidden_size``, or None.
        eps: a number; symbolic under ``torch.compile(dynamic=True)``.
        call: the string of :func:`~gdn_backend.ops.call.encode_call`.

    Returns:
        codes and scales as :func:`~gdn_backend.ops.outputs.allocate_outputs` describes them.
    """
    spec, kernel = decode_call(call)
    opaque = torch.ops.gdn_backend
    if x.device.type == "cpu":
        if environment.inductor_rounds_on_cpu() and not spec.shows_summation_order:
            return reference(x, gate, weight, bias, eps, spec)
    elif kernel == "triton":
        return _launch_triton(x, gate, weight, bias, eps, spec)
    elif kernel == "aiter":
        return opaque.aiter_gated_rmsnorm_fp8_quant(x, gate, weight, bias, eps, call)
    return opaque.reference_gated_rmsnorm_fp8_quant(x, gate, weight, bias, eps, call)


def _launch_triton(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    spec: FusedSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    from gdn_backend.kernels.gated_rmsnorm_quant import launch

    with _device_of(x):
        return launch(x, gate, weight, bias, eps, spec)


def _device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """Makes the GPU of ``x`` current, which is where Triton launches. Without a GPU (fake tensors) it does nothing."""
    return torch.cuda.device(x.device) if torch.cuda.is_available() else contextlib.nullcontext()


@torch.library.custom_op("gdn_backend::aiter_gated_rmsnorm_fp8_quant", mutates_args=())
def aiter_op(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: Number,
    call: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused op by AITER's kernel, which launches itself: nothing that Inductor could look into."""
    from gdn_backend.kernels import aiter

    with _device_of(x):
        return aiter.launch(x, gate, weight, bias, eps, decode_call(call)[0])


@torch.library.custom_op("gdn_backend::reference_gated_rmsnorm_fp8_quant", mutates_args=())
def reference_op(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: Number,
    call: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The fused op by the reference, operation by operation: exact, because Inductor does not fuse it."""
    return reference(x, gate, weight, bias, eps, decode_call(call)[0])


@aiter_op.register_fake
@reference_op.register_fake
def _fake(
    x: torch.Tensor, gate: torch.Tensor, weight: Any, bias: Any, eps: Number, call: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return allocate_outputs(x, decode_call(call)[0])


def gated_rmsnorm_fp8_quant(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    activation: Activation = "silu",
    norm_before_gate: bool = True,
    norm_size: int | None = None,
    group_size: int | None = 128,
    weight_offset: float = 0.0,
    bias: torch.Tensor | None = None,
    roundings: tuple[str, ...] = (),
    quant: QuantSpec = DEFAULT_QUANT,
    fp8_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated RMSNorm and dynamic FP8 quantisation of its merged heads, in one kernel.

    What it computes is written down in :mod:`gdn_backend.ops.spec`; :func:`~gdn_backend.rms_norm_gated` is the norm by
    itself and describes the arguments that both have. The kernel is the fastest that repeats the formula exactly here:
    Triton's on a GPU (AITER's where it is exact), the PyTorch reference elsewhere and for what Triton's does not take.

    Args:
        x: ``[..., H, D]``, bf16, fp16 or fp32. Any strides; a last one of 1 is read in place.
        gate: like ``x``, in a dtype of its own.
        weight: ``[W]`` in its own dtype, W a divisor of H·D (usually D), or None.
        eps: added to the mean square.
        norm_size: values that share a mean, a divisor of H·D; D if None.
        group_size: values that share a scale, a divisor of H·D; None is one scale a token.
        bias: ``[W]`` like ``weight``, or None.
        quant: how magnitudes become scales and values become codes; by default vLLM's and AITER's formula.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``; by default what the device computes in.

    Returns:
        codes ``[..., H·D]`` in ``fp8_dtype``, contiguous; scales ``[..., H·D / group_size]``, fp32. With
        ``quant.scale_layout="column"`` the scales are column-major over the merged leading dimensions.

    Raises:
        ValueError: shapes, devices, sizes or names that do not fit together.
        TypeError: a dtype other than those named.
        RuntimeError: an input requires a gradient while gradients are enabled.
    """
    tensors = {"x": x, "gate": gate, "weight": weight, "bias": bias}
    _check_tensors({name: tensor for name, tensor in tensors.items() if tensor is not None})
    # torch.compile(dynamic=True) makes every number symbolic, and those of the spec are not to be: a size is settled by
    # taking it as an index, a float by comparing it.
    head_dim = operator.index(x.shape[-1])
    hidden_size = operator.index(x.shape[-2]) * head_dim
    call = _encode(
        x.device,
        tuple(None if tensor is None else tensor.dtype for tensor in tensors.values()),
        tuple(None if tensor is None else operator.index(tensor.shape[0]) for tensor in (weight, bias)),
        (
            ("hidden_size", hidden_size),
            ("head_dim", head_dim),
            ("norm_size", head_dim if norm_size is None else operator.index(norm_size)),
            ("group_size", hidden_size if group_size is None else operator.index(group_size)),
            ("granularity", "token" if group_size is None else "group"),
            ("activation", activation),
            ("norm_before_gate", norm_before_gate),
            ("weight_offset", next((value for value in (0.0, 1.0) if weight_offset == value), weight_offset)),
            ("roundings", tuple(roundings)),
        ),
        quant.arguments(),
        fp8_dtype,
    )
    codes, scales = torch.ops.gdn_backend.gated_rmsnorm_fp8_quant(x, gate, weight, bias, eps, call)
    leading = x.shape[:-2]
    return codes.reshape(*leading, hidden_size), scales.reshape(*leading, scales.shape[-1])


def _check_tensors(tensors: dict[str, torch.Tensor]) -> None:
    """TypeError, ValueError or RuntimeError for tensors that no kernel takes."""
    x, gate = tensors["x"], tensors["gate"]
    if x.dim() < 2 or x.shape != gate.shape:
        raise ValueError(f"x and gate have to be [..., H, D] of one shape: got {tuple(x.shape)}, {tuple(gate.shape)}")
    for name, tensor in tensors.items():
        if tensor.dtype not in INPUT_DTYPES:
            raise TypeError(f"{name} is {dtype_name(tensor.dtype)}: expected bfloat16, float16 or float32")
        if tensor.device != x.device:
            raise ValueError(f"{name} is on {tensor.device}, x on {x.device}")
        if tensor is not x and tensor is not gate and tensor.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected one dimension")
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise RuntimeError(f"the fused op has no gradient, but {name} requires one: call it under torch.no_grad()")


@torch.compiler.assume_constant_result  # Dynamo calls it while it traces; the trace guards on all its arguments
def _encode(
    device: torch.device,
    dtypes: tuple[Any, ...],
    parameter_sizes: tuple[int | None, ...],
    fields: tuple[tuple[str, Any], ...],
    quant: tuple[Any, ...],
    fp8_dtype: torch.dtype | None,
) -> str:
    """The ``call`` string for plain values: the spec is made, and the kernel chosen, outside of any trace."""
    fp8_dtype = fp8_dtype or environment.default_fp8_dtype(device)
    spec = FusedSpec(quant=QuantSpec(*quant), fp8_dtype=dtype_name(fp8_dtype), **dict(fields))
    for name, size in zip(("weight", "bias"), parameter_sizes, strict=True):
        if size is not None and (size == 0 or spec.hidden_size % size):
            raise ValueError(f"{name} of {size} values does not repeat along a row of {spec.hidden_size}")
    choice = choose_kernel(spec, Operands(device, *dtypes, *parameter_sizes))
    return encode_call(spec, choice.kernel if isinstance(choice, Choice) else "reference")
