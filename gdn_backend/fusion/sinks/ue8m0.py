"""Powers of two as scales (UE8M0), in the two ways they are computed.

By logarithm, ``exp2(ceil(log2(s)))`` (vLLM); by exponent bits (DeepGEMM's ``ceil_to_ue8m0``)::

    bits     = s.abs().float().view(torch.int32)
    exponent = ((bits >> 23) & 0xFF) + (bits & 0x7FFFFF).bool().int()
    scale    = (exponent.clamp(1, 254) << 23).view(torch.float32)

The two differ just above a power of two, where the logarithm is rounded to an integer.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node

from gdn_backend.fusion.walk import dtype_of
from gdn_backend.graph.canonical import CanonicalOp, GraphView
from gdn_backend.graph.shapes import tensor_of
from gdn_backend.ops.spec import Step

_EXPONENT_SHIFT, _EXPONENT_MASK, _MANTISSA_MASK = 23, 0xFF, 0x7FFFFF
_SMALLEST, _LARGEST = 1, 254


@dataclass(frozen=True)
class PowerOfTwo:
    """A power of two made of ``source``, and the nodes that make it, ``source`` not included."""

    step: Step
    source: Node
    nodes: tuple[Node, ...]


def read_power_of_two(view: GraphView, op: CanonicalOp) -> PowerOfTwo | None:
    """The power of two that ``op`` is the last operation of, all in fp32; None where it is none."""
    if op.name == "exp2":
        return _read_logarithm(view, op)
    if op.name == "bitcast" and dtype_of(op.node) is torch.float32:
        return _read_bits(view, op)
    return None


def _read_logarithm(view: GraphView, op: CanonicalOp) -> PowerOfTwo | None:
    ceil = view.op(op.input)
    log2 = view.op(ceil.input) if ceil.name == "ceil" else None
    if log2 is None or log2.name != "log2":
        return None
    if any(dtype_of(node) is not torch.float32 for node in (op.node, ceil.node, log2.node, log2.input)):
        return None
    return PowerOfTwo(("exp2_ceil_log2",), log2.input, (ceil.node, log2.node))


def _read_bits(view: GraphView, op: CanonicalOp) -> PowerOfTwo | None:
    shift = view.op(op.input)
    clamp = _with_number(view, shift, "lshift", _EXPONENT_SHIFT)
    if clamp is None or clamp.name != "clamp" or (clamp.get("min"), clamp.get("max")) != (_SMALLEST, _LARGEST):
        return None
    total = view.op(clamp.input)
    left, right = total.get("input"), total.get("other")
    if total.name != "add" or tensor_of(left) is None or tensor_of(right) is None:
        return None
    for exponent, carry in ((left, right), (right, left)):
        upper, lower = _read_exponent(view, exponent), _read_carry(view, carry)
        if upper is None or lower is None or upper[0] is not lower[0]:
            continue
        bits, nodes = view.op(upper[0]), (shift.node, clamp.node, total.node, *upper[1], *lower[1])
        if bits.name != "bitcast" or dtype_of(bits.input) is not torch.float32:
            return None
        source, inner = _under_sign(view, bits.input)
        return PowerOfTwo(("ceil_pow2_bits",), source, (*nodes, bits.node, *inner))
    return None


def _with_number(view: GraphView, op: CanonicalOp, name: str, number: int) -> CanonicalOp | None:
    """The operation under ``name(·, number)``."""
    return view.op(op.input) if op.name == name and op.get("other") == number else None


def _read_exponent(view: GraphView, node: Node) -> tuple[Node, tuple[Node, ...]] | None:
    """``(bits >> 23) & 0xFF``: the bits, and the nodes on the way."""
    mask = view.op(node)
    shift = _with_number(view, mask, "and", _EXPONENT_MASK)
    if shift is None or shift.name != "rshift" or shift.get("other") != _EXPONENT_SHIFT:
        return None
    return shift.input, (mask.node, shift.node)


def _read_carry(view: GraphView, node: Node) -> tuple[Node, tuple[Node, ...]] | None:
    """``(bits & 0x7FFFFF).bool().int()``, also ``!= 0``: the bits, and the nodes on the way."""
    integer = view.op(node)
    if integer.name != "cast" or dtype_of(node) is not torch.int32:
        return None
    truth = view.op(integer.input)
    is_truth = _is_cast_to_bool(truth) or (truth.name == "ne" and truth.get("other") == 0)
    mask = view.op(truth.input) if is_truth else None
    if mask is None or mask.name != "and" or mask.get("other") != _MANTISSA_MASK:
        return None
    return mask.input, (integer.node, truth.node, mask.node)


def _is_cast_to_bool(op: CanonicalOp) -> bool:
    return op.name == "cast" and dtype_of(op.node) is torch.bool


def _under_sign(view: GraphView, node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Without ``.abs()``, which changes no scale (the exponent's mask drops the sign), and copies beside it."""
    nodes: list[Node] = []
    while view.op(node).name in ("abs", "identity"):
        nodes.append(node)
        node = view.op(node).input
    return node, tuple(nodes)
