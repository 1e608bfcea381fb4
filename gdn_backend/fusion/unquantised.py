"""Notes on what is no site but may surprise: gated norms that nobody quantises, quantisations inside linears.

One pass over the graph; from each activation a bounded number of its readers is looked at.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

from torch.fx import Node

from gdn_backend.fusion.gated_norm import find_gated_norm
from gdn_backend.fusion.norm_ops import VLLM_GATED_NORM, names_gated_norm
from gdn_backend.graph.canonical import GraphView, qualified_op_name
from gdn_backend.graph.shapes import tensor_of

_SEARCH_LIMIT = 16  # readers looked at behind an activation
_PASSED = ("mul", "add", "reshape", "identity", "cast", "square", "mean", "rsqrt", "rms_norm")


def describe_unquantised(view: GraphView, site_norms: Container[Node]) -> list[str]:
    """Notes on ``view``; ``site_norms`` are the outputs of the gated norms of sites, which are reported as such."""
    norms = list(dict.fromkeys(_unquantised_norms(view, site_norms)))
    notes = []
    if norms:
        names = ", ".join(node.name for node in norms)
        notes.append(f"gated norms without an FP8 quantisation behind them: {names}")
    opaque = [node for node in view.nodes if names_gated_norm(node) and not _leads_to(view, node, site_norms)]
    if opaque:
        names = ", ".join(node.name for node in opaque)
        notes.append(f"opaque gated norms: {names}; one in plain torch, as gdn_backend.rms_norm_gated, could be fused")
    hidden = [node for node in view.nodes if _quantises_inside(view, node)]
    if hidden:
        names = ", ".join(node.name for node in hidden)
        notes.append(f"linear layers that quantise a gated norm's result inside, where it cannot be fused: {names}")
    return notes


def _unquantised_norms(view: GraphView, site_norms: Container[Node]) -> Iterator[Node]:
    for node in view.nodes:
        is_call = qualified_op_name(node) == VLLM_GATED_NORM
        if not is_call and view.op(node).name not in ("silu", "sigmoid"):
            continue
        behind = [node, *_behind(view, node)]
        if any(reader in site_norms for reader in behind):
            continue
        ends = (reader for reader in behind if is_call or view.op(reader).name in ("mul", "rms_norm"))
        found = [norm for end in ends if (norm := find_gated_norm(view, end))]
        if found:
            yield max((norm.output for norm in found), key=view.position.__getitem__)


def _behind(view: GraphView, start: Node) -> list[Node]:
    """The first readers behind ``start`` through what a norm is made of, in no order."""
    seen: dict[Node, None] = {}
    frontier = [start]
    while frontier and len(seen) < _SEARCH_LIMIT:
        for reader in view.readers(frontier.pop(0)):
            if reader not in seen and view.op(reader).name in _PASSED:
                seen[reader] = None
                frontier.append(reader)
    return list(seen)


def _leads_to(view: GraphView, node: Node, site_norms: Container[Node]) -> bool:
    results = [node, *(user for user in node.users if view.op(user).name == "item")]
    return any(result in site_norms for result in (*results, *node.all_input_nodes))


def _quantises_inside(view: GraphView, node: Node) -> bool:
    """A linear layer with a weight of torchao's ``Float8Tensor``, which quantises what it is multiplied with."""
    if view.op(node).name != "linear" or len(node.args) < 2:
        return False
    weight = tensor_of(node.args[1])
    if type(weight).__name__ != "Float8Tensor" or getattr(weight, "act_quant_kwargs", None) is None:
        return False
    value = node.args[0]
    return isinstance(value, Node) and find_gated_norm(view, view.current(value, node)) is not None
