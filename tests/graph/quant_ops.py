"""Stand-ins for the quantisation ops of vLLM, AITER and Hugging Face's hub: their schemas, their formulas on the CPU.

The formulas are written out here in plain torch from the kernels' sources, not taken from the code under test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

FP8 = torch.float8_e4m3fn
GROUP = 128

_VLLM = torch.library.Library("vllm", "FRAGMENT")
_C = torch.library.Library("_C", "FRAGMENT")
_HUB = torch.library.Library("finegrained_fp8_0a1b2c3", "FRAGMENT")
_OTHER = torch.library.Library("somebody", "FRAGMENT")


def _define(library: torch.library.Library, schema: str, implementation: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    library.define(schema)
    library.impl(name, implementation, "CPU")
    torch.library.register_fake(f"{library.ns}::{name}", implementation, lib=library)


def _groups(x: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    groups = x.float().reshape(*x.shape[:-1], x.shape[-1] // size, size)
    return groups, groups.abs().amax(-1, keepdim=True)


def _finish(codes: torch.Tensor, scales: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return codes.to(FP8).reshape(x.shape), scales.squeeze(-1)


def per_token_group(
    x: torch.Tensor, size: int, eps: float = 1e-10, ue8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's CUDA and Triton kernels."""
    groups, amax = _groups(x, size)
    scales = amax.clamp(min=eps) / 448.0
    if ue8m0:
        scales = torch.exp2(torch.ceil(torch.log2(scales.clamp(min=1e-10))))
    return _finish((groups / scales).clamp(-448.0, 448.0), scales, x)


def aiter_group(x: torch.Tensor, size: int, transpose_scale: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    groups, amax = _groups(x, size)
    scales = amax.clamp(min=1e-10) * (1.0 / 448.0)
    return _finish(groups * (1.0 / scales), scales, x)


def hub_act_quant(x: torch.Tensor, size: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    groups, amax = _groups(x, size)
    scales = amax / 448.0
    return _finish(groups / scales.clamp(min=1e-12), scales, x)


def act_quant(x: torch.Tensor, size: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """Hugging Face 4.57's kernel: no floor."""
    groups, amax = _groups(x, size)
    scales = amax / 448.0
    return _finish(groups / scales, scales, x)


def per_token(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (x.float().abs().amax(-1, keepdim=True) / 448.0).clamp(min=1.0 / (448.0 * 512.0))
    return (x.float() / scales).clamp(-448.0, 448.0).to(FP8), scales


def _fill_groups(input, output_q, output_s, group_size, eps, fp8_min, fp8_max, scale_ue8m0):  # type: ignore[no-untyped-def]
    codes, scales = per_token_group(input, group_size, eps, scale_ue8m0)
    output_q.copy_(codes)
    output_s.copy_(scales)


def _fill_tokens(result, input, scale, scale_ub=None):  # type: ignore[no-untyped-def]
    codes, scales = per_token(input)
    result.copy_(codes)
    scale.copy_(scales)


def _fill_static(result, input, scale):  # type: ignore[no-untyped-def]
    result.copy_((input.float() / scale).clamp(-448.0, 448.0).to(FP8))


def _fill_tensor(result, input, scale):  # type: ignore[no-untyped-def]
    scale.copy_(input.float().abs().amax() / 448.0)
    _fill_static(result, input, scale)


_define(_VLLM, "triton_per_token_group_quant_fp8(Tensor x, SymInt group_size) -> (Tensor, Tensor)", per_token_group)
_define(_VLLM, "rocm_aiter_group_fp8_quant(Tensor x, SymInt group_size, bool transpose_scale=False) "
        "-> (Tensor, Tensor)", aiter_group)  # fmt: skip
_define(_HUB, "fp8_act_quant(Tensor x, SymInt block_size=128) -> (Tensor, Tensor)", hub_act_quant)
_define(_C, "per_token_group_fp8_quant(Tensor input, Tensor! output_q, Tensor! output_s, int group_size, float eps, "
        "float fp8_min, float fp8_max, bool scale_ue8m0) -> ()", _fill_groups)  # fmt: skip
_define(_C, "dynamic_per_token_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale, Tensor? scale_ub) -> ()",
        _fill_tokens)  # fmt: skip
_define(_C, "static_scaled_fp8_quant(Tensor! result, Tensor input, Tensor scale) -> ()", _fill_static)
_define(_C, "dynamic_scaled_fp8_quant(Tensor! result, Tensor input, Tensor! scale) -> ()", _fill_tensor)
_define(_OTHER, "secret_quant(Tensor x) -> (Tensor, Tensor)", lambda x: per_token_group(x, GROUP))


def call_group_writer(
    x: torch.Tensor, ue8m0: bool = False, column: bool = False, size: int = GROUP
) -> tuple[torch.Tensor, torch.Tensor]:
    """As vLLM calls the op that writes to its arguments, scales row- or column-major."""
    codes = torch.empty_like(x, dtype=FP8)
    rows, groups = x.shape[0], x.shape[1] // size
    if column:
        scales = torch.empty((groups, rows), dtype=torch.float32, device=x.device).permute(-1, -2)
    else:
        scales = torch.empty((rows, groups), dtype=torch.float32, device=x.device)
    torch.ops._C.per_token_group_fp8_quant(x, codes, scales, size, 1e-10, -448.0, 448.0, ue8m0)
    return codes, scales


def call_token_writer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty_like(x, dtype=FP8)
    scales = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    torch.ops._C.dynamic_per_token_scaled_fp8_quant(codes, x, scales, None)
    return codes, scales


def call_tensor_writer(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scale = torch.empty_like(x, dtype=FP8), torch.empty(1, dtype=torch.float32, device=x.device)
    torch.ops._C.dynamic_scaled_fp8_quant(codes, x, scale)
    return codes, scale


def call_static_writer(x: torch.Tensor) -> torch.Tensor:
    codes = torch.empty_like(x, dtype=FP8)
    torch.ops._C.static_scaled_fp8_quant(codes, x, torch.ones(1))
    return codes


def ceil_to_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """DeepGEMM's, by exponent bits (deep_gemm/utils/math.py)."""
    bits = scales.abs().float().view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
    return (exponent.clamp(1, 254) << 23).view(torch.float32)


def deepgemm_cast(x: torch.Tensor, ue8m0: bool = False, size: int = GROUP) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepGEMM's ``per_token_cast_to_fp8``: the data goes through a buffer padded to whole groups."""
    rows, width = x.shape
    padded_width = (width + size - 1) // size * size
    padded = torch.empty((rows, padded_width), dtype=x.dtype, device=x.device).fill_(0)
    padded[:, :width] = x
    groups = padded.view(rows, padded_width // size, size)
    scales = groups.abs().float().amax(dim=2).view(rows, padded_width // size).clamp(1e-4) / 448.0
    if ue8m0:
        scales = ceil_to_ue8m0(scales)
    codes = (groups * (1.0 / scales.unsqueeze(2))).to(FP8).view(rows, padded_width)[:, :width].contiguous()
    return codes, scales


def packed(codes: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """UE8M0 scales as DeepGEMM takes them on Blackwell: four exponents in an int32."""
    return codes, (scales.view(torch.int32) >> 23).to(torch.uint8).view(torch.int32)
