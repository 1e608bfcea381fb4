"""Putting the fused op in a site's place.

Before (one site of Qwen3-Next, T tokens, H heads of 128)::

    n = x.float() * rsqrt(mean(x.float()²) + eps);  y = (weight * n.bfloat16() * silu(gate.float())).bfloat16()
    groups = y.reshape(T, H, 128);  scale = clamp(amax(|groups|) / 448, min=floor);  codes = (groups / scale).to(fp8)

After::

    fused  = gdn_backend.gated_rmsnorm_fp8_quant(x, gate, weight, None, eps, "...")
    codes  = fused[0].reshape(T, H, 128);  scale = fused[1].reshape(T, H, 1)
"""

from __future__ import annotations

import contextlib
import importlib
import operator
from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

import sympy  # type: ignore[import-untyped]
import torch
from torch.fx import Graph, Node
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from gdn_backend.graph.canonical import overwritten_operand
from gdn_backend.graph.shapes import Size, same_shape, static_int, tensor_of, value_of
from gdn_backend.ops.call import encode_call
from gdn_backend.ops.outputs import allocate_outputs

if TYPE_CHECKING:
    from gdn_backend.fusion.match import Match


class ShapeError(RuntimeError):
    """A symbolic size that no node of the graph can supply."""


def fuse_sites(graph: Graph, chosen: Iterable[tuple[Match, str]]) -> None:
    """Puts the fused op in the place of each match, with the kernel that was chosen for it; sites in program order.

    The last one first: where a site reads what another one gave, its call is then there to be pointed at the new value.
    """
    for match, kernel in reversed(list(chosen)):
        fuse_site(graph, match, kernel)


def fuse_site(graph: Graph, match: Match, kernel: str) -> Node:
    """Replaces the codes and scales of ``match`` by one call of the fused op with ``kernel``; returns the call.

    The call stands where the first of the two got its values: every operand is computed and no user has come yet.
    Interior nodes that lost their last user are erased, the others stay.
    """
    norm, quant = match.norm, match.quant
    replaced = frozenset(match.replaced)
    first_source = next(node for node in match.replaced if node in quant.sources)
    with graph.inserting_before(first_source):
        call = encode_call(match.spec, kernel)
        importlib.import_module("gdn_backend.ops.gated_rmsnorm_quant")  # registers the op, which imports Triton
        op = torch.ops.gdn_backend.gated_rmsnorm_fp8_quant.default
        vectors = (_as_vector(graph, norm.weight), _as_vector(graph, norm.bias))
        fused = graph.call_function(op, (norm.x, norm.gate, *vectors, norm.eps, call))
        fused.meta.update(_inherited_meta(norm.output))
        values = _describe(fused, match)
        codes = _result(graph, fused, 0, quant.codes, values)
        scales = _result(graph, fused, 1, quant.scales, values) if quant.scales is not None else []
    _redirect(match.codes_names, codes[0], replaced)
    if quant.scales is not None:
        _redirect(match.scales_names, scales[0], replaced - quant.dependents)
    erase_unused(graph, scales)
    # A scale that others read before it is written on in place is still written on, though nobody uses that result.
    writes_on = {node for node in quant.dependents if overwritten_operand(node) is not None}
    erase_unused(graph, (node for node in reversed(match.replaced) if node not in writes_on))
    return fused


def _as_vector(graph: Graph, node: Node | None) -> Node | None:
    """A weight or bias as the op takes it: one axis."""
    tensor = tensor_of(node)
    if node is None or tensor is None or tensor.dim() == 1:
        return node
    vector = graph.call_method("reshape", (node, -1))
    vector.meta.update(_inherited_meta(node))
    vector.meta["example_value"] = tensor.reshape(-1)
    return vector


def _redirect(nodes: Iterable[Node], replacement: Node, keep: Container[Node]) -> None:
    """Lets every later user of ``nodes`` but those in ``keep`` read ``replacement`` instead."""
    for node in nodes:
        node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user not in keep and replacement < user)


def erase_unused(graph: Graph, nodes: Iterable[Node]) -> None:
    """Erases those of ``nodes``, given users before what they use, that nobody reads."""
    for node in nodes:
        if not node.users:
            graph.erase_node(node)


def _inherited_meta(source: Node) -> dict[str, Any]:
    """Where the user wrote it: the metadata a new node takes over, without the value."""
    return {key: value for key, value in source.meta.items() if key not in ("example_value", "val")}


def _describe(fused: Node, match: Match) -> tuple[torch.Tensor, ...] | None:
    """The fake value of the op, so that later readers of the graph find what Dynamo would have left."""
    x = tensor_of(match.norm.x)
    fake_mode = getattr(x, "fake_mode", None)
    if x is None or (fake_mode is None and not x.is_meta):
        return None
    with fake_mode or contextlib.nullcontext(), torch.no_grad():
        values = allocate_outputs(x, match.spec)
    fused.meta["example_value"] = values
    return values


def _result(
    graph: Graph, fused: Node, index: int, replaced: Node, values: tuple[torch.Tensor, ...] | None
) -> list[Node]:
    """One result in the shape and dtype of the node it replaces: that node first, then those it is made from."""
    tensor = tensor_of(replaced)
    assert tensor is not None
    nodes = [graph.call_function(operator.getitem, (fused, index))]
    if values is not None:
        nodes[0].meta["example_value"] = values[index]
    # Where the shape is right already, a reshape could still give an axis of one another stride.
    if values is None or not same_shape(tuple(values[index].shape), tuple(tensor.shape)):
        shape = shape_arguments(graph, tuple(tensor.shape))
        nodes.insert(0, graph.call_method("reshape", (nodes[0], *shape)))
    if index == 1 and tensor.dtype != torch.float32:  # a scale that the graph keeps in a narrow dtype
        nodes.insert(0, graph.call_method("to", (nodes[0], tensor.dtype)))
    for node in nodes:
        node.meta.update(_inherited_meta(replaced))
    if values is not None and len(nodes) > 1:
        nodes[-2].meta["example_value"] = tensor.to(values[index].dtype)
    nodes[0].meta["example_value"] = tensor
    return nodes


def shape_arguments(graph: Graph, shape: tuple[Size, ...]) -> list[Any]:
    """``shape`` as arguments of a ``reshape`` call at the graph's insertion point.

    One symbolic size is left to torch (-1); several are computed from the graph's own symbols, because a size that was
    specialised would recompile for every new batch. ShapeError where a symbol has no node.
    """
    static = [static_int(size) for size in shape]
    if static.count(None) == 1 and 0 not in static:
        return [-1 if size is None else size for size in static]
    expressions = [size.node.expr for size in shape if isinstance(size, torch.SymInt)]
    symbols = _symbol_nodes(graph, {symbol for expression in expressions for symbol in expression.free_symbols})
    return [
        _size_node(graph, original, symbols) if size is None else size
        for original, size in zip(shape, static, strict=True)
    ]


def _symbol_nodes(graph: Graph, symbols: set[sympy.Symbol]) -> dict[sympy.Symbol, Node]:
    """The first node that holds each of ``symbols``, where one does.

    Dynamo passes every size symbol of the inputs as a placeholder of its own, so that the search ends early.
    """
    found: dict[sympy.Symbol, Node] = {}
    for node in graph.nodes:
        if len(found) == len(symbols):
            break
        value = value_of(node)
        if isinstance(value, torch.SymInt) and value.node.expr in symbols:
            found.setdefault(value.node.expr, node)
    return found


def _size_node(graph: Graph, size: Size, symbols: dict[sympy.Symbol, Node]) -> Node:
    assert isinstance(size, torch.SymInt)
    expression = size.node.expr
    missing = [str(symbol) for symbol in expression.free_symbols if symbol not in symbols]
    if missing:
        raise ShapeError(f"the size {expression} needs {', '.join(missing)}, which no node of the graph holds")
    tracer = torch.fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: torch.fx.Proxy(symbols[symbol], tracer) for symbol in expression.free_symbols}
    result = sympy_interp(PythonReferenceAnalysis, proxies, expression)
    node = result.node
    node.meta.setdefault("example_value", size)
    return node
