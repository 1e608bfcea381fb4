"""Dynamic FP8 quantisation by itself: an op that the matcher recognises by its schema.

``gdn_backend::fp8_quant`` stays one node in the graph that Dynamo captures. Where it is not fused with a gated norm in
front of it, AOTAutograd takes it apart into :func:`~gdn_backend.kernels.reference.quantise`, which Inductor fuses.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from gdn_backend import environment
from gdn_backend.kernels.reference import quantise
from gdn_backend.ops.call import PER_TOKEN, decode_quant, encode_quant
from gdn_backend.ops.spec import DEFAULT_QUANT, QuantSpec, dtype_name


@torch.library.triton_op("gdn_backend::fp8_quant", mutates_args=())
def fp8_quant_op(x: torch.Tensor, group_size: int, spec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The graph op: :func:`fp8_quant` with its formula as :func:`~gdn_backend.ops.call.encode_quant`'s string."""
    quant, fp8_dtype = decode_quant(spec)
    width = x.shape[-1]
    group_size = width if group_size == PER_TOKEN else group_size
    leading = x.shape[:-1]
    codes, scales = quantise(x.reshape(leading.numel(), width), group_size, quant, fp8_dtype)
    return codes.reshape(x.shape), scales.reshape(*leading, width // group_size)


def fp8_quant(
    x: torch.Tensor,
    group_size: int | None = 128,
    quant: QuantSpec = DEFAULT_QUANT,
    fp8_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of ``x`` to FP8, one scale for every ``group_size`` consecutive values.

    Args:
        x: ``[..., K]``, bf16, fp16 or fp32, any strides.
        group_size: a divisor of K; None is one scale a row ("per token").
        quant: how magnitudes become scales and values become codes; by default vLLM's and AITER's formula.
        fp8_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e4m3fnuz``; by default what the device computes in.

    Returns:
        codes ``[..., K]`` in ``fp8_dtype``; scales ``[..., K / group_size]`` fp32, in ``quant.scale_layout``.

    Raises:
        ValueError: a group size that does not divide K, or an FP8 dtype other than those two.
        TypeError: ``x`` is not bf16, fp16 or fp32.
        RuntimeError: ``x`` requires a gradient; quantisation has none.
    """
    _check_input(x)
    is_per_token = group_size is None
    # torch.compile(dynamic=True) makes every number symbolic; an index settles these two.
    width = operator.index(x.shape[-1])
    group_size = width if group_size is None else operator.index(group_size)
    if group_size <= 0 or width % group_size:
        raise ValueError(f"group_size={group_size} does not divide the last dimension of {tuple(x.shape)}")
    spec = _encode(x.device, fp8_dtype, quant.arguments())
    return torch.ops.gdn_backend.fp8_quant(x, PER_TOKEN if is_per_token else group_size, spec)


def _check_input(x: torch.Tensor) -> None:
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(f"x is {dtype_name(x.dtype)}: expected bfloat16, float16 or float32")
    if x.dim() == 0:
        raise ValueError("x has no dimensions: expected [..., K]")
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("FP8 quantisation has no gradient: call it under torch.no_grad() or detach x")


@torch.compiler.assume_constant_result  # Dynamo calls it while it traces; its arguments are what the trace guards on
def _encode(device: torch.device, fp8_dtype: torch.dtype | None, quant: tuple[Any, ...]) -> str:
    return encode_quant(QuantSpec(*quant), fp8_dtype or environment.default_fp8_dtype(device))
