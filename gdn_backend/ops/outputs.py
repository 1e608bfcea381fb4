"""The output contract that the fused op's fake and every kernel share."""

from __future__ import annotations

import torch

from gdn_backend.ops.spec import FusedSpec


def allocate_outputs(x: torch.Tensor, spec: FusedSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty codes and scales for the T rows of ``x``, on its device.

    Returns:
        codes: ``spec.fp8_dtype`` ``[T, hidden_size]``, contiguous.
        scales: fp32 ``[T, num_groups]`` in ``spec.quant.scale_layout``.
    """
    rows = x.numel() // spec.hidden_size
    codes = torch.empty((rows, spec.hidden_size), dtype=spec.torch_fp8_dtype, device=x.device)
    if spec.quant.scale_layout == "row":
        return codes, torch.empty((rows, spec.num_groups), dtype=torch.float32, device=x.device)
    padded = rows if spec.quant.scale_layout == "column" else pad_for_tma(rows)
    scales = torch.empty((spec.num_groups, padded), dtype=torch.float32, device=x.device)
    return codes, scales[:, :rows].t()


def pad_for_tma(rows: int) -> int:
    """The next multiple of 4: that many fp32 values are 16 bytes."""
    return (rows + 3) // 4 * 4
