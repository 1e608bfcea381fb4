"""Quantisation by an op that is not known: an anchor all the same, so that the report can name it.

It is a custom op that reads floating-point values and gives an FP8 tensor, as a result or through an argument that it
writes to. What it computes is not to be seen, so it is never fused.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from gdn_backend.fusion.match import Candidate
from gdn_backend.fusion.sinks.results import FP8, formula_miss
from gdn_backend.fusion.walk import dtype_of
from gdn_backend.graph.canonical import GraphView, qualified_op_name
from gdn_backend.graph.effects import written_operands
from gdn_backend.graph.shapes import value_of

_TORCH_NAMESPACES = ("aten", "prims", "prim", "quantized")
_OWN_NAMESPACE = "gdn_backend"
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def find_unknown_op(view: GraphView, node: Node) -> Candidate | None:
    """A candidate that is always a miss where ``node`` calls an unknown op with an FP8 result, else None."""
    name = qualified_op_name(node)
    if name is None or name.split("::")[0] in (*_TORCH_NAMESPACES, _OWN_NAMESPACE):
        return None
    written = written_operands(node)
    read = tuple(operand for operand in node.all_input_nodes if operand not in written and dtype_of(operand) in _FLOATS)
    if not read or not (_gives_fp8(node) or any(dtype_of(operand) in FP8 for operand in written)):
        return None
    miss = formula_miss(node, "a quantisation whose formula is known", f"the op {name}")
    return Candidate(node, name, tuple(view.current(operand, node) for operand in read), miss)


def _gives_fp8(node: Node) -> bool:
    value = value_of(node)
    results = value if isinstance(value, tuple | list) else (value,)
    return any(isinstance(result, torch.Tensor) and result.dtype in FP8 for result in results)
