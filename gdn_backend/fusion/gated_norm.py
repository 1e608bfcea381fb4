"""Finding a gated RMSNorm above a value, in every spelling and order.

    norm before gate:  [bias +] [weight *] (h * rsqrt(mean(h²) + eps))  *  act(gate)
    gate before norm:  [bias +] [weight *] (h * rsqrt(mean(h²) + eps)),  h = x * act(gate)

The walk goes upward from the value. Operands of products and sums may come in either order, casts and reshapes may
stand anywhere between; each cast to a low precision is a rounding point that is recorded by name
(``gdn_backend.ops.spec``). ``None`` means that there is no gated norm above; a gated norm that the fused op cannot
express carries its ``problem``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from gdn_backend.fusion.match import GatedNorm, Miss, Reason
from gdn_backend.fusion.norm_ops import NormCall, find_gated_norm_call, read_norm_call
from gdn_backend.fusion.walk import Peeled, dtype_of, peel, peel_exact
from gdn_backend.graph.canonical import CanonicalOp, GraphView
from gdn_backend.graph.shapes import same_shape, same_size, shape_of, static_int, tensor_of, value_of
from gdn_backend.ops.spec import ROUNDING_POINTS, Activation, dtype_name

_AXIS_ADVICE = "take the mean over the last axis with keepdim=True"
_WIDTH_ADVICE = "make the head size a Python int, or leave it out of torch.compile's dynamic sizes"
_OTHER_ACTIVATIONS = frozenset(
    ("gelu", "relu", "relu6", "tanh", "elu", "selu", "celu", "leaky_relu", "softplus", "hardswish", "hardsigmoid",
     "mish", "softsign", "erf", "logsigmoid")
)  # fmt: skip


@dataclass(frozen=True)
class _Vector:
    """A weight or bias: a tensor that repeats along the row."""

    node: Node
    offset: float
    roundings: tuple[str, ...]
    nodes: tuple[Node, ...]
    problem: Miss | None


@dataclass(frozen=True)
class _Normalised:
    """``[bias +] [weight *] (h * rsqrt(mean(h²) + eps))``, the rounding of the last step not included."""

    h: Node
    eps: float | Node
    norm_size: int
    nodes: tuple[Node, ...]
    last_point: str  # the rounding point of the outermost step: norm, weight or bias
    problem: Miss | None
    weight: _Vector | None = None
    bias: _Vector | None = None
    roundings: tuple[str, ...] = ()
    inexact_root: Node | None = None  # 1 / sqrt, which is an ulp from rsqrt


@dataclass(frozen=True)
class _Activated:
    """``act(gate)``, rounded or not."""

    kind: Activation
    gate: Node
    nodes: tuple[Node, ...]
    roundings: tuple[str, ...]
    problem: Miss | None


def find_gated_norm(view: GraphView, value: Node) -> GatedNorm | None:
    """The gated norm whose result, through casts and reshapes, is ``value``; None where there is none."""
    top = peel(view, value)
    for find in (_norm_before_gate, _gate_before_norm, _weight_after_gate, find_gated_norm_call):
        norm = find(view, top)
        if norm is not None:
            return norm
    return None


def _norm_before_gate(view: GraphView, top: Peeled) -> GatedNorm | None:
    for left, right in _factors(view.op(top.node)):
        activated = _find_activated(view, right)
        normalised = _find_normalised(view, left) if activated else None
        if activated is None or normalised is None:
            continue
        inner = peel(view, left)
        problem = activated.problem or normalised.problem or _check_full_shape(left, right, top.node)
        if not inner.is_expressible:
            problem = problem or _rounding_miss(inner.node, inner)
        return _assemble(
            view, top, normalised, activated, x_above=normalised.h, norm_before_gate=True, problem=problem,
            roundings=(*normalised.roundings, *_rounding(normalised.last_point, inner)),
        )  # fmt: skip
    return None


def _gate_before_norm(view: GraphView, top: Peeled) -> GatedNorm | None:
    normalised = _find_normalised(view, top.node)
    if normalised is None:
        return None
    product = peel(view, normalised.h)
    for x, gate in _factors(view.op(product.node)):
        activated = _find_activated(view, gate)
        if activated is None:
            continue
        problem = activated.problem or normalised.problem or _check_full_shape(x, gate, product.node)
        if not product.is_expressible:
            problem = problem or _rounding_miss(product.node, product)
        nodes = (*normalised.nodes, *product.trail, product.node)
        return _assemble(
            view, top, replace(normalised, nodes=nodes), activated, x_above=x, norm_before_gate=False, problem=problem,
            roundings=(*_rounding("gated", product), *normalised.roundings),
        )  # fmt: skip
    return None


def _weight_after_gate(view: GraphView, top: Peeled) -> GatedNorm | None:
    """``weight * (norm * act(gate))``: a gated norm for sure, in an order that the fused op does not compute."""
    for left, right in _factors(view.op(top.node)):
        if _find_vector(view, right, left) is None:
            continue
        norm = _norm_before_gate(view, peel(view, left))
        if norm is not None:
            expected, actual = "the weight multiplied before the gate", "the weight multiplied after it"
            miss = Miss("norm", Reason.NORM_ORDER, top.node, expected, actual, "multiply by the weight first")
            return replace(norm, problem=miss)
    return None


def _assemble(
    view: GraphView,
    top: Peeled,
    normalised: _Normalised,
    activated: _Activated,
    *,
    x_above: Node,
    norm_before_gate: bool,
    problem: Miss | None,
    roundings: tuple[str, ...],
) -> GatedNorm:
    x, gate = peel_exact(view, x_above), peel_exact(view, activated.gate)
    if not top.is_expressible:
        problem = problem or _rounding_miss(top.node, top)
    points = (*roundings, *activated.roundings, *_rounding("output", top))
    if normalised.inexact_root is not None and not _rounds_behind_root(points):
        actual = "1 / sqrt in a chain that is never rounded, so that its last ulp shows in every scale"
        miss = Miss("norm", Reason.ROUNDING, normalised.inexact_root, "torch.rsqrt", actual, "use torch.rsqrt")
        problem = problem or miss
    weight, bias = normalised.weight, normalised.bias
    interior = {*top.trail, top.node, *normalised.nodes, *activated.nodes, *x.trail, *gate.trail}
    return GatedNorm(
        x=x.node,
        gate=gate.node,
        weight=weight.node if weight else None,
        bias=bias.node if bias else None,
        eps=normalised.eps,
        output=top.node,
        norm_size=normalised.norm_size,
        activation=activated.kind,
        norm_before_gate=norm_before_gate,
        weight_offset=weight.offset if weight else 0.0,
        roundings=tuple(sorted(points, key=lambda entry: ROUNDING_POINTS.index(entry.partition(":")[0]))),
        path=(*top.trail, top.node),
        interior=frozenset(interior),
        problem=problem,
    )


def _rounds_behind_root(roundings: tuple[str, ...]) -> bool:
    return any(entry.startswith(("norm:", "weight:", "bias:", "output:")) for entry in roundings)


def _find_normalised(view: GraphView, node: Node) -> _Normalised | None:
    """``[bias +] [weight *] (h * r)`` under ``node``, whose own casts belong to the last step."""
    top = peel(view, node)
    op = view.op(top.node)
    if op.name != "add":
        return _find_weighted(view, top)
    for left, right in _operand_orders(op):
        vector = _find_vector(view, right, left, takes_offset=False)
        inner = _find_weighted(view, peel(view, left)) if vector else None
        if inner is not None and vector is not None:
            return _extend(view, inner, top, left, vector, "bias")
    return None


def _find_weighted(view: GraphView, top: Peeled) -> _Normalised | None:
    """``[weight *] (h * r)`` at ``top.node``."""
    core = _find_core(view, top)
    if core is not None:
        return core
    for left, right in _factors(view.op(top.node)):
        vector = _find_vector(view, right, left)
        inner = _find_core(view, peel(view, left)) if vector else None
        if inner is not None and vector is not None and inner.weight is None:
            return _extend(view, inner, top, left, vector, "weight")
    return None


def _extend(view: GraphView, inner: _Normalised, top: Peeled, operand: Node, vector: _Vector, role: str) -> _Normalised:
    """``inner`` with a weight or bias applied to it at ``top``."""
    below = peel(view, operand)
    problem = inner.problem or vector.problem
    if not below.is_expressible:
        problem = problem or _rounding_miss(below.node, below)
    return replace(
        inner,
        weight=vector if role == "weight" else inner.weight,
        bias=vector if role == "bias" else inner.bias,
        last_point=role,
        problem=problem,
        nodes=(*inner.nodes, *below.trail, *top.trail, top.node, *vector.nodes),
        roundings=(*inner.roundings, *_rounding(inner.last_point, below), *vector.roundings),
    )


def _find_core(view: GraphView, top: Peeled) -> _Normalised | None:
    """``h * rsqrt(mean(h²) + eps)`` at ``top.node``; ``h / sqrt(...)`` rounds otherwise and comes with that problem."""
    op = view.op(top.node)
    call = read_norm_call(view, top.node)
    if call is not None:
        return _core_of_call(view, top, call)
    orders = list(_factors(op)) or ([(op.input, op.args["other"])] if op.name == "div" else [])
    for h, r in orders:
        if tensor_of(h) is None or tensor_of(r) is None:
            continue
        found = _find_root_mean_square(view, h, r, divides=op.name == "div")
        if found is not None:
            return replace(found, nodes=(*found.nodes, *top.trail, top.node))
    return None


def _core_of_call(view: GraphView, top: Peeled, call: NormCall) -> _Normalised:
    vector = _find_vector(view, call.weight, call.h) if call.weight is not None else None
    return _Normalised(
        h=call.h,
        eps=call.eps,
        norm_size=call.norm_size,
        nodes=(*top.trail, top.node, *(vector.nodes if vector else ())),
        last_point="weight" if vector else "norm",
        problem=call.problem or (vector.problem if vector else None),
        weight=vector,
        roundings=vector.roundings if vector else (),
    )


def _find_root_mean_square(view: GraphView, h: Node, r: Node, divides: bool) -> _Normalised | None:
    """``h`` and ``r = rsqrt(mean(h²) + eps)``, also spelt ``1 / sqrt(...)``."""
    root = peel(view, r)
    root_op = view.op(root.node)
    nodes = [*root.trail, root.node]
    problem, inexact_root = None, None
    if divides and root_op.name == "sqrt":
        actual = "h / sqrt(variance)"
        problem = Miss("norm", Reason.ROUNDING, root.node, "h * rsqrt(variance)", actual, "multiply by torch.rsqrt")
    elif not divides and root_op.name == "reciprocal":
        under = peel(view, root_op.input)
        nodes += [*under.trail, under.node]
        root_op = view.op(under.node)
        if root_op.name != "sqrt":
            return None
        inexact_root = root.node
    elif divides or root_op.name != "rsqrt":
        return None
    variance = peel(view, root_op.input)
    nodes += variance.trail
    eps: float | Node | None = 0.0
    mean = variance.node
    if view.op(mean).name in ("add", "sub"):
        nodes.append(mean)
        eps, operand = _split_eps(view.op(mean))
        if eps is None and view.op(mean).name == "sub":
            return None
        under = peel(view, operand)
        mean = under.node
        nodes += under.trail
    elif view.op(mean).name == "clamp":
        nodes.append(mean)
        under = peel(view, view.op(mean).input)
        advice = "add eps to the mean square, as torch.rms_norm does"
        problem = Miss("norm", Reason.EPS, mean, "the mean plus eps", "a clamp of the mean", advice)
        mean = under.node
        nodes += under.trail
    found = _find_mean_square(view, h, r, mean, eps, nodes)
    if found is None:
        return None
    return replace(found, problem=problem or found.problem, inexact_root=inexact_root)


def _split_eps(op: CanonicalOp) -> tuple[float | Node | None, Node]:
    """eps and the mean: the operand that is no tensor is eps; None where both are tensors."""
    left, right = op.input, op.get("other")
    if isinstance(right, int | float):
        return float(-right if op.name == "sub" else right), left
    if isinstance(right, Node) and isinstance(value_of(right), torch.SymFloat | torch.SymInt) and op.name == "add":
        return right, left
    return None, left if len(shape_of(left)) >= len(shape_of(right)) else right


def _find_mean_square(
    view: GraphView, h: Node, r: Node, mean: Node, eps: float | Node | None, nodes: list[Node]
) -> _Normalised | None:
    """The rest of the walk, from the mean to ``h``: ``mean(h²)`` or ``sum(h²) / count``."""
    mean_op = view.op(mean)
    total = mean_op
    nodes.append(mean)
    if mean_op.name in ("div", "mul") and isinstance(mean_op.get("other"), int | float):
        under = peel(view, mean_op.input)
        nodes += [*under.trail, under.node]
        total = view.op(under.node)
    if total.name != ("mean" if total is mean_op else "sum"):
        return None
    square = peel(view, total.input)
    if view.op(square.node).name != "square":
        return None
    nodes += [*square.trail, square.node]
    operand = view.op(square.node).input
    squared, plain = peel_exact(view, operand), peel_exact(view, h)
    if squared.node is not plain.node:
        return None
    size = static_int(shape_of(h)[-1]) if shape_of(h) else None
    if total is not mean_op and not _divides_by_count(mean_op, size):
        return None  # an l2 norm or some other sum, no mean
    problem = _check_mean(total, h, r, size, eps) or _check_statistics(tuple(nodes))
    if mean_op.name == "mul" and size is not None and size & (size - 1):
        actual, advice = f"a sum times 1/{size}, which is rounded", "use mean(), or divide the sum"
        problem = problem or Miss("norm", Reason.ROUNDING, mean, f"a sum divided by {size}", actual, advice)
    return _Normalised(
        h=h,
        eps=0.0 if eps is None else eps,
        norm_size=size or 1,
        nodes=(*nodes, *squared.trail),
        last_point="norm",
        problem=problem,
    )


def _divides_by_count(op: CanonicalOp, count: int | None) -> bool:
    other = op.args["other"]
    return count is not None and (other == count if op.name == "div" else other == 1.0 / count)


def _check_mean(total: CanonicalOp, h: Node, r: Node, size: int | None, eps: float | Node | None) -> Miss | None:
    """The mean runs over the last axis of ``h`` and is kept there; its width and eps are numbers."""
    shape, summed = shape_of(h), shape_of(total.input)
    last = len(summed) - 1
    kept = same_shape(shape_of(r), (*shape[:-1], 1))
    if total.get("dims") != (last,) or not kept or not same_size(summed[-1], shape[-1]):
        dims = "all axes" if total.get("dims") is None else f"axes {list(total.get('dims'))} of {last + 1}"
        actual = f"a mean over {dims}{'' if kept else ', not kept'}"
        return Miss("norm", Reason.NORM_AXIS, total.node, "a mean over the last axis, kept", actual, _AXIS_ADVICE)
    if size is None:
        return Miss("norm", Reason.NORM_AXIS, total.node, "a norm of fixed width", f"width {shape[-1]}", _WIDTH_ADVICE)
    if eps is None:
        return Miss("norm", Reason.EPS, total.node, "a number", "a tensor", "pass eps as a Python float")
    return None


def _check_statistics(nodes: tuple[Node, ...]) -> Miss | None:
    """Everything from the square to the root, which ``nodes`` begin with, is fp32."""
    for node in reversed(nodes):
        dtype = dtype_of(node)
        if dtype is not torch.float32:
            actual = dtype_name(dtype) if dtype is not None else "no tensor"
            advice = "cast to float32 before the norm, as Hugging Face's layers do"
            return Miss("norm", Reason.ROUNDING, node, "statistics in float32", actual, advice)
    return None


def _find_activated(view: GraphView, node: Node) -> _Activated | None:
    """``act(gate)`` under ``node``; unknown activations come with the problem that names them."""
    top = peel(view, node)
    op = view.op(top.node)
    nodes = (*top.trail, top.node)
    problem = None if top.is_expressible else _rounding_miss(top.node, top)
    if op.name in ("silu", "sigmoid"):
        kind: Activation = "silu" if op.name == "silu" else "sigmoid"
        return _Activated(kind, op.input, nodes, _rounding("activation", top), problem)
    if op.name in _OTHER_ACTIVATIONS:
        advice = "only silu and sigmoid gates can be fused"
        problem = Miss("norm", Reason.ACTIVATION, top.node, "silu or sigmoid of the gate", op.name, advice)
        return _Activated("silu", op.input, nodes, (), problem)
    for left, right in _factors(op):
        gate = peel(view, right)
        if view.op(gate.node).name == "sigmoid":
            inner = peel_exact(view, view.op(gate.node).input)
            if inner.node is peel_exact(view, left).node:
                advice = "torch.nn.functional.silu gives it in one rounding"
                problem = Miss("norm", Reason.ACTIVATION, top.node, "silu(gate)", "gate * sigmoid(gate)", advice)
                return _Activated("silu", left, (*nodes, *gate.trail, gate.node), (), problem)
    return None


def _find_vector(view: GraphView, node: Node, beside: Node, takes_offset: bool = True) -> _Vector | None:
    """A weight or bias beside a value: a tensor of fewer values, a weight with an optional number added to it."""
    tensor, other = tensor_of(node), tensor_of(beside)
    if tensor is None or other is None:
        return None
    is_row = all(static_int(size) == 1 for size in other.shape[:-1])  # one row: a vector may have its shape
    if same_shape(tuple(tensor.shape), tuple(other.shape)) and not (is_row or _is_vector(view, node)):
        return None
    problem = _check_repeats(node, beside)
    top = peel(view, node)
    op = view.op(top.node)
    # Adding zero is no offset: it turns -0 into +0.
    if takes_offset and op.name == "add" and isinstance(op.get("other"), int | float) and op.args["other"] != 0:
        under = peel_exact(view, op.input)
        nodes = (*top.trail, top.node, *under.trail)
        return _Vector(under.node, float(op.args["other"]), _rounding("offset", top), nodes, problem)
    exact = peel_exact(view, node)
    return _Vector(exact.node, 0.0, (), exact.trail, problem)


def _is_vector(view: GraphView, node: Node) -> bool:
    """True for a 1-D tensor, reshaped or not, with or without a number added to it."""
    node = peel(view, node).node
    op = view.op(node)
    if op.name == "add" and isinstance(op.get("other"), int | float):
        node = peel(view, op.input).node
    return len(shape_of(node)) == 1


def _check_repeats(node: Node, beside: Node) -> Miss | None:
    """The vector's shape must be the last axes of the value's: then it repeats along the row-major order."""
    shape, whole = shape_of(node), shape_of(beside)
    while shape and static_int(shape[0]) == 1:
        shape = shape[1:]
    if shape and len(shape) < len(whole) and same_shape(shape, whole[len(whole) - len(shape) :]):
        return None
    expected = f"a vector over the last axis of {_show(whole)}"
    return Miss("norm", Reason.WEIGHT_SHAPE, node, expected, _show(shape_of(node)), "give every head the same weight")


def _show(shape: tuple[object, ...]) -> str:
    return f"[{', '.join(str(size) for size in shape)}]"


def _check_full_shape(left: Node, right: Node, product: Node) -> Miss | None:
    if same_shape(shape_of(left), shape_of(right)):
        return None
    expected = f"a gate of the norm's shape {_show(shape_of(left))}"
    return Miss("norm", Reason.LAYOUT, product, expected, _show(shape_of(right)), "give every value a gate of its own")


def _rounding(point: str, peeled: Peeled) -> tuple[str, ...]:
    dtype = peeled.rounding
    return () if dtype is None else (f"{point}:{dtype_name(dtype)}",)


def _rounding_miss(node: Node, peeled: Peeled) -> Miss:
    chain = " then ".join(dtype_name(dtype) for dtype in peeled.dtypes)
    advice = "compute in float32 and cast once to the model's dtype"
    return Miss("norm", Reason.ROUNDING, node, "at most one rounding, to bfloat16 or float16", chain, advice)


def _factors(op: CanonicalOp) -> Iterator[tuple[Node, Node]]:
    """Both orders of the factors of a product of two tensors."""
    if op.name == "mul":
        yield from _operand_orders(op)


def _operand_orders(op: CanonicalOp) -> Iterator[tuple[Node, Node]]:
    left, right = op.get("input"), op.get("other")
    if tensor_of(left) is not None and tensor_of(right) is not None:
        yield left, right
        yield right, left
