"""The kernel compiled, without a GPU, for the architectures it is meant for: what the listings must show.

No spills, loads of at least eight bytes a lane, and the hardware's conversion to FP8, for each main spec.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

import triton

from gdn_backend.kernels.block_gemm import block_gemm_arguments, block_gemm_kernel
from gdn_backend.kernels.gated_rmsnorm_quant import plan
from gdn_backend.kernels.gated_rmsnorm_quant_kernel import gated_rmsnorm_quant_kernel
from gdn_backend.ops.gated_rmsnorm_quant import allocate_outputs
from gdn_backend.ops.spec import FP8_DTYPES, FusedSpec, QuantSpec
from tests.kernels.listings import LISTINGS, Listing, compile_kernel, spilled_bytes

QWEN = ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
BASE = FusedSpec(hidden_size=4096, head_dim=128, norm_size=128, group_size=128, roundings=QWEN)
SPECS = {
    "qwen": BASE,
    "heads of 96": dataclasses.replace(BASE, hidden_size=768, head_dim=96, norm_size=96),
    "zamba2": dataclasses.replace(
        BASE, hidden_size=5120, norm_size=2560, norm_before_gate=False, roundings=("output:bfloat16",)
    ),
    "olmo": dataclasses.replace(BASE, hidden_size=5760, head_dim=192, norm_size=192),
    "mamba2": dataclasses.replace(
        BASE, hidden_size=8192, norm_size=1024, norm_before_gate=False, roundings=("output:bfloat16",)
    ),
    "olmo per token": dataclasses.replace(
        BASE, hidden_size=5760, head_dim=192, norm_size=192, group_size=5760, granularity="token"
    ),
    "per token": dataclasses.replace(BASE, group_size=4096, granularity="token"),
    "ue8m0": dataclasses.replace(
        BASE, quant=QuantSpec((("div", 448.0), ("max", 1e-10), ("exp2_ceil_log2",)), clamp=448.0)
    ),
    "Triton's division": dataclasses.replace(BASE, quant=QuantSpec((("div_triton", 448.0),), (), "divide_triton")),
}


def compile_for(spec: FusedSpec, listing: Listing, num_tokens: int) -> triton.compiler.CompiledKernel:
    """The fused kernel as :func:`plan` would have it launched for ``num_tokens`` bf16 tokens."""
    spec = dataclasses.replace(spec, fp8_dtype=listing.fp8_dtype)
    x = torch.empty(num_tokens, spec.hidden_size, dtype=torch.bfloat16, device="meta")
    weight = x[0, : spec.norm_size if spec.norm_before_gate else spec.hidden_size]
    _, arguments = plan(x, x, weight, None, 1e-6, spec, *allocate_outputs(x, spec), listing.machine)
    return compile_kernel(gated_rmsnorm_quant_kernel, arguments, listing.target)


@pytest.mark.parametrize("architecture", sorted(LISTINGS))
@pytest.mark.parametrize("name", sorted(SPECS))
def test_listing(name: str, architecture: str, tmp_path: Path) -> None:
    listing = LISTINGS[architecture]
    compiled = compile_for(SPECS[name], listing, num_tokens=8192)
    text = compiled.asm[listing.assembly]
    assert spilled_bytes(compiled, listing, tmp_path) == 0
    # x and gate, at least; nothing narrower is read from them.
    assert len(re.findall(listing.wide_load, text)) >= 2, text[:2000]
    assert re.search(listing.conversion, text) or listing.fp8_dtype not in listing.machine.hardware_fp8


@pytest.mark.parametrize("name", sorted(SPECS))
def test_loads_are_issued_before_values_are_used(name: str) -> None:
    """As far as PTX shows it: all loads, then the barrier, then all else."""
    for num_tokens in (1, 2048, 8192):
        text = compile_for(SPECS[name], LISTINGS["sm90"], num_tokens).asm["ptx"]
        before, barrier, after = text.partition("bar.red.popc")
        assert barrier and len(re.findall(r"ld\.global", before)) >= 3
        assert "ld.global" not in after


def test_small_launches_fit_too(tmp_path: Path) -> None:
    for listing in LISTINGS.values():
        compiled = compile_for(BASE, listing, num_tokens=1)
        assert spilled_bytes(compiled, listing, tmp_path) == 0
        assert re.search(listing.wide_load, compiled.asm[listing.assembly])
        text = compiled.asm[listing.assembly]
        assert re.search(listing.conversion, text) or listing.fp8_dtype not in listing.machine.hardware_fp8


def test_divisions_are_those_of_the_form() -> None:
    """Eager multiplies by a reciprocal, CUDA kernels divide, Triton's ``/`` is an instruction of its own."""
    formulas = {
        "div": QuantSpec((("div", 448.0), ("max", 1e-7))),
        "div_rn": QuantSpec((("div_rn", 448.0), ("max", 1e-7))),
        "div_triton": QuantSpec((("div_triton", 448.0), ("max", 1e-7)), (), "divide_triton"),
    }
    found = {}
    for name, quant in formulas.items():
        text = compile_for(dataclasses.replace(BASE, quant=quant), LISTINGS["sm90"], num_tokens=8192).asm["ptx"]
        found[name] = {word for word in ("div.rn.f32", "div.full.f32") if word in text}
    assert found == {"div": set(), "div_rn": {"div.rn.f32"}, "div_triton": {"div.full.f32"}}


@pytest.mark.parametrize("architecture", sorted(LISTINGS))
def test_the_block_gemm_uses_the_matrix_units(architecture: str, tmp_path: Path) -> None:
    listing = LISTINGS[architecture]
    fp8 = FP8_DTYPES[listing.fp8_dtype]
    codes, weight = (torch.empty(rows, 4096, dtype=fp8, device="meta") for rows in (64, 2048))
    scales, weight_scales = (torch.empty(rows, 32, device="meta") for rows in (64, 16))
    output = torch.empty(64, 2048, dtype=torch.bfloat16, device="meta")
    arguments = block_gemm_arguments(codes, scales, weight, weight_scales, output)
    compiled = compile_kernel(block_gemm_kernel, arguments, listing.target)
    assert spilled_bytes(compiled, listing, tmp_path) == 0
    assert re.search(listing.matrix_unit, compiled.asm[listing.assembly])
