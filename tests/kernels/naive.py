"""The forms that the reference stands for, each written out by itself, step by step, as the models have it.

Nothing in them knows of specs or rounding points: that is what makes them a check. Each form comes with what the fused
op is to be told to compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from gdn_backend.ops.spec import QuantSpec, dtype_name


def qwen3_next(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Qwen3-Next, Qwen3.5, OLMo hybrid: three roundings (the second only where the weight is narrow)."""
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    n = weight * n.to(x.dtype)
    return (n * F.silu(gate.float())).to(x.dtype)


def kimi(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Kimi Linear, GLM5-Next, Bailing: sigmoid, one rounding."""
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    n = weight.float() * n
    return (n * torch.sigmoid(gate.float())).to(x.dtype)


def vllm_static(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """vLLM's ``RMSNormGated.forward_static`` with the norm before the gate."""
    wide, wide_gate, wide_weight = x.float(), gate.float(), weight.float()
    n = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (n * wide_weight * F.silu(wide_gate)).to(x.dtype)


def vllm_static_gate_first(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same with the gate before the norm, all heads by themselves."""
    g = x.float() * F.silu(gate.float())
    n = g * torch.rsqrt(g.pow(2).mean(dim=-1, keepdim=True) + eps)
    return (n * weight.float()).to(x.dtype)


def gemma_style(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A weight stored around zero, and silu in the narrow dtype."""
    n = x.float()
    n = n * torch.rsqrt(n.pow(2).mean(-1, keepdim=True) + eps)
    n = n * (1.0 + weight.float())
    return (n * F.silu(gate)).to(x.dtype)


def mamba2(x: Tensor, gate: Tensor, weight: Tensor, eps: float, groups: int = 4) -> Tensor:
    """Mamba2, Zamba2, Bamba on ``[..., I]``: gate first, norm over I / groups, the weight in the narrow dtype."""
    g = x.float() * F.silu(gate.float())
    pieces = g.view(*g.shape[:-1], groups, g.shape[-1] // groups)
    pieces = pieces * torch.rsqrt(pieces.pow(2).mean(-1, keepdim=True) + eps)
    return weight * pieces.view(g.shape).to(x.dtype)


@dataclass(frozen=True)
class NormForm:
    """A norm, the rounding points that it has where everything is of one narrow dtype, and its other arguments."""

    name: str
    function: Callable[..., Tensor]
    points: tuple[str, ...]
    arguments: dict[str, Any]

    def roundings(self, dtype: torch.dtype) -> tuple[str, ...]:
        return () if dtype == torch.float32 else tuple(f"{point}:{dtype_name(dtype)}" for point in self.points)


NORM_FORMS = [
    NormForm("qwen3_next", qwen3_next, ("norm", "weight", "output"), {}),
    NormForm("kimi", kimi, ("output",), {"activation": "sigmoid"}),
    NormForm("vllm_static", vllm_static, ("output",), {}),
    NormForm("vllm_static_gate_first", vllm_static_gate_first, ("output",), {"norm_before_gate": False}),
    NormForm("gemma_style", gemma_style, ("activation", "output"), {"weight_offset": 1.0}),
]


def _groups(y: Tensor, group_size: int) -> Tensor:
    return y.reshape(y.shape[0], y.shape[1] // group_size, group_size)


def quant_vllm(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """vLLM's native quantisation: the scale floored, divide, clamp."""
    most = torch.finfo(fp8).max
    g = _groups(y, group_size)
    s = (g.abs().max(dim=-1, keepdim=True)[0].float() / most).clamp(min=1.0 / (most * 512.0))
    return (g / s).clamp(-most, most).to(fp8).view(y.shape), s.squeeze(-1)


def quant_vllm_ue8m0(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same with scales rounded up to powers of two by logarithm, before the floor."""
    most = torch.finfo(fp8).max
    g = _groups(y, group_size)
    s = torch.exp2(torch.ceil(torch.log2(g.abs().max(dim=-1, keepdim=True)[0].float() / most)))
    s = s.clamp(min=1.0 / (most * 512.0))
    return (g / s).clamp(-most, most).to(fp8).view(y.shape), s.squeeze(-1)


def quant_deepgemm(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """HF's FP8 linear in front of DeepGEMM: the magnitude floored, times the reciprocal, no clamp."""
    g = _groups(y, group_size)
    s = g.abs().float().amax(dim=2).clamp(1e-4) / torch.finfo(fp8).max
    return (g * (1.0 / s.unsqueeze(-1))).to(fp8).view(y.shape), s


def quant_deepgemm_ue8m0(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same with scales rounded up to powers of two by their exponent bits."""
    g = _groups(y, group_size)
    s = g.abs().float().amax(dim=2).clamp(1e-4) / torch.finfo(fp8).max
    bits = s.view(torch.int)
    exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
    s = (exponent.clamp(1, 254) << 23).view(torch.float)
    return (g * (1.0 / s.unsqueeze(-1))).to(fp8).view(y.shape), s


def quant_unfloored_scale(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """The hub's ``fp8_act_quant``: the stored scale has no floor, the divisor has."""
    g = _groups(y, group_size).float()
    s = g.abs().amax(-1) / torch.finfo(fp8).max
    return (g / s.clamp(min=1e-12).unsqueeze(-1)).to(fp8).view(y.shape), s


def quant_bare(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """HF's older ``act_quant``: no floor (0 / 0 in a group of zeros), no clamp."""
    g = _groups(y, group_size).float()
    s = g.abs().amax(-1) / torch.finfo(fp8).max
    return (g / s.unsqueeze(-1)).to(fp8).view(y.shape), s


def quant_inverse_scale(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """448 / amax is stored and multiplied with."""
    most = torch.finfo(fp8).max
    g = _groups(y, group_size).float()
    s = most / g.abs().amax(-1).clamp(min=1e-10)
    return (g * s.unsqueeze(-1)).clamp(-most, most).to(fp8).view(y.shape), s


def quant_constant_factor(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """amax · (1 / 448) + eps, capped."""
    most = torch.finfo(fp8).max
    g = _groups(y, group_size).float()
    s = (g.abs().amax(-1) * (1.0 / most) + 1e-8).clamp(max=1.0)
    return (g / s.unsqueeze(-1)).clamp(-most, most).to(fp8).view(y.shape), s


def quant_torchao(y: Tensor, group_size: int, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
    """torchao on bf16 values: scale and quotient are bf16 too."""
    most = torch.finfo(fp8).max
    g = _groups(y, group_size)
    s = g.abs().amax(-1) / most
    return (g / s.unsqueeze(-1)).clamp(-most, most).to(fp8).view(y.shape), s.float()


@dataclass(frozen=True)
class QuantForm:
    """A quantisation and its spec, both for an FP8 dtype."""

    name: str
    function: Callable[[Tensor, int, torch.dtype], tuple[Tensor, Tensor]]
    spec: Callable[[float], QuantSpec]  # of the FP8 maximum
    zeros_are_nan: bool = False  # a group of zeros is 0 / 0
    dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.float16, torch.float32)


_RECIPROCAL = (("reciprocal",),)

QUANT_FORMS = [
    QuantForm("vllm", quant_vllm, lambda most: QuantSpec()),
    QuantForm(
        "vllm_ue8m0",
        quant_vllm_ue8m0,
        lambda most: QuantSpec((("div", most), ("exp2_ceil_log2",), ("max", 1.0 / (most * 512.0))), clamp=most),
    ),
    QuantForm(
        "deepgemm",
        quant_deepgemm,
        lambda most: QuantSpec((("max", 1e-4), ("div", most)), _RECIPROCAL, operation="multiply"),
    ),
    QuantForm(
        "deepgemm_ue8m0",
        quant_deepgemm_ue8m0,
        lambda most: QuantSpec((("max", 1e-4), ("div", most), ("ceil_pow2_bits",)), _RECIPROCAL, operation="multiply"),
    ),
    QuantForm("unfloored", quant_unfloored_scale, lambda most: QuantSpec((("div", most),), (("max", 1e-12),))),
    QuantForm("bare", quant_bare, lambda most: QuantSpec((("div", most),)), zeros_are_nan=True),
    QuantForm(
        "inverse",
        quant_inverse_scale,
        lambda most: QuantSpec((("max", 1e-10), ("reciprocal",), ("mul", most)), operation="multiply", clamp=most),
    ),
    QuantForm(
        "constant_factor",
        quant_constant_factor,
        lambda most: QuantSpec((("mul", 1.0 / most), ("add", 1e-8), ("min", 1.0)), clamp=most),
    ),
    QuantForm(
        "torchao",
        quant_torchao,
        lambda most: QuantSpec(
            (("round", "bfloat16"), ("div", most), ("round", "bfloat16")), clamp=most, quotient="bfloat16"
        ),
        zeros_are_nan=True,
        dtypes=(torch.bfloat16,),
    ),
]
