"""A Triton quantisation of the kind that transformers 4.57 to 5.0 launch before their FP8 matmul; needs Triton."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def act_quant_kernel(x_ptr, y_ptr, s_ptr, BLOCK_SIZE: tl.constexpr):
    """One group of BLOCK_SIZE values a program; no floor, no clamp, Triton's division."""
    group = tl.program_id(0)
    columns = group * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    x = tl.load(x_ptr + columns).to(tl.float32)
    s = tl.max(tl.abs(x)) / 448.0
    y = x / s
    tl.store(y_ptr + columns, y.to(y_ptr.dtype.element_ty))
    tl.store(s_ptr + group, s)


def act_quant(x: torch.Tensor, block_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes like ``x`` ``[T, K]`` in e4m3fn, scales ``[T, K / block_size]``."""
    codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scales = x.new_empty(*x.shape[:-1], x.shape[-1] // block_size, dtype=torch.float32)
    act_quant_kernel[(scales.numel(),)](x, codes, scales, BLOCK_SIZE=block_size)
    return codes, scales
