"""What "exact" means: the one comparison of a fused site with eager, and the only tolerances for its numbers.

A fused site is exact when, given the same inputs on the same device, its bytes are eager's, up to what the order of a
reduction and the last ulp of exp and rsqrt can change:

========  ==========================  ==================================================================
what      may differ in               by
========  ==========================  ==================================================================
codes     max(2, 1e-5 · codes)        one step of the FP8 grid
scales    max(1, 1e-4 · scales)       one ulp of the dtype before the quantisation (float32: 4 ulp)
UE8M0     max(1, 1e-4 · scales)       one power of two; the codes of such a group are compared dequantised
========  ==========================  ==================================================================

NaN and infinities have to sit in the same places.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: Largest relative distance of two scales, by the dtype of the values before the quantisation.
SCALE_DISTANCE = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 4 * 2.0**-23}
CODE_SHARE, CODE_COUNT = 1e-5, 2
SCALE_SHARE, SCALE_COUNT = 1e-4, 1


@dataclass(frozen=True)
class Distance:
    """How far a result is from the reference; counts of elements unless said otherwise."""

    codes: int
    codes_off: int
    largest_step: int  # in steps of the FP8 grid, over the groups whose codes can be compared as they are
    scales: int
    scales_off: int
    largest_scale_distance: float  # relative, over the scales that are neither NaN nor zero
    misplaced: int  # NaN, infinity or zero on one side only; dequantised values further apart than a step

    def render(self) -> str:
        return (
            f"codes: {self.codes_off} of {self.codes} differ (at most {self.largest_step} steps); "
            f"scales: {self.scales_off} of {self.scales} differ (at most {self.largest_scale_distance:.3g}); "
            f"misplaced NaN, infinities, zeros or far values: {self.misplaced}"
        )

    def is_exact(self, input_dtype: torch.dtype, scale_format: str = "fp32") -> bool:
        """Whether the distance is within what this module allows.

        Args:
            input_dtype: dtype of the values before the quantisation (float32 where they are not rounded before it).
            scale_format: ``"fp32"`` or ``"ue8m0"``.
        """
        most_scale = 0.5 if scale_format == "ue8m0" else SCALE_DISTANCE[input_dtype]
        return (
            self.misplaced == 0
            and self.scales_off <= max(SCALE_COUNT, SCALE_SHARE * self.scales)
            and self.largest_scale_distance <= most_scale
            and self.codes_off <= max(CODE_COUNT, CODE_SHARE * self.codes)
            and self.largest_step <= 1
        )


def measure_distance(
    codes: torch.Tensor,
    scales: torch.Tensor,
    ref_codes: torch.Tensor,
    ref_scales: torch.Tensor,
    scale_format: str = "fp32",
) -> Distance:
    """Compare two results.

    Args:
        codes, ref_codes: FP8, equal dtype and shape ``[..., hidden_size]``.
        scales, ref_scales: float32, equal shape ``[..., num_groups]``, any strides.
        scale_format: ``"fp32"`` or ``"ue8m0"``.

    Raises:
        ValueError: when dtypes or shapes differ.
    """
    for ours, theirs in ((codes, ref_codes), (scales, ref_scales)):
        if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
            raise ValueError(
                f"got {ours.dtype} {tuple(ours.shape)}, the reference has {theirs.dtype} {tuple(theirs.shape)}"
            )
    num_scales, num_codes = scales.numel(), codes.numel()
    if num_codes == 0:
        return Distance(0, 0, 0, num_scales, 0, 0.0, 0)
    group_size = num_codes // num_scales
    nan, step, same = _compare_codes(codes.reshape(num_scales, group_size), ref_codes.reshape(num_scales, group_size))
    ours, theirs = scales.reshape(-1), ref_scales.reshape(-1)
    scale_same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    misplaced = int(nan.sum()) + int((~scale_same & ~_comparable(ours, theirs)).sum())
    comparable = ~scale_same & _comparable(ours, theirs)
    largest = torch.maximum(ours.abs(), theirs.abs())
    relative = torch.where(comparable, (ours - theirs).abs() / largest, torch.zeros_like(ours))
    if scale_format == "ue8m0":
        far = _dequantised_apart(codes, scales, ref_codes, ref_scales, group_size) & comparable[:, None]
        misplaced += int(far.sum())
        step = step.masked_fill(comparable[:, None], 0)
        same = same | comparable[:, None]
    return Distance(
        codes=num_codes,
        codes_off=int((~same).sum()),
        largest_step=int(step.max()),
        scales=num_scales,
        scales_off=int((~scale_same).sum()),
        largest_scale_distance=float(relative.max()),
        misplaced=misplaced,
    )


def _compare_codes(codes: torch.Tensor, ref_codes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Where only one side is NaN, the distance in steps of the grid, and where the bytes are the same."""
    nan, ref_nan = _is_nan(codes), _is_nan(ref_codes)
    step = (grid_position(codes) - grid_position(ref_codes)).abs().masked_fill(nan | ref_nan, 0)
    same = (codes.view(torch.uint8) == ref_codes.view(torch.uint8)) | (nan & ref_nan)
    return nan ^ ref_nan, step, same


def _is_nan(codes: torch.Tensor) -> torch.Tensor:
    raw = codes.view(torch.uint8)
    return raw == 0x80 if codes.dtype == torch.float8_e4m3fnuz else (raw & 0x7F) == 0x7F


def grid_position(codes: torch.Tensor) -> torch.Tensor:
    """Codes as integers in the order of their values; neighbours are one apart, both zeros are 0."""
    raw = codes.view(torch.uint8).to(torch.int16)
    magnitude = raw & 0x7F
    return torch.where(raw >= 0x80, -magnitude, magnitude)


def _comparable(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    return ours.isfinite() & theirs.isfinite() & (ours != 0) & (theirs != 0)


def _dequantised_apart(
    codes: torch.Tensor, scales: torch.Tensor, ref_codes: torch.Tensor, ref_scales: torch.Tensor, group_size: int
) -> torch.Tensor:
    """Where code · scale differs by more than a step of the coarser grid; ``[num_scales, group_size]``."""
    ours, theirs = (
        c.reshape(-1, group_size).float() * s.reshape(-1, 1) for c, s in ((codes, scales), (ref_codes, ref_scales))
    )
    coarser = torch.maximum(scales, ref_scales).reshape(-1, 1)
    # A step is at most 1/8 of the value, and at least the smallest FP8 subnormal times the scale.
    smallest = torch.finfo(codes.dtype).smallest_normal / 8
    step = torch.maximum(torch.maximum(ours.abs(), theirs.abs()) / 8, coarser * smallest)
    return (ours - theirs).abs() > step
