"""What this machine offers: Triton, AITER's kernels, the GPU's architecture, the FP8 format.

Nothing is imported and no device is asked until a function is called. Every answer that is no comes with its reason.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gdn_backend.contained_import import import_contained

#: AMD architectures whose FP8 hardware computes in the "fnuz" formats (CDNA3); later ones use the OCP formats.
FNUZ_ARCHITECTURES = ("gfx940", "gfx941", "gfx942")

#: Where AITER keeps what is looked for. Without the first its fused op cannot serve a site; the second holds its Gated
#: DeltaNet kernels.
AITER_QUANT_MODULE = "aiter.ops.triton.quant"
AITER_QUANT_FUNCTION = "fused_rms_gated_fp8_group_quant"
AITER_DECODE_MODULE = "aiter.ops.triton.gated_delta_net"


@dataclass(frozen=True)
class Availability:
    """Whether something can be used here, and why not (or, where it can, what was found)."""

    ok: bool
    reason: str


@dataclass(frozen=True)
class AiterProbe:
    """What AITER offers here."""

    quant: Availability  # the fused gated norm + FP8 quantisation
    decode: Availability  # the Gated DeltaNet decode kernels
    function: Callable[..., Any] | None = None  # the fused op itself


def is_rocm() -> bool:
    """Whether this is a ROCm build of torch."""
    return torch.version.hip is not None


def inductor_rounds_on_cpu() -> bool:
    """Whether Inductor's C++ code rounds where the graph does under ``emulate_precision_casts``.

    Seen: torch 2.13 does, torch 2.11 does not (3.6% of a Qwen3-Next site's codes differ from eager's).
    """
    return torch.__version__ >= "2.13"  # a TorchVersion, which compares as versions do


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
    """Whether Triton imports here. Whether there is a GPU for it is another question: the tensors answer that."""
    try:
        triton = importlib.import_module("triton")
    except ModuleNotFoundError as error:
        missing = "the triton package is not installed"
        return Availability(False, missing if error.name == "triton" else f"importing triton failed: {error}")
    except Exception as error:  # whatever a broken installation raises
        return Availability(False, f"importing triton raised {type(error).__name__}: {error}")
    return Availability(True, f"triton {getattr(triton, '__version__', 'of unknown version')}")


def gdn_triton_kernels_status() -> tuple[bool, str]:
    """:func:`are_gdn_triton_kernels_available` and the reason for its answer."""
    probe = aiter_probe()
    for status in (probe.quant, probe.decode):
        if not status.ok:
            return False, status.reason
    return True, f"{probe.quant.reason}; {probe.decode.reason}"


def are_gdn_triton_kernels_available() -> bool:
    """True when AITER's ``fused_rms_gated_fp8_group_quant`` and ``gated_delta_net`` import here.

    Imports AITER where that can work: on a ROCm build of torch with AITER installed. Never raises.
    """
    return gdn_triton_kernels_status()[0]


@functools.cache
def aiter_probe() -> AiterProbe:
    """Import what we use of AITER, once. Only on ROCm, and only if it is installed; a failure leaves nothing behind.

    On other machines the import raises after some seconds, and on a ROCm that AITER was not built for it may start
    compilers and raise SystemExit.
    """
    if not is_rocm():
        return _no_aiter("not a ROCm build of torch")
    if not _is_installed("aiter"):
        return _no_aiter("the aiter package is not installed")
    quant = import_contained(AITER_QUANT_MODULE)
    if isinstance(quant, str):
        return _no_aiter(quant)
    version = getattr(sys.modules.get("aiter"), "__version__", "of unknown version")
    function = getattr(quant, AITER_QUANT_FUNCTION, None)
    if not callable(function):
        return _no_aiter(f"aiter {version} has no {AITER_QUANT_FUNCTION} in {AITER_QUANT_MODULE}")
    decode = import_contained(AITER_DECODE_MODULE)
    if isinstance(decode, str):
        decode_status = Availability(False, f"aiter {version}: {decode}")
    else:
        decode_status = Availability(True, f"{AITER_DECODE_MODULE} found")
    return AiterProbe(Availability(True, f"aiter {version}"), decode_status, function)


def probe_aiter_in_subprocess(timeout: float = 120.0) -> AiterProbe:
    """:func:`aiter_probe` in a Python process of its own, for ``doctor``; ``function`` is left out.

    Args:
        timeout: seconds after which the process is stopped.
    """
    if not is_rocm():
        return aiter_probe()
    code = (
        "import json; from gdn_backend.environment import aiter_probe as p; a = p();"
        "print('\\n' + json.dumps([[s.ok, s.reason] for s in (a.quant, a.decode)]))"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return _no_aiter(f"importing aiter did not finish within {timeout:g} s")
    if done.returncode != 0 or not done.stdout.strip():
        last = (done.stderr.strip() or "no output").splitlines()[-1]
        return _no_aiter(f"importing aiter ended Python with status {done.returncode}: {last}")
    quant, decode = json.loads(done.stdout.splitlines()[-1])
    return AiterProbe(Availability(*quant), Availability(*decode))


def _no_aiter(reason: str) -> AiterProbe:
    return AiterProbe(Availability(False, reason), Availability(False, reason))


def _is_installed(package: str) -> bool:
    """Whether a top-level package can be found, without importing it."""
    if package in sys.modules:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
