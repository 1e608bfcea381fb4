"""The quantisation ops of vLLM, and of AITER by way of vLLM, known by name; arguments are read by their schemas' names.

==============================================  ==================================================  =================
op                                              scale; codes                                        source (vLLM)
==============================================  ==================================================  =================
``vllm::triton_per_token_group_quant_fp8``      max(amax, 1e-10) / max; clamp(y / scale)            fp8_utils.py
``_C::per_token_group_fp8_quant``               max(amax, eps) / max, UE8M0 by logarithm on         per_token_group_
                                                request; clamp(y / scale)                           quant.cu
``_C::dynamic_per_token_scaled_fp8_quant``      max(amax / max, 1 / (512 · max)), one a token;      fp8/common.cu
                                                clamp(y / scale)
``vllm::rocm_aiter_group_fp8_quant``            max(amax, 1e-10) · fp32(1 / max); y · (1 / scale)   AITER's quant_
                                                                                                    kernels.cu
==============================================  ==================================================  =================

vLLM's maximum is 448 for e4m3fn and 224 for e4m3fnuz, AITER's is the dtype's own. AITER builds without the floor
differ for groups below it. The ops in ``_C`` write to their arguments and return nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Node

from gdn_backend.fusion.match import Candidate, Miss, Reason
from gdn_backend.fusion.sinks.results import (
    OpCall,
    candidate,
    formula_miss,
    fresh_buffers,
    layout_miss,
    refused,
    row_width,
    scale_layout,
    tuple_results,
)
from gdn_backend.fusion.walk import dtype_of
from gdn_backend.graph.canonical import GraphView, op_arguments, qualified_op_name
from gdn_backend.graph.shapes import tensor_of
from gdn_backend.ops.spec import QuantSpec, Step

_FLOOR = 1e-10
_AITER_GROUP = 128
_VLLM_MAXIMUM = {torch.float8_e4m3fn: 448.0, torch.float8_e4m3fnuz: 224.0}


def find_vllm_op(view: GraphView, node: Node) -> Candidate | None:
    """A candidate where ``node`` calls one of vLLM's dynamic quantisation ops, else None."""
    name = qualified_op_name(node)
    read = _READERS.get(name) if name is not None else None
    if read is None:
        return None
    arguments = op_arguments(node)
    x = arguments.get("x", arguments.get("input"))
    if not isinstance(x, Node) or tensor_of(x) is None:
        return None
    found = read(view, node, arguments, x)
    if isinstance(found, Miss):
        return refused(view, node, str(name), x, found)
    return candidate(view, found) if found is not None else None


def _single(value: float) -> float:
    """``value`` as the fp32 number that a kernel computes with."""
    return float(torch.tensor(value, dtype=torch.float32))


def _read_triton_group(view: GraphView, node: Node, arguments: dict[str, Any], x: Node) -> OpCall | None:
    results = tuple_results(view, node)
    dtype = dtype_of(results[0]) if 0 in results else None
    maximum = _VLLM_MAXIMUM.get(dtype) if dtype is not None else None
    if maximum is None:
        return None
    steps: tuple[Step, ...] = (("max", _single(_FLOOR)), ("div_triton", maximum))
    quant = QuantSpec(scale_steps=steps, operation="divide_triton", clamp=maximum)
    size = arguments["group_size"]
    return OpCall(node, str(qualified_op_name(node)), x, results[0], results.get(1), size, quant)


def _read_aiter_group(view: GraphView, node: Node, arguments: dict[str, Any], x: Node) -> OpCall | Miss | None:
    results = tuple_results(view, node)
    if 0 not in results or dtype_of(results[0]) not in _VLLM_MAXIMUM:
        return None
    if arguments.get("transpose_scale"):
        return layout_miss(node, "transpose_scale=False", "scales in AITER's transposed layout")
    if arguments["group_size"] != _AITER_GROUP:
        return formula_miss(node, f"groups of {_AITER_GROUP}", f"group_size={arguments['group_size']}")
    maximum = torch.finfo(dtype_of(results[0]) or torch.float8_e4m3fn).max
    steps: tuple[Step, ...] = (("max", _single(_FLOOR)), ("mul", _single(1.0 / maximum)))
    quant = QuantSpec(scale_steps=steps, factor_steps=(("reciprocal",),), operation="multiply")
    return OpCall(node, str(qualified_op_name(node)), x, results[0], results.get(1), _AITER_GROUP, quant)


def _read_group(view: GraphView, node: Node, arguments: dict[str, Any], x: Node) -> OpCall | Miss | None:
    eps, low, high = (arguments[name] for name in ("eps", "fp8_min", "fp8_max"))
    size = arguments["group_size"]
    if not all(isinstance(value, int | float) for value in (eps, low, high, size)) or low != -high:
        return formula_miss(node, "a floor and a maximum that are numbers", f"eps={eps}, fp8_min={low}, fp8_max={high}")
    steps: tuple[Step, ...] = (("max", _single(eps)), ("div_rn", _single(high)))
    if arguments.get("scale_ue8m0"):
        steps = (*steps, ("max", _single(_FLOOR)), ("exp2_ceil_log2",))
    return _written(view, node, x, arguments["output_q"], arguments["output_s"], size, steps, _single(high))


def _read_token(view: GraphView, node: Node, arguments: dict[str, Any], x: Node) -> OpCall | Miss | None:
    codes, width = arguments["result"], row_width(x)
    maximum = _VLLM_MAXIMUM.get(dtype_of(codes) or torch.uint8)
    if width is None or maximum is None:
        return None
    if arguments.get("scale_ub") is not None:
        return formula_miss(node, "a scale without an upper bound", "scale_ub")
    steps: tuple[Step, ...] = (("div_rn", maximum), ("max", _single(1.0 / (maximum * 512.0))))
    return _written(view, node, x, codes, arguments["scale"], width, steps, maximum)


def _written(
    view: GraphView, node: Node, x: Node, codes: Node, scales: Node, size: int, steps: tuple[Step, ...], maximum: float
) -> OpCall | Miss:
    """A call that fills ``codes`` and ``scales``."""
    buffers = fresh_buffers(view, (codes, scales), node)
    if isinstance(buffers, Miss):
        return buffers
    layout = scale_layout(scales)
    if layout is None or scale_layout(codes) != "row":
        return layout_miss(node, "dense codes and scales", "strides with gaps")
    quant = QuantSpec(steps, clamp=maximum, scale_layout="column" if layout == "column" else "row")
    return OpCall(node, str(qualified_op_name(node)), x, codes, scales, size, quant, buffers, is_writer=True)


def _read_static(view: GraphView, node: Node, arguments: dict[str, Any], x: Node) -> Miss:
    advice = "the fused op computes its scales; use dynamic activation quantisation"
    return Miss("quant", Reason.STATIC_SCALE, node, "a scale computed from the data", "a scale that is given", advice)


def _read_tensor(view: GraphView, node: Node, arguments: dict[str, Any], x: Node) -> Miss:
    advice = "quantise in groups along the last axis, or per token"
    return Miss("quant", Reason.PER_TENSOR, node, "one scale a group", "one scale for the whole tensor", advice)


_READERS: dict[str, Callable[[GraphView, Node, dict[str, Any], Node], OpCall | Miss | None]] = {
    "vllm::triton_per_token_group_quant_fp8": _read_triton_group,
    "vllm::rocm_aiter_group_fp8_quant": _read_aiter_group,
    "_C::per_token_group_fp8_quant": _read_group,
    "_C::dynamic_per_token_scaled_fp8_quant": _read_token,
    "_C::dynamic_scaled_fp8_quant": _read_tensor,
    "_C::static_scaled_fp8_quant": _read_static,
}
