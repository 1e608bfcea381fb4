"""Which nodes write to memory, and whose: the facts that decide whether an operand may be read later than it was.

A Dynamo graph is not functional. A write is found by the node that does it; whose memory it touches is read off the
fake tensors, which share a storage exactly where the tensors of the program do (views, views of views, two inputs that
overlap).
"""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from gdn_backend.graph.canonical import GraphView, is_inplace_name, spelled_name
from gdn_backend.graph.shapes import storage_key, tensor_of

#: Modules whose functions Dynamo takes into the graph as they are and that are known to write to no tensor.
_HARMLESS_MODULES = frozenset(("builtins", "einops", "math"))


@dataclass(frozen=True)
class Write:
    """One node that writes to the memory of one tensor."""

    position: int
    node: Node


class Effects:
    """The writes of a graph, by the memory they touch, in program order."""

    def __init__(self, view: GraphView) -> None:
        self._writes: dict[int, list[Write]] = {}
        self._sharing: dict[int, list[Node]] = {}
        for position, node in enumerate(view.nodes):
            own = storage_of(node)
            if own is not None:
                self._sharing.setdefault(own, []).append(node)
            for operand in written_operands(node):
                key = storage_of(operand)
                if key is not None:
                    self._writes.setdefault(key, []).append(Write(position, node))

    def writes_between(self, node: Node, after: int, before: int) -> Iterator[Node]:
        """Nodes strictly between the positions ``after`` and ``before`` that write to the memory of ``node``."""
        writes = self._writes.get(storage_of(node) or 0, ())
        start = bisect_right(writes, after, key=lambda write: write.position)
        for write in writes[start:]:
            if write.position >= before:
                return
            yield write.node

    def sharing(self, node: Node) -> list[Node]:
        """All nodes whose tensors live in the memory of ``node``'s, in program order, ``node`` included."""
        return self._sharing.get(storage_of(node) or 0, [])

    def is_written(self, node: Node) -> bool:
        """True where anything in the graph writes to the memory of ``node``'s tensor."""
        return storage_of(node) in self._writes


def storage_of(node: Node) -> int | None:
    """The identity of the memory behind ``node``'s tensor, or None where it holds none."""
    tensor = tensor_of(node)
    if tensor is None:
        return None
    try:
        return storage_key(tensor)
    except (NotImplementedError, RuntimeError):  # subclasses and sparse tensors have no single storage
        return None


def written_operands(node: Node) -> list[Node]:
    """The operands whose memory ``node`` may write to; every tensor operand where nothing is known of the callee."""
    if node.op == "call_module":
        return _tensor_operands(node)
    if node.op not in ("call_function", "call_method"):
        return []
    schema_writes = _written_by_schema(node)
    if schema_writes is not None:
        return schema_writes
    if isinstance(node.target, torch._ops.HigherOrderOperator):
        return _written_by_higher_order(node)
    written: list[Any] = []
    name = spelled_name(node)
    if name is None:  # a function that Dynamo was told not to look into (allow_in_graph)
        module = getattr(node.target, "__module__", None) or ""
        return [] if module.partition(".")[0] in _HARMLESS_MODULES else _tensor_operands(node)
    if is_inplace_name(name) or name in ("setitem", "__setitem__"):
        written.extend(_tensor_operands(node)[:1] if not name.startswith("_foreach") else _tensor_operands(node))
    if node.kwargs.get("out") is not None:
        written.append(node.kwargs["out"])
    if node.op == "call_function" and _inplace_flag(node):
        written.append(node.args[0] if node.args else node.kwargs.get("input"))
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Node)]


def _tensor_operands(node: Node) -> list[Node]:
    return [operand for operand in node.all_input_nodes if tensor_of(operand) is not None]


def _written_by_schema(node: Node) -> list[Node] | None:
    """Operands that the schema of an operator marks as written (``Tensor(a!)``); None for anything without a schema."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        schemas = [target._schema]
    elif isinstance(target, torch._ops.OpOverloadPacket):
        schemas = [getattr(target, overload)._schema for overload in target.overloads()]
    else:
        return None
    written: list[Any] = []
    for schema in schemas:
        for index, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(node.args[index] if index < len(node.args) else node.kwargs.get(argument.name))
    return [leaf for leaf in pytree.tree_leaves(written) if isinstance(leaf, Node)]


def _written_by_higher_order(node: Node) -> list[Node]:
    """A higher-order op is taken to write to all its tensors, unless its bodies are graphs without a write.

    A graph body shows its writes; a Triton kernel (``triton_kernel_wrapper_mutation``) shows none, so all count.
    """
    owner = node.graph.owning_module
    bodies = [
        getattr(owner, str(operand.target), None)
        for operand in node.all_input_nodes
        if operand.op == "get_attr" and owner is not None
    ]
    graphs = [body for body in bodies if isinstance(body, GraphModule)]
    if graphs and not any(written_operands(inner) for body in graphs for inner in body.graph.nodes):
        return []
    return _tensor_operands(node)


def _inplace_flag(node: Node) -> bool:
    """True for ``F.silu(x, inplace=True)``, however the flag is given."""
    if node.kwargs.get("inplace") is True:
        return True
    if True not in [argument for argument in node.args if isinstance(argument, bool)]:
        return False
    try:
        bound = inspect.signature(node.target).bind_partial(*node.args, **node.kwargs)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return bound.arguments.get("inplace") is True
