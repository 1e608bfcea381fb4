"""The output contract that the fused op's fake and every kernel share."""

from __future__ import annotations

import torch

from gdn_backend.ops.spec import FusedSpec


def allocate_outputs(x: torch.Tensor, spec: FusedSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Empty codes and scales for the T rows of ``x``, on its device.

    Returns:
        codes: ``spec.fp8_dtype`` ``[T, hidden_size]``, contiguous.
        scales: fp32 ``[T, num_groups]``; row-major, or column-major with strides ``(1, T)``.
    """
    rows = x.numel() // spec.hidden_size
    codes = torch.empty((rows, spec.hidden_size), dtype=spec.torch_fp8_dtype, device=x.device)
    if spec.quant.scale_layout == "column":
        return codes, torch.empty((spec.num_groups, rows), dtype=torch.float32, device=x.device).t()
    return codes, torch.empty((rows, spec.num_groups), dtype=torch.float32, device=x.device)
