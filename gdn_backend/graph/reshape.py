"""Folding chains of reshapes, as a pass of its own.

Before::

    heads  = norm.reshape(2, 9, 4, 128)
    merged = heads.reshape(2, 9, -1)
    groups = merged.view(-1, 4, 128)

After, where nothing else reads ``heads`` and ``merged``::

    groups = norm.reshape(18, 4, 128)

A reshape is rebound to its base only where that cannot be told from outside: strides come out the same, the chain is
made of views or the base is copied just the same, and no one writes to the memory in question. Explicit broadcasts go
too: ``h * r.expand_as(h)`` is ``h * r``. Sizes are never compared in a way that installs a guard.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Graph, Node

from gdn_backend.graph.canonical import BROADCASTS, GraphView, overwritten_operand, spelled_name
from gdn_backend.graph.effects import Effects, storage_of
from gdn_backend.graph.shapes import Size, is_row_major, same_shape, same_size, shape_of, static_int, tensor_of

_PASSED = "gdn_backend_passed_shapes"
_LONGEST_CHAIN = 64  # a longer one is folded piece by piece
_ELEMENTWISE = ("mul", "div", "add", "sub")


def fold_reshapes(graph: Graph) -> int:
    """Rebinds every reshape of a reshape to its base, drops reshapes to the same shape and broadcasts that an operation
    does by itself; returns how many.

    The graph keeps its placeholders, outputs and values; metadata of the rebound nodes stays true.
    """
    view = GraphView(graph)
    effects = Effects(view)
    folded = 0
    passed_over: list[Node] = []
    for node in view.nodes:
        broadcasts = _drop_broadcasts(view, node)
        passed_over += broadcasts
        folded += len(broadcasts)
        if not _is_reshape(view, node):
            continue
        chain = _chain(view, node)
        if _is_no_op(effects, chain[-1], node):
            node.replace_all_uses_with(chain[-1])
            _remember_shapes(chain[-1], chain[:-1])
            passed_over += [node, *chain[:-1]]
        elif (over := _rebind(view, effects, node, chain)) is not None:
            passed_over += over
        else:
            continue
        folded += 1
    for node in sorted(set(passed_over), key=view.position.__getitem__, reverse=True):
        if not node.users:
            graph.erase_node(node)
    return folded


def passed_shapes(node: Node) -> tuple[tuple[Size, ...], ...]:
    """The shapes between a folded reshape and its base: they may be all that tells where the heads were merged.

    Where reshapes led back to the base's own shape, the base has them.
    """
    return node.meta.get(_PASSED, ())


def _remember_shapes(node: Node, passed_over: list[Node]) -> None:
    shapes = [shape for passed in passed_over for shape in (shape_of(passed), *passed_shapes(passed))]
    node.meta[_PASSED] = (*passed_shapes(node), *shapes)


def _is_reshape(view: GraphView, node: Node) -> bool:
    """A functional reshape whose operand is read as it stands (in-place versions are left alone)."""
    if node.op not in ("call_method", "call_function") or tensor_of(node) is None:
        return False
    op = view.op(node)
    return op.name == "reshape" and bool(node.args) and op.input is node.args[0] and str(node.target) != "squeeze_"


def _is_no_op(effects: Effects, base: Node, node: Node) -> bool:
    """The same shape over the same memory; ``x.view(x.shape)`` is a new tensor, but one that nobody can tell from x."""
    source, result = tensor_of(base), tensor_of(node)
    assert source is not None
    assert result is not None
    return (
        same_shape(tuple(source.shape), tuple(result.shape))
        and storage_of(node) == storage_of(base)
        and all(map(same_size, source.stride(), result.stride()))
        and not effects.is_written(node)
        and not any(user.op == "output" for user in node.users)
    )


def _chain(view: GraphView, node: Node) -> list[Node]:
    """The values above a reshape: the reshapes it goes through, nearest first, and their base last."""
    chain = [view.op(node).input]
    while len(chain) < _LONGEST_CHAIN and _is_reshape(view, chain[-1]):
        chain.append(view.op(chain[-1]).input)
    return chain


def _rebind(view: GraphView, effects: Effects, node: Node, chain: list[Node]) -> list[Node] | None:
    """Makes ``node`` a reshape of the highest value of ``chain`` that it can be; returns the values passed over."""
    sizes = _reshape_sizes(shape_of(node))
    own_memory = [index for index, value in enumerate(chain) if storage_of(value) == storage_of(node)]
    for top in dict.fromkeys((len(chain) - 1, *own_memory[-1:])):
        over = chain[:top]
        if sizes is not None and over and _indistinguishable(effects, chain[top], node, over):
            _remember_shapes(node, over)
            node.op, node.target = "call_method", "reshape"
            node.args, node.kwargs = (chain[top], *sizes), {}
            view.forget(node)
            return over
    return None


def _reshape_sizes(shape: tuple[Size, ...]) -> tuple[int, ...] | None:
    """Arguments for ``reshape`` that need no other node: at most one size may be symbolic, and none zero beside it."""
    static = [static_int(size) for size in shape]
    if static.count(None) > 1 or (None in static and 0 in static):
        return None
    return tuple(-1 if size is None else size for size in static)


def _indistinguishable(effects: Effects, base: Node, node: Node, passed_over: list[Node]) -> bool:
    """True where ``base.reshape(shape of node)`` is ``node`` in strides and in whom it shares memory with."""
    if effects.is_written(base) or effects.is_written(node):
        return False
    copies = storage_of(base) != storage_of(node)
    if copies and any(len(passed.users) > 1 for passed in passed_over):
        return False  # another reader shares the copy with ``node``
    source, result = tensor_of(base), tensor_of(node)
    assert source is not None
    assert result is not None
    facts = [_static(sizes) for sizes in (source.shape, source.stride(), result.shape, result.stride())]
    if None in facts:
        return not copies and is_row_major(source) and is_row_major(result)
    shape, strides, new_shape, new_strides = facts
    like = torch.empty_strided(shape, strides, device="meta")  # type: ignore[arg-type]
    direct = like.reshape(new_shape)  # type: ignore[arg-type]
    copied = direct.untyped_storage()._cdata != like.untyped_storage()._cdata
    return copied == copies and direct.stride() == new_strides


def _static(sizes: Iterable[Size]) -> tuple[int, ...] | None:
    numbers = [static_int(size) for size in sizes]
    return None if None in numbers else tuple(number for number in numbers if number is not None)


def _drop_broadcasts(view: GraphView, node: Node) -> list[Node]:
    """Gives an elementwise operation the values that its operands were expanded from; returns the expanded ones."""
    if node.op not in ("call_method", "call_function") or tensor_of(node) is None:
        return []
    if view.op(node).name not in _ELEMENTWISE or "out" in node.kwargs:  # whose tensor would be made smaller
        return []
    dropped = []
    for operand in node.all_input_nodes:
        if spelled_name(operand) in BROADCASTS and _broadcasts_by_itself(node, operand):
            node.replace_input_with(operand, operand.args[0])  # type: ignore[arg-type]
            view.forget(node)
            dropped.append(operand)
    return dropped


def _broadcasts_by_itself(node: Node, operand: Node) -> bool:
    """True where ``node`` comes out the same with what ``operand`` expands: another operand has the result's shape."""
    base = tensor_of(operand.args[0]) if operand.args else None
    expanded, result = tensor_of(operand), tensor_of(node)
    if base is None or expanded is None or result is None or operand is overwritten_operand(node):
        return False
    others = (tensor_of(other) for other in node.all_input_nodes if other is not operand)
    other = next((other for other in others if other is not None and same_shape(other.shape, result.shape)), None)
    if base.dim() == 0 or other is None:
        return False  # a 0-dim tensor takes no part in type promotion, an expanded one does
    # New axes with strides other than zero could order the result's strides, if those were not plain already.
    new = expanded.dim() - base.dim()
    return is_row_major(other) or all(same_size(stride, 0) for stride in expanded.stride()[:new])
