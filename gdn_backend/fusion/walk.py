"""Walking up a graph through what does not change values: reshapes, copies and casts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from gdn_backend.graph.canonical import GraphView
from gdn_backend.graph.shapes import tensor_of

LOW_PRECISION = (torch.bfloat16, torch.float16)
UP_TO_FP32 = (torch.bfloat16, torch.float16, torch.float32)  # the dtypes that the fused op computes in


@dataclass(frozen=True)
class Peeled:
    """A value without its wrapping: the node under it, the nodes passed (nearest first), the roundings on the way."""

    node: Node
    trail: tuple[Node, ...]
    dtypes: tuple[torch.dtype, ...]  # of the node under it first, in program order

    @property
    def rounding(self) -> torch.dtype | None:
        """The one low-precision dtype that the value went through, or None where it stayed fp32."""
        rounded = [dtype for dtype in self.dtypes if dtype in LOW_PRECISION]
        return rounded[0] if rounded else None

    @property
    def is_expressible(self) -> bool:
        """False where it was rounded to two different dtypes in turn, or left the floating dtypes up to fp32."""
        rounded = {dtype for dtype in self.dtypes if dtype in LOW_PRECISION}
        return len(rounded) <= 1 and all(dtype in UP_TO_FP32 for dtype in self.dtypes)


def dtype_of(node: Node) -> torch.dtype | None:
    """The dtype of a node that holds a tensor, else None."""
    tensor = tensor_of(node)
    return None if tensor is None else tensor.dtype


def peel(view: GraphView, node: Node) -> Peeled:
    """The arithmetic under ``node``: through reshapes, copies and casts of any kind."""
    return _peel(view, node, exact=False)


def peel_exact(view: GraphView, node: Node) -> Peeled:
    """The value under ``node`` that holds the same numbers: through reshapes, copies and widening casts alone."""
    return _peel(view, node, exact=True)


def _peel(view: GraphView, node: Node, exact: bool) -> Peeled:
    trail: list[Node] = []
    dtypes: list[torch.dtype] = []
    while True:
        dtype = dtype_of(node)
        dtypes.append(dtype if dtype is not None else torch.bool)
        op = view.op(node)
        keeps_value = op.name in ("reshape", "identity")
        passes = keeps_value or (op.name == "cast" and (not exact or _widens(op.input, node)))
        if not passes or dtype_of(op.input) is None:
            return Peeled(node, tuple(trail), tuple(reversed(dtypes)))
        trail.append(node)
        node = op.input


def _widens(source: Node, result: Node) -> bool:
    """True for a cast to fp32 that keeps every value."""
    return dtype_of(result) == torch.float32 and dtype_of(source) in LOW_PRECISION
