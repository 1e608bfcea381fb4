"""gdn_backend: a ``torch.compile`` backend that fuses gated RMSNorm and FP8 quantisation in Gated DeltaNet models.

``torch.compile(model, backend="gdn_rocm")`` needs no import of this package. What it offers beside that is listed in
``__all__``; each name is loaded when it is first used, so that importing the package stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdn_backend.dry_run import explain
    from gdn_backend.environment import are_gdn_triton_kernels_available
    from gdn_backend.kernels.reference import rms_norm_gated
    from gdn_backend.ops.fp8_quant import fp8_quant
    from gdn_backend.ops.gated_rmsnorm_quant import gated_rmsnorm_fp8_quant
    from gdn_backend.ops.spec import QuantSpec
    from gdn_backend.report.store import clear_reports, last_report, reports

__version__ = "0.1.0"

__all__ = [
    "QuantSpec",
    "are_gdn_triton_kernels_available",
    "clear_reports",
    "explain",
    "fp8_quant",
    "gated_rmsnorm_fp8_quant",
    "last_report",
    "reports",
    "rms_norm_gated",
]

_HOMES = {
    "QuantSpec": "ops.spec",
    "are_gdn_triton_kernels_available": "environment",
    "clear_reports": "report.store",
    "explain": "dry_run",
    "fp8_quant": "ops.fp8_quant",
    "gated_rmsnorm_fp8_quant": "ops.gated_rmsnorm_quant",
    "last_report": "report.store",
    "reports": "report.store",
    "rms_norm_gated": "kernels.reference",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
