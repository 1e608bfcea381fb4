"""The assertion of the numeric tests; what it allows is said in :mod:`gdn_backend.exactness` and nowhere else."""

from __future__ import annotations

import torch

from gdn_backend.exactness import Distance, measure_distance


def assert_exact(
    codes: torch.Tensor,
    scales: torch.Tensor,
    ref_codes: torch.Tensor,
    ref_scales: torch.Tensor,
    input_dtype: torch.dtype,
    scale_format: str = "fp32",
) -> Distance:
    """Fail unless ``codes`` and ``scales`` are exact; arguments as in :mod:`gdn_backend.exactness`."""
    distance = measure_distance(codes, scales, ref_codes, ref_scales, scale_format)
    assert distance.is_exact(input_dtype, scale_format), distance.render()
    return distance
