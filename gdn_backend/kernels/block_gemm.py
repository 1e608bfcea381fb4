"""A block-scaled FP8 matmul for GPUs with FP8 matrix units: simple, and correct before it is fast."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

ROWS, COLUMNS, DEPTH = 64, 128, 128  # of a tile; columns and depth are those of a weight block
NUM_WARPS = 4


@triton.jit
def block_gemm_kernel(
    codes_ptr,
    scales_ptr,
    weight_ptr,
    weight_scales_ptr,
    output_ptr,
    num_rows,
    out_features,
    in_features,
    scale_row_stride,
    scale_block_stride,  # 0 where a row has one scale
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """One tile of the output: fp32 products of each 128 deep slice, times its two scales, summed in fp32."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_range = rows < num_rows
    rows = tl.minimum(rows, num_rows - 1)  # FP8 loads without a mask: what is beyond is computed and not stored
    block_column = tl.program_id(1).to(tl.int64)
    columns = block_column * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    num_blocks = in_features // DEPTH
    accumulated = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for block in range(num_blocks):
        offset = block * DEPTH + depth
        codes = tl.load(codes_ptr + rows[:, None] * in_features + offset[None, :])
        weight = tl.load(weight_ptr + columns[None, :] * in_features + offset[:, None])
        row_scales = tl.load(scales_ptr + rows * scale_row_stride + block * scale_block_stride)
        block_scale = tl.load(weight_scales_ptr + block_column * num_blocks + block)
        accumulated += tl.dot(codes, weight) * (row_scales * block_scale)[:, None]
    target = output_ptr + rows[:, None] * out_features + columns[None, :]
    tl.store(target, accumulated.to(output_ptr.dtype.element_ty), mask=in_range[:, None])


def block_gemm(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, output: torch.Tensor
) -> None:
    """Launch the kernel, visibly to Inductor; see :func:`~gdn_backend.ops.block_linear.block_scaled_linear`.

    ``codes``, ``weight``, ``weight_scales`` and ``output`` are contiguous; ``scales`` may have any strides.
    """
    arguments = block_gemm_arguments(codes, scales, weight, weight_scales, output)
    grid = (triton.cdiv(arguments["num_rows"], ROWS), arguments["out_features"] // COLUMNS)
    torch.library.wrap_triton(block_gemm_kernel)[grid](**arguments)


def block_gemm_arguments(
    codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor, output: torch.Tensor
) -> dict[str, Any]:
    """The kernel's arguments and launch options; the tensors may be fake."""
    out_features, in_features = weight.shape
    num_rows = codes.numel() // in_features
    scales = scales.reshape(num_rows, scales.shape[-1])
    return {
        "codes_ptr": codes,
        "scales_ptr": scales,
        "weight_ptr": weight,
        "weight_scales_ptr": weight_scales,
        "output_ptr": output,
        "num_rows": num_rows,
        "out_features": out_features,
        "in_features": in_features,
        "scale_row_stride": scales.stride(0),
        "scale_block_stride": scales.stride(1) if scales.shape[1] > 1 else 0,
        "ROWS": ROWS,
        "COLUMNS": COLUMNS,
        "DEPTH": DEPTH,
        "num_warps": NUM_WARPS,
    }
