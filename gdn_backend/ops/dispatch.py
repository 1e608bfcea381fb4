"""Which kernel serves a site, and why not the ones before it.

Each kernel answers ``supports(spec, operands)`` with a reason for its refusal, or None. In order of preference: AITER
on ROCm, where its arithmetic is the graph's (or ``numerics="fast"`` waives that); our Triton kernel on any GPU; the
plain PyTorch reference where there is no GPU. On a GPU the reference is taken only when asked for: its dozen small
kernels are slower than what Inductor makes of the unfused graph, so a site that no GPU kernel takes stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from gdn_backend import environment
from gdn_backend.ops.call import KERNELS
from gdn_backend.ops.spec import FusedSpec, dtype_name

TITLES = {"aiter": "AITER", "triton": "Triton", "reference": "reference"}
INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Operands:
    """Device and dtypes of a site's tensors; what a kernel may need to know beside the spec."""

    device: torch.device
    x: torch.dtype
    gate: torch.dtype
    weight: torch.dtype | None = None
    bias: torch.dtype | None = None
    weight_size: int | None = None  # values of the weight; None: as many as share a mean
    bias_size: int | None = None
    strided: tuple[str, ...] | None = None  # "x", "gate": those that are not contiguous; None: not known


@dataclass(frozen=True)
class Choice:
    """The kernel that serves a site, and why it and not the ones before it."""

    kernel: str
    reason: str


@dataclass(frozen=True)
class Refusal:
    """No kernel takes the site (or the one asked for does not), and why."""

    kernel: str
    reason: str


class KernelUnavailableError(RuntimeError, ValueError):
    """A kernel was asked for by name that cannot run on this machine."""


def check_requested(requested: str) -> None:
    """Raise unless the kernel asked for can run on this machine.

    Raises:
        ValueError: not the name of a kernel.
        KernelUnavailableError: it cannot run here; the text says why, and lists those that can.
    """
    if requested == "auto":
        return
    if requested not in KERNELS:
        raise ValueError(f"kernel={requested!r}: expected one of auto, {', '.join(KERNELS)}")
    reason = _MACHINE_CHECKS[requested]()
    if reason is not None:
        usable = [name for name in KERNELS if _MACHINE_CHECKS[name]() is None]
        raise KernelUnavailableError(
            f"kernel {requested!r} cannot run on this machine: {reason}; kernels that can: {', '.join(usable)}"
        )


def choose_kernel(
    spec: FusedSpec, operands: Operands, *, requested: str = "auto", numerics: str = "exact"
) -> Choice | Refusal:
    """The kernel for a site.

    Args:
        requested: a kernel's name, or ``"auto"``; a kernel asked for by name serves the site or nobody does.
        numerics: ``"exact"`` or ``"fast"``; matters to AITER alone, and not when AITER is asked for by name.
    """
    for name in ("x", "gate", "weight", "bias"):
        dtype = getattr(operands, name)
        if dtype is not None and dtype not in INPUT_DTYPES:
            return Refusal(requested, f"{name} is {dtype_name(dtype)}; kernels take bfloat16, float16 and float32")
    if requested != "auto":
        reason = _SITE_CHECKS[requested](spec, operands, "fast")
        if reason is not None:
            return Refusal(requested, f"{TITLES[requested]}: {reason}")
        return Choice(requested, _join("asked for by name", _remark(requested, spec, operands)))
    refused: list[str] = []
    for name in KERNELS if operands.device.type != "cuda" else ("aiter", "triton"):
        reason = _SITE_CHECKS[name](spec, operands, numerics)
        if reason is None:
            return Choice(name, _join(*refused, _remark(name, spec, operands)))
        refused.append(f"{TITLES[name]}: {reason}")
    return Refusal("auto", _join(*refused))


def _check_aiter(spec: FusedSpec, operands: Operands, numerics: str) -> str | None:
    if not environment.is_rocm():
        return "not a ROCm build of torch"
    if operands.device.type != "cuda":
        return f"the tensors are on {operands.device.type}"
    status = environment.aiter_probe().quant
    if not status.ok:
        return status.reason
    from gdn_backend.kernels import aiter

    return aiter.supports(spec, operands, exact=numerics == "exact")


def _check_triton(spec: FusedSpec, operands: Operands, numerics: str) -> str | None:
    if operands.device.type != "cuda":
        return f"the tensors are on {operands.device.type}"
    status = environment.triton_status()
    if not status.ok:
        return status.reason
    from gdn_backend.kernels import gated_rmsnorm_quant

    return gated_rmsnorm_quant.supports(spec, operands)


def _check_reference(spec: FusedSpec, operands: Operands, numerics: str) -> str | None:
    return None


def _machine_check_aiter() -> str | None:
    status = environment.aiter_probe().quant
    return None if status.ok else status.reason


def _machine_check_triton() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no GPU"
    status = environment.triton_status()
    return None if status.ok else status.reason


def _remark(kernel: str, spec: FusedSpec, operands: Operands) -> str:
    """What the report should say about a kernel that serves a site."""
    if kernel == "reference" and operands.device.type == "cpu":
        if not environment.inductor_rounds_on_cpu():
            return f"not fused further by Inductor, which in torch {torch.__version__} skips roundings on the CPU"
        if spec.shows_summation_order:
            return "not fused further by Inductor, whose order of summation nothing hides in fp32"
    if kernel != "aiter":
        return ""
    from gdn_backend.kernels import aiter

    return aiter.remark(spec, operands)


def _join(*reasons: str) -> str:
    return "; ".join(reason for reason in reasons if reason)


_SITE_CHECKS: dict[str, Callable[[FusedSpec, Operands, str], str | None]] = {
    "aiter": _check_aiter,
    "triton": _check_triton,
    "reference": _check_reference,
}
_MACHINE_CHECKS: dict[str, Callable[[], str | None]] = {
    "aiter": _machine_check_aiter,
    "triton": _machine_check_triton,
    "reference": lambda: None,
}
