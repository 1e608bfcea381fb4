"""Our own quantisation op: ``codes, scales = gdn_backend::fp8_quant(x, group_size, spec)``, x ``[..., K]``."""

from __future__ import annotations

from torch.fx import Node

from gdn_backend.fusion.match import Candidate
from gdn_backend.fusion.sinks.results import OpCall, candidate, row_width, tuple_results
from gdn_backend.graph.canonical import GraphView, op_arguments, qualified_op_name
from gdn_backend.graph.shapes import tensor_of
from gdn_backend.ops.call import PER_TOKEN, decode_quant

SINK = "gdn_backend::fp8_quant"


def find_own_op(view: GraphView, node: Node) -> Candidate | None:
    """A candidate where ``node`` calls our quantisation op, else None."""
    if qualified_op_name(node) != SINK:
        return None
    arguments = op_arguments(node)
    x, group_size, spec = arguments["x"], arguments["group_size"], arguments["spec"]
    results = tuple_results(view, node)
    if tensor_of(x) is None or not isinstance(group_size, int) or not isinstance(spec, str) or 0 not in results:
        return None
    width = row_width(x)
    if width is None:
        return None
    size = width if group_size == PER_TOKEN else group_size
    return candidate(view, OpCall(node, SINK, x, results[0], results.get(1), size, decode_quant(spec)[0]))
