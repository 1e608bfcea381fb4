"""One site as Qwen3-Next has it, in plain modules: gated norm, heads merged, activations quantised in groups."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F

HEADS, HEAD_DIM = 4, 128


class GatedNorm(nn.Module):
    """Qwen3-Next's gated RMSNorm, rounding for rounding; x and gate ``[T * H, D]``."""

    def __init__(self, head_dim: int = HEAD_DIM, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(head_dim) + 0.5)
        self.eps = eps

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        x = self.weight * x.to(dtype)
        x = x * F.silu(gate.to(torch.float32))
        return x.to(dtype)


def quantise(x: torch.Tensor, group_size: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes ``[T, K]`` and scales ``[T, K / group_size]``, the groups' largest magnitude at 448."""
    groups = x.view(x.shape[0], x.shape[1] // group_size, group_size).float()
    scales = (groups.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
    codes = (groups / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scales.squeeze(-1)


class Site(nn.Module):
    """x and gate ``[T, H, D]`` -> codes ``[T, H * D]``, scales ``[T, H * D / group_size]``."""

    def __init__(self, group_size: int = 128) -> None:
        super().__init__()
        self.norm = GatedNorm()
        self.heads, self.head_dim, self.group_size = HEADS, HEAD_DIM, group_size

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x.reshape(-1, self.head_dim), gate.reshape(-1, self.head_dim))
        y = y.reshape(-1, self.heads, self.head_dim).reshape(-1, self.heads * self.head_dim)
        return quantise(y, self.group_size)


def make_site(group_size: int = 128, dtype: torch.dtype = torch.bfloat16) -> Site:
    return Site(group_size).to(dtype).eval()


def make_inputs(
    num_tokens: int = 16, dtype: torch.dtype = torch.bfloat16, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random x and gate ``[T, H, D]``."""
    x, gate = (torch.randn(num_tokens, HEADS, HEAD_DIM, device=device).to(dtype) for _ in range(2))
    return x, gate
