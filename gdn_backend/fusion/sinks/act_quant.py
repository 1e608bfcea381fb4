"""Hugging Face's ``act_quant`` kernel: as a Triton kernel in the graph (transformers 4.57 to 5.0) and as a hub op.

Both quantise consecutive groups of a contiguous tensor, ``s = amax / 448``, without a clamp. What differs from build to
build is the floor, which no schema shows: none (``y / s``), in the divisor alone (``y / max(s, 1e-12)``, the hub's
present form) or in the stored scale too. The Triton source in memory shows it, so that is what is read. An op whose
source cannot be had is taken for the present form; with another one only groups below 4.5e-10 would differ.

The hub puts a hash of the build into the op's namespace: ``finegrained_fp8_3a1f…::fp8_act_quant``.
"""

from __future__ import annotations

import re
from typing import Any

from torch.fx import Node

from gdn_backend.fusion.match import Candidate, Miss
from gdn_backend.fusion.sinks.results import (
    OpCall,
    candidate,
    formula_miss,
    fresh_buffers,
    layout_miss,
    refused,
    scale_layout,
    tuple_results,
)
from gdn_backend.graph.canonical import GraphView, op_arguments, qualified_op_name
from gdn_backend.graph.shapes import is_contiguous, tensor_of
from gdn_backend.ops.spec import Operation, QuantSpec, Step

HUB_OP = re.compile(r"_?finegrained_fp8(_\w*)?::fp8_act_quant")
KERNEL = "act_quant_kernel"
_HUB_KERNEL = "_fp8_act_quant_kernel"
_FLOOR = 1e-12
_AMAX: tuple[Step, ...] = (("div_triton", 448.0),)
_FLOORED: tuple[Step, ...] = (("max", _FLOOR),)
_DIVIDE: Operation = "divide_triton"
#: The scale and the codes of each build, without spaces, comments and the name of the maximum's function.
_FORMULAS: dict[tuple[str, str], QuantSpec] = {
    ("tl.max(tl.abs(x))/448.0", "x/s"): QuantSpec(_AMAX, operation=_DIVIDE),
    ("tl.max(tl.abs(x))/448.0", f"x/tl.maximum(s,{_FLOOR})"): QuantSpec(_AMAX, _FLOORED, _DIVIDE),
    (f"tl.maximum(tl.max(tl.abs(x))/448.0,{_FLOOR})", "x/s"): QuantSpec(_AMAX + _FLOORED, operation=_DIVIDE),
}
_PRESENT = QuantSpec(_AMAX, _FLOORED, _DIVIDE)


def read_formula(source: str) -> QuantSpec | None:
    """The formula of an ``act_quant`` kernel, from its Triton source; None for one that is not known."""
    lines = [re.sub(r"\s+|#.*", "", line) for line in source.splitlines()]
    assignments = (line.split("=", 1) for line in lines if re.match(r"[sy]=", line))
    assigned = dict(reversed([(name, value) for name, value in assignments]))  # the first; y is cast in a later one
    codes = re.sub(r"\.to\(.*\)$", "", assigned.get("y", ""))
    stripped = codes[1:-1] if codes.startswith("(") and codes.endswith(")") else codes
    return _FORMULAS.get((assigned.get("s", ""), stripped))


def find_hub_op(view: GraphView, node: Node) -> Candidate | None:
    """A candidate where ``node`` calls ``fp8_act_quant(Tensor x, SymInt block_size=128)``, else None."""
    name = qualified_op_name(node)
    if name is None or not HUB_OP.fullmatch(name):
        return None
    arguments, results = op_arguments(node), tuple_results(view, node)
    x, size = arguments["x"], arguments["block_size"]
    if tensor_of(x) is None or not isinstance(size, int) or 0 not in results:
        return None
    source = _hub_source(name)
    quant = _PRESENT if source is None else read_formula(source)
    if quant is None:
        return refused(view, node, name, x, _unknown(node))
    return candidate(view, OpCall(node, name, x, results[0], results.get(1), size, quant))


def _hub_source(name: str) -> str | None:
    """The Triton source behind a registered op, by way of the globals of the Python function that launches it."""
    from torch._library.custom_ops import OPDEFS

    function = getattr(OPDEFS.get(name), "_init_fn", None)
    kernel = getattr(function, "__globals__", {}).get(_HUB_KERNEL)
    source = getattr(kernel, "src", None)
    return source if isinstance(source, str) else None


def find_triton_kernel(view: GraphView, node: Node) -> Candidate | None:
    """A candidate where ``node`` launches ``act_quant_kernel(x_ptr, y_ptr, s_ptr, BLOCK_SIZE)``, else None."""
    if getattr(node.target, "__name__", "") != "triton_kernel_wrapper_mutation":
        return None
    kernel, constants = _launched(node)
    if getattr(kernel, "__name__", "") != KERNEL:
        return None
    operands: dict[str, Any] = {**constants, **node.kwargs.get("kwargs", {})}  # type: ignore[dict-item]
    x, codes, scales, size = (operands.get(name) for name in ("x_ptr", "y_ptr", "s_ptr", "BLOCK_SIZE"))
    if not all(isinstance(value, Node) and tensor_of(value) is not None for value in (x, codes, scales)):
        return None
    assert isinstance(x, Node) and isinstance(codes, Node) and isinstance(scales, Node)
    quant = read_formula(str(getattr(kernel, "src", "")))
    if quant is None or not isinstance(size, int):
        return refused(view, node, KERNEL, x, _unknown(node))
    memory = tensor_of(x)
    if memory is None or not is_contiguous(memory) or scale_layout(codes) != "row" or scale_layout(scales) != "row":
        miss = layout_miss(node, "contiguous tensors", "strides that the kernel ignores")
        return refused(view, node, KERNEL, x, miss)
    buffers = fresh_buffers(view, (codes, scales), node)
    if isinstance(buffers, Miss):
        return refused(view, node, KERNEL, x, buffers)
    return candidate(view, OpCall(node, KERNEL, x, codes, scales, size, quant, buffers, is_writer=True))


def _launched(node: Node) -> tuple[Any, dict[str, Any]]:
    """The kernel and the constant arguments of a launch; Dynamo keeps both in a table of the process."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
    constants = kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])  # type: ignore[arg-type]
    return kernel, constants


def _unknown(node: Node) -> Miss:
    return formula_miss(node, "one of the known builds of act_quant", "a kernel with another formula")
