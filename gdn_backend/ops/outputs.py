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
    codes, stored = allocate_storage(x, spec)
    return codes, view_scales(stored, codes.shape[0], spec)


def allocate_storage(x: torch.Tensor, spec: FusedSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes as in :func:`allocate_outputs`, and a contiguous tensor that :func:`view_scales` makes the scales of.

    For kernels in a graph: what writes to a view, Inductor copies before and after.
    """
    rows = x.numel() // spec.hidden_size
    codes = torch.empty((rows, spec.hidden_size), dtype=spec.torch_fp8_dtype, device=x.device)
    shape = (rows, spec.num_groups)
    if spec.quant.scale_layout != "row":
        shape = (spec.num_groups, rows if spec.quant.scale_layout == "column" else pad_for_tma(rows))
    return codes, torch.empty(shape, dtype=torch.float32, device=x.device)


def view_scales(stored: torch.Tensor, rows: int, spec: FusedSpec) -> torch.Tensor:
    """The scales ``[rows, num_groups]`` in the tensor of :func:`allocate_storage`, from its first value on."""
    return stored if spec.quant.scale_layout == "row" else stored[:, :rows].t()


def pad_for_tma(rows: int) -> int:
    """The next multiple of 4: that many fp32 values are 16 bytes."""
    return (rows + 3) // 4 * 4
