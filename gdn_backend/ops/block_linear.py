"""The linear layer behind an FP8 quantisation: codes and scales times a block-scaled FP8 weight.

Plain PyTorch that dequantises and multiplies, on any device and transparent to Inductor; GPUs with FP8 matrix units
run the Triton kernel of :mod:`gdn_backend.kernels.block_gemm` instead.
"""

from __future__ import annotations

from typing import Any

import torch

from gdn_backend import environment
from gdn_backend.ops.call import implementation_version

#: Rows and columns of a weight block, and values that share one activation scale.
BLOCK_SIZE = 128


def block_scaled_linear(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """``(codes · scales) @ (weight · weight_scales)ᵀ``, accumulated in fp32.

    Args:
        codes: FP8 activations ``[..., K]``.
        scales: fp32, ``[..., K / 128]`` (one for every 128 values of a row) or ``[..., 1]`` (one a row).
        weight: FP8 ``[N, K]``; N and K are multiples of 128.
        weight_scales: fp32 ``[N / 128, K / 128]``, one for each 128x128 block.
        out_dtype: dtype of the result.

    Returns:
        ``[..., N]`` in ``out_dtype``.

    Raises:
        ValueError: when the shapes do not fit together.
    """
    check_shapes(codes, scales, weight, weight_scales)
    return torch.ops.gdn_backend.block_scaled_linear(codes, scales, weight, weight_scales, out_dtype, _version())


@torch.compiler.assume_constant_result  # Dynamo calls it while it traces
def _version() -> str:
    return implementation_version()


# An op rather than a function: in the graph that Dynamo captures the codes must be read by a matmul. Widened in the
# open they would look like simulated quantisation. AOTAutograd takes the op apart, so Inductor sees what is inside.
@torch.library.triton_op("gdn_backend::block_scaled_linear", mutates_args=())
def block_scaled_linear_op(
    codes: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    out_dtype: torch.dtype,
    version: str,
) -> torch.Tensor:
    """The graph op behind :func:`block_scaled_linear`; its arguments are checked there.

    ``version`` keeps a graph that an older version of this code compiled from being found in a cache.
    """
    if has_block_gemm(codes.device, codes.dtype):
        from gdn_backend.kernels.block_gemm import block_gemm

        output = torch.empty((*codes.shape[:-1], weight.shape[0]), dtype=out_dtype, device=codes.device)
        block_gemm(codes.contiguous(), scales, weight.contiguous(), weight_scales.contiguous(), output)
        return output
    activations = dequantise_rows(codes, scales)
    return torch.nn.functional.linear(activations, dequantise_blocks(weight, weight_scales)).to(out_dtype)


def _save_operands(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """Of codes and scales, as plain PyTorch on the dequantised factors has them; the weight is frozen."""
    codes, scales, weight, weight_scales = ctx.saved_tensors
    activations = grad.float() @ dequantise_blocks(weight, weight_scales)
    pieces = activations.unflatten(-1, (scales.shape[-1], codes.shape[-1] // scales.shape[-1]))
    of_codes = (pieces * scales.unsqueeze(-1)).flatten(-2).to(codes.dtype)
    of_scales = (pieces * codes.float().view(pieces.shape)).sum(-1)
    return of_codes, of_scales, None, None, None, None


# Models are called without torch.no_grad() too, and torch.compile then traces the way back, wanted or not.
block_scaled_linear_op.register_autograd(_gradients, setup_context=_save_operands)


def has_block_gemm(device: torch.device, fp8_dtype: torch.dtype) -> bool:
    """Whether the Triton kernel runs on ``device``: NVIDIA GPUs from sm89 on, AMD GPUs with FP8 of this format."""
    name = environment.architecture(device)
    is_recent = name.startswith(("gfx94", "gfx95")) or (name.startswith("sm") and int(name[2:]) >= 89)
    return is_recent and fp8_dtype == environment.default_fp8_dtype(device) and environment.triton_status().ok


def dequantise_rows(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """``[..., K]`` codes times their ``[..., K / 128]`` or ``[..., 1]`` scales, in fp32."""
    pieces = codes.float().unflatten(-1, (scales.shape[-1], codes.shape[-1] // scales.shape[-1]))
    return (pieces * scales.unsqueeze(-1)).flatten(-2)


def dequantise_blocks(weight: torch.Tensor, weight_scales: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` codes times the scale of their 128x128 block (``[N / 128, K / 128]``), in fp32."""
    block_rows, block_columns = weight_scales.shape
    blocks = weight.float().view(block_rows, BLOCK_SIZE, block_columns, BLOCK_SIZE)
    return (blocks * weight_scales[:, None, :, None]).view(weight.shape)


def check_shapes(codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor, weight_scales: torch.Tensor) -> None:
    """ValueError unless the four shapes are those that :func:`block_scaled_linear` documents."""
    out_features, in_features = weight.shape
    if out_features % BLOCK_SIZE or in_features % BLOCK_SIZE:
        raise ValueError(f"weight is {out_features}x{in_features}: both sizes must be multiples of {BLOCK_SIZE}")
    num_blocks = in_features // BLOCK_SIZE
    if tuple(weight_scales.shape) != (out_features // BLOCK_SIZE, num_blocks):
        raise ValueError(
            f"weight_scales is {tuple(weight_scales.shape)}: expected {(out_features // BLOCK_SIZE, num_blocks)}"
        )
    if codes.shape[-1] != in_features:
        raise ValueError(f"codes have {codes.shape[-1]} values a row: the weight expects {in_features}")
    if scales.shape[-1] not in (1, num_blocks):
        raise ValueError(f"scales have {scales.shape[-1]} values a row: expected 1 or {num_blocks}")
