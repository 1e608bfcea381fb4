"""Our own quantisation op: ``codes, scales = gdn_backend::fp8_quant(x, group_size, spec)``, x ``[..., K]``."""

from __future__ import annotations

from torch.fx import Node

from gdn_backend.fusion.match import Candidate, Quantisation
from gdn_backend.fusion.walk import peel_exact
from gdn_backend.graph.canonical import GraphView, qualified_op_name
from gdn_backend.graph.shapes import shape_of, static_int, tensor_of
from gdn_backend.ops.call import PER_TOKEN, decode_quant
from gdn_backend.ops.spec import dtype_name

SINK = "gdn_backend::fp8_quant"


def find_own_op(view: GraphView, node: Node) -> Candidate | None:
    """A candidate where ``node`` calls our quantisation op, else None."""
    if qualified_op_name(node) != SINK:
        return None
    arguments = {**dict(zip(("x", "group_size", "spec"), node.args, strict=False)), **node.kwargs}
    x, group_size, spec = arguments["x"], arguments["group_size"], arguments["spec"]
    if not isinstance(x, Node) or tensor_of(x) is None or not isinstance(group_size, int) or not isinstance(spec, str):
        return None
    results = {view.op(user).get("index"): user for user in node.users if view.op(user).name == "item"}
    data = view.current(x, node)
    value = peel_exact(view, data)
    width = static_int(shape_of(data)[-1])
    if 0 not in results or width is None:
        return None
    codes, scales = results[0], results.get(1)
    quant, fp8_dtype = decode_quant(spec)
    quantisation = Quantisation(
        sink=SINK,
        data=value.node,
        codes=codes,
        scales=scales,
        group_size=width if group_size == PER_TOKEN else group_size,
        quant=quant,
        fp8_dtype=dtype_name(fp8_dtype),
        path=(data, *value.trail, value.node),
        interior=frozenset({*value.trail, node}),
        scale_family=() if scales is None else (scales,),
    )
    return Candidate(node, SINK, (data,), quantisation)
