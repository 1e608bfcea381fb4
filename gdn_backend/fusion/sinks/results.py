"""What the sinks of opaque quantisation ops share: arguments by name, results, and buffers that an op writes to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gdn_backend.fusion.match import Candidate, Miss, Quantisation, Reason
from gdn_backend.fusion.walk import dtype_of, peel_exact
from gdn_backend.graph.canonical import CREATIONS, GraphView
from gdn_backend.graph.shapes import is_contiguous, is_row_major, shape_of, static_int, tensor_of
from gdn_backend.ops.spec import QuantSpec, dtype_name

FP8 = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith(("float8_e4m3", "float8_e5m2")))

OWN_OP_ADVICE = "quantise with gdn_backend.ops.fp8_quant, or in plain torch"


@dataclass(frozen=True)
class OpCall:
    """One call of a quantisation op: what it reads, what it gives and what it computes."""

    anchor: Node
    sink: str
    x: Node
    codes: Node
    scales: Node | None
    group_size: int
    quant: QuantSpec
    buffers: tuple[Node, ...] = ()  # what codes and scales were made of before the op filled them
    is_writer: bool = False  # codes and scales were made before the op, which fills them


def tuple_results(view: GraphView, node: Node) -> dict[int, Node]:
    """The results of a call that returns a tuple, by their index, those that are read."""
    return {view.op(user).get("index"): user for user in node.users if view.op(user).name == "item"}


def candidate(view: GraphView, call: OpCall) -> Candidate | None:
    """``call`` as a candidate; None where its operands hold no tensors of known width."""
    data = view.current(call.x, call.anchor)
    if tensor_of(data) is None or dtype_of(call.codes) not in FP8 or not shape_of(data):
        return None
    value = peel_exact(view, data)
    quantisation = Quantisation(
        sink=call.sink,
        data=value.node,
        codes=call.codes,
        scales=call.scales,
        group_size=call.group_size,
        quant=call.quant,
        fp8_dtype=dtype_name(dtype_of(call.codes) or torch.float8_e4m3fn),
        path=(data, *value.trail, value.node),
        interior=frozenset({*value.trail, *call.buffers, call.anchor}),
        writer=call.anchor if call.is_writer else None,
    )
    return Candidate(call.anchor, call.sink, (data,), quantisation)


def refused(view: GraphView, anchor: Node, sink: str, x: Any, miss: Miss) -> Candidate | None:
    """An anchor that cannot be fused, whatever the norm in front of it."""
    data = view.current(x, anchor)
    return Candidate(anchor, sink, (data,), miss) if tensor_of(data) is not None else None


def row_width(node: Node) -> int | None:
    """The size of the last axis, where it is fixed."""
    shape = shape_of(node)
    return static_int(shape[-1]) if shape else None


def scale_layout(scales: Node | None) -> str | None:
    """``"row"``, or ``"column"`` for two axes with the first one dense; None for any other strides (padded columns).

    One token or one group is both, and told by the stride of the axis of one.
    """
    tensor = tensor_of(scales)
    if tensor is None:
        return "row"
    columns = tensor.dim() == 2 and is_contiguous(tensor.t())
    if is_contiguous(tensor):
        return "column" if columns and not is_row_major(tensor) else "row"
    return "column" if columns else None


def layout_miss(node: Node, expected: str, actual: str) -> Miss:
    return Miss("layout", Reason.LAYOUT, node, expected, actual, OWN_OP_ADVICE)


def formula_miss(node: Node, expected: str, actual: str) -> Miss:
    return Miss("quant", Reason.SCALE_FORMULA, node, expected, actual, OWN_OP_ADVICE)


def fresh_buffers(view: GraphView, outputs: Iterable[Node], writer: Node) -> tuple[Node, ...] | Miss:
    """The nodes that ``outputs`` were made of (``empty``, then views), if only ``writer`` and later nodes read them.

    A Miss where a result is written to a tensor that is seen elsewhere.
    """
    inner: list[Node] = []
    for output in outputs:
        chain = [output]
        while view.op(chain[-1]).name in ("reshape", "permute"):
            chain.append(view.op(chain[-1]).input)
        is_fresh = view.op(chain[-1]).name in CREATIONS
        is_private = all(len(node.users) == 1 for node in chain[1:])
        is_late = all(view.position[user] >= view.position[writer] for user in output.users)
        if not (is_fresh and is_private and is_late):
            expected, actual = "results in tensors made for them", f"{output.name}, which is seen elsewhere"
            return Miss("safety", Reason.MUTATION, output, expected, actual, "give the op new tensors for its results")
        inner += chain[1:]
    return tuple(inner)
