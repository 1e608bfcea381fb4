"""What this machine offers: AITER, Triton, the GPU's architecture, the FP8 format.

Nothing is imported and no device is asked until a function is called. Every answer that is no comes with its reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

#: AMD architectures whose FP8 hardware computes in the "fnuz" formats (CDNA3); later ones use the OCP formats.
FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")


@dataclass(frozen=True)
class Availability:
    """Whether something can be used here, and why not (or, where it can, what was found)."""

    ok: bool
    reason: str


def is_rocm() -> bool:
    """Whether this is a ROCm build of torch."""
    return torch.version.hip is not None


def architecture(device: torch.device) -> str:
    """``"sm90"``, ``"gfx942"``, ... of a CUDA or ROCm device; the device type of any other."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return device.type
    properties: Any = torch.cuda.get_device_properties(device)
    if is_rocm():
        return str(properties.gcnArchName).partition(":")[0]
    return f"sm{properties.major}{properties.minor}"


def default_fp8_dtype(device: torch.device | None = None) -> torch.dtype:
    """The FP8 dtype that the matrix units of ``device`` (by default the current GPU, or the CPU) compute in.

    ``torch.float8_e4m3fnuz`` on gfx940, gfx941 and gfx942, ``torch.float8_e4m3fn`` everywhere else.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.float8_e4m3fnuz if architecture(device) in FNUZ_ARCHITECTURES else torch.float8_e4m3fn


@functools.cache
def triton_status() -> Availability:
    """Whether Triton imports here. A GPU is not asked for: the tensors that need the kernel say whether there is one."""
    if importlib.util.find_spec("triton") is None:
        return Availability(False, "the triton package is not installed")
    try:
        triton = importlib.import_module("triton")
    except Exception as error:  # whatever a broken installation raises
        return Availability(False, f"importing triton raised {type(error).__name__}: {error}")
    return Availability(True, f"triton {triton.__version__}")


def aiter_status() -> Availability:
    """Whether AITER's ``fused_rms_gated_fp8_group_quant`` imports here."""
    if not is_rocm():
        return Availability(False, "not a ROCm build of torch")
    return Availability(False, "not probed")


def gdn_triton_kernels_status() -> tuple[bool, str]:
    """:func:`are_gdn_triton_kernels_available` and the reason for its answer."""
    status = aiter_status()
    return status.ok, status.reason


def are_gdn_triton_kernels_available() -> bool:
    """True when AITER's fused gated norm + FP8 quantisation and its Gated DeltaNet decode kernels import here."""
    return gdn_triton_kernels_status()[0]
