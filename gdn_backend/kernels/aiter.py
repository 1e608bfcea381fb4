"""Adapter to AITER's ``fused_rms_gated_fp8_group_quant``.

That function takes contiguous x and gate ``[M, N]`` and a weight ``[N]``, norms over N, and quantises groups that
divide N. Its chain is fp32 from end to end::

    scale = max([2^ceil(log2] max(|y|) / fp8_max [)], floor)
    codes = clamp(y / scale, fp8_min, fp8_max)

What is below follows its signature and source as of August 2026; none of it was run on AMD hardware. Where it differs
from eager: it skips every rounding before the quantisation; it divides by ``fp8_max``, where eager on a GPU multiplies
by the reciprocal (another last bit in half of all scales, unless they are rounded to powers of two); and its maxima
drop NaN, so that a group with NaN in it comes out with finite codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from gdn_backend import environment
from gdn_backend.ops.outputs import allocate_outputs
from gdn_backend.ops.spec import FusedSpec, QuantSpec

if TYPE_CHECKING:
    from gdn_backend.ops.dispatch import Operands

#: Bytes of the widest row that AITER's kernel takes.
MAX_ROW_BYTES = 65536


@dataclass(frozen=True)
class Formula:
    """AITER's arguments for a scale formula."""

    fp8_max: float
    use_ue8m0: bool
    floor: float


def supports(spec: FusedSpec, operands: Operands, *, exact: bool) -> str | None:
    """Why AITER does not take a site, or None.

    Args:
        exact: whether the result has to be eager's; if not, all that AITER can express is taken.
    """
    return _inexpressible(spec, operands) or (_inexact(spec) if exact else None)


def remark(spec: FusedSpec, operands: Operands) -> str:
    """What the report says of a site that AITER serves: where its result is not eager's, and what it copies."""
    inexact = _inexact(spec)
    remarks = [f"not exact: {inexact}"] if inexact else []
    if operands.strided is None:
        remarks.append("copies x and gate where they are not contiguous")
    elif operands.strided:
        verb = "is" if len(operands.strided) == 1 else "are"
        remarks.append(f"copies {' and '.join(operands.strided)}, which {verb} not contiguous")
    return "; ".join(remarks)


def launch(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, spec: FusedSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call AITER for a spec that :func:`supports`; x and gate are copied where they are not contiguous.

    Returns:
        codes ``[T, hidden_size]`` and scales ``[T, num_groups]``, both contiguous.
    """
    codes, scales = allocate_outputs(x, spec)
    if codes.numel() == 0:
        return codes, scales  # AITER computes its grid from the number of rows, which may not be zero
    probe = environment.aiter_probe()
    formula = _formula(spec.quant.resolve(spec.torch_fp8_dtype))
    if probe.function is None or formula is None:
        raise RuntimeError(f"AITER cannot run this call: {probe.quant.reason}")
    pieces = (x.numel() // spec.norm_size, spec.norm_size)
    codes, scales = probe.function(
        x.reshape(pieces).contiguous(),
        weight,
        bias,
        gate.reshape(pieces).contiguous(),
        eps,
        norm_before_gate=spec.norm_before_gate,
        use_ue8m0=formula.use_ue8m0,
        activation=spec.activation,
        out_dtype=spec.torch_fp8_dtype,
        fp8_min=-formula.fp8_max,
        fp8_max=formula.fp8_max,
        fp8_min_scaling_factor=formula.floor,
        group_size=spec.group_size,
    )
    return codes.view(-1, spec.hidden_size), scales.view(-1, spec.num_groups)


def _inexpressible(spec: FusedSpec, operands: Operands) -> str | None:
    """What of the spec AITER's function has no argument for."""
    quant = spec.quant.resolve(spec.torch_fp8_dtype)
    formula = _formula(quant)
    widest = max(torch.finfo(dtype).bits // 8 for dtype in (operands.x, operands.gate))
    checks = [
        (operands.weight is None, "it needs a weight"),
        (spec.weight_offset != 0.0, f"it adds no offset to the weight (here {spec.weight_offset:g})"),
        (operands.weight_size not in (None, spec.norm_size), f"its weight is as wide as the norm ({spec.norm_size})"),
        (operands.bias_size not in (None, spec.norm_size), f"its bias is as wide as the norm ({spec.norm_size})"),
        (spec.norm_size % spec.group_size != 0, f"its groups divide the norm ({spec.group_size} / {spec.norm_size})"),
        (spec.norm_size * widest > MAX_ROW_BYTES, f"its norm spans at most {MAX_ROW_BYTES} bytes"),
        (quant.scale_layout != "row", "it writes row-major scales"),
        (formula is None, f"it has no such scale formula: {quant.scale_steps}"),
        (
            quant.clamp not in (None, formula and formula.fp8_max),
            f"it clamps to what it divides by, not to {quant.clamp}",
        ),
    ]
    return next((reason for refused, reason in checks if refused), None)


def _inexact(spec: FusedSpec) -> str | None:
    """Why AITER's result is not eager's, or None; taken from its source."""
    quant = spec.quant.resolve(spec.torch_fp8_dtype)
    if spec.roundings:
        return f"its chain is fp32, the graph rounds ({', '.join(spec.roundings)})"
    if quant.quotient is not None:
        return f"the graph rounds the quotient to {quant.quotient}"
    if quant.operation == "multiply":
        return "it divides by the scale, the graph multiplies by its reciprocal"
    if quant.scale_format != "ue8m0":
        return "it divides by the FP8 maximum, eager multiplies by its reciprocal"
    return None


def _formula(quant: QuantSpec) -> Formula | None:
    """AITER's arguments for ``quant``, or None where it has none.

    It always floors the scale, so a formula without a floor cannot be had (and would make 0 / 0 of a group of zeros).
    """
    match quant.scale_steps:
        case (("div", float(fp8_max)), ("max", float(floor))):
            formula = Formula(fp8_max, False, floor)
        case (("max", float(amax_floor)), ("div", float(fp8_max))):
            formula = Formula(fp8_max, False, amax_floor / fp8_max)
        case (("div", float(fp8_max)), ("exp2_ceil_log2",), ("max", float(floor))):
            formula = Formula(fp8_max, True, floor)
        case _:
            return None
    by_scale = (quant.operation, quant.factor_steps) in (("divide", ()), ("multiply", (("reciprocal",),)))
    return formula if by_scale and formula.floor > 0 else None
