"""Adapter to AITER's fused kernel (work in progress: refuses everything)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gdn_backend.ops.spec import FusedSpec

if TYPE_CHECKING:
    from gdn_backend.ops.dispatch import Operands


def supports(spec: FusedSpec, operands: Operands, *, exact: bool) -> str | None:
    return "not written yet"


def remark(spec: FusedSpec, operands: Operands) -> str:
    return ""
