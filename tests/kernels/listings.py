"""Kernels compiled without a GPU, and what their assembly and machine code say."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gdn_backend.kernels.configs import CDNA3, CDNA4, NVIDIA, Architecture

#: NVIDIA's tools, as Triton ships them.
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Listing:
    """An architecture, and what its assembly says."""

    target: GPUTarget
    machine: Architecture
    fp8_dtype: str
    assembly: str
    wide_load: str
    conversion: str
    matrix_unit: str


LISTINGS = {
    "gfx942": Listing(
        GPUTarget("hip", "gfx942", 64), CDNA3, "float8_e4m3fnuz", "amdgcn",
        r"(?:global|buffer)_load_dwordx[24]\b", r"v_cvt_pk_fp8_f32", r"v_mfma_f32_\w+_fp8_fp8",
    ),
    "gfx950": Listing(
        GPUTarget("hip", "gfx950", 64), CDNA4, "float8_e4m3fn", "amdgcn",
        r"(?:global|buffer)_load_dwordx[24]\b", r"v_cvt_(?:scalef32_)?pk_fp8_f32",
        r"v_mfma_f32_\w+_f8f6f4",
    ),
    "sm90": Listing(
        GPUTarget("cuda", 90, 32), NVIDIA, "float8_e4m3fn", "ptx",
        r"ld\.global[\w.:]*\.v[24]\.b32", r"cvt\.rn\.satfinite\.e4m3x2\.f32",
        r"wgmma\.mma_async\S+\.e4m3\.e4m3",
    ),
}  # fmt: skip
POINTERS = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.float8_e4m3fn: "*fp8e4nv",
            torch.float8_e4m3fnuz: "*fp8e4b8", torch.uint8: "*u8"}  # fmt: skip


def compile_kernel(
    kernel: triton.JITFunction, arguments: dict[str, Any], target: GPUTarget
) -> triton.compiler.CompiledKernel:
    """``kernel`` as it would be specialised for these arguments, meta tensors among them."""
    options = {"num_warps": arguments.pop("num_warps")}
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        if parameter.is_constexpr:
            signature[parameter.name], constants[(index,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[(index,)] = POINTERS[value.dtype], [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(ASTSource(kernel, signature, constants, attributes), target=target, options=options)


def said_by(tool: str, *arguments: str) -> str:
    """What one of NVIDIA's tools prints."""
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def resource_usage(compiled: triton.compiler.CompiledKernel, folder: Path) -> dict[str, int]:
    """What an NVIDIA kernel uses, as cuobjdump names it: REG, STACK, LOCAL and more."""
    binary = folder / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    usage = said_by("cuobjdump", "--dump-resource-usage", str(binary))
    return {name: int(amount) for name, amount in re.findall(r"\b([A-Z]+):(\d+)", usage)}


def spilled_bytes(compiled: triton.compiler.CompiledKernel, listing: Listing, folder: Path) -> int:
    """What the kernel keeps in memory for want of registers."""
    if listing.assembly == "amdgcn":
        counts = re.findall(r"\.(?:vgpr_spill_count|private_segment_fixed_size):\s+(\d+)", compiled.asm["amdgcn"])
        assert len(counts) >= 2
        return sum(map(int, counts))
    if shutil.which(str(TOOLS / "cuobjdump")) is None:
        pytest.skip("this Triton carries no cuobjdump")
    usage = resource_usage(compiled, folder)
    return usage["STACK"] + usage["LOCAL"]
