"""The quantisation written out in plain torch, whatever the formula.

    groups = y.view(T, G, 128)                      any reshape; the data path
    amax   = groups.abs().amax(-1, keepdim=True)    or .max(-1)[0]
    scale  = clamp(amax.float() / 448, min=floor)   any chain of the steps of gdn_backend.ops.spec
    codes  = clamp(groups.float() / scale, -448, 448).to(torch.float8_e4m3fn)

The walk starts at the cast to FP8. The chain from ``amax`` to the factor is read into steps, exactly as the graph has
it; the stored scale is the first value of that chain that anyone else reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

from gdn_backend.fusion.match import Candidate, Miss, Quantisation, Reason
from gdn_backend.fusion.sinks.ue8m0 import read_power_of_two
from gdn_backend.fusion.walk import LOW_PRECISION, UP_TO_FP32, Peeled, dtype_of, peel, peel_exact
from gdn_backend.graph.canonical import BROADCASTS, CanonicalOp, GraphView, reads_only_shape
from gdn_backend.graph.shapes import same_shape, shape_of, static_int, tensor_of, value_of
from gdn_backend.ops.spec import QuantSpec, Step, dtype_name

SINK = "decomposed"
_ALL_FP8 = frozenset(getattr(torch, name) for name in dir(torch) if name.startswith(("float8_e4m3", "float8_e5m2")))
_SYMBOLIC_ADVICE = "torch.compile(dynamic=True) makes floats of modules and globals symbolic: write it as a literal"
_STATIC_ADVICE = "the fused op computes its scales; use dynamic activation quantisation"
_SEARCH_LIMIT = 64  # nodes looked at to tell a scale from the data from a scale that is given
_LONGEST_CHAIN = 64  # nodes from amax to the factor


@dataclass(frozen=True)
class _Link:
    """One node of the chain from amax to the factor, and the steps it stands for."""

    node: Node
    steps: tuple[Step, ...]
    inside: tuple[Node, ...] = ()  # nodes of a step that takes several
    expands: bool = False  # to the data's shape


@dataclass(frozen=True)
class _Chain:
    """The scale: from the magnitudes (``links[0]``) to the factor (``links[-1]``)."""

    links: tuple[_Link, ...]
    magnitude: CanonicalOp  # the reduction
    absolute: Node
    grouped: Node  # what the magnitudes are taken of
    nodes: tuple[Node, ...]  # the reduction and what is above it

    @property
    def last_compact(self) -> int:
        """The last link before the scales are expanded to the data's shape."""
        return next((index for index, link in enumerate(self.links) if link.expands), len(self.links)) - 1


@dataclass(frozen=True)
class _Cast:
    """The way from the scaled value to the codes."""

    scaled: Node
    clamp: float | None
    quotient: torch.dtype | None
    nodes: tuple[Node, ...]
    problem: Miss | None


def find_decomposed(view: GraphView, node: Node) -> Candidate | None:
    """A candidate where ``node`` casts to an FP8 dtype, else None."""
    op = view.op(node)
    if op.name != "cast" or dtype_of(node) not in _ALL_FP8 or dtype_of(op.input) in _ALL_FP8:
        return None
    cast = _read_cast(view, op.input)
    scaling = view.op(cast.scaled)
    if scaling.name not in ("mul", "div") or tensor_of(scaling.get("other")) is None:
        return Candidate(node, SINK, *_scaled_otherwise(scaling))
    orders = [(scaling.input, scaling.args["other"])]
    if scaling.name == "mul":
        orders.append((scaling.args["other"], scaling.input))
    outcomes = [(data, _read_scale(view, factor)) for data, factor in orders]
    for data, chain in outcomes:
        if isinstance(chain, _Chain):
            return Candidate(node, SINK, (data,), _quantisation(view, node, scaling, data, cast, chain))
    for data, outcome in outcomes:
        if outcome is not None and not isinstance(outcome, _Chain):
            return Candidate(node, SINK, (data,), outcome)
    data_paths = (*(data for data, _ in outcomes), cast.scaled)
    return Candidate(node, SINK, data_paths, _static_scale(orders[0][1]))


def _scaled_otherwise(scaling: CanonicalOp) -> tuple[tuple[Node, ...], Miss]:
    """The data paths and the miss of a cast that no tensor scales."""
    expected, name, node = "codes made by a division by a scale from the data", scaling.name, scaling.node
    if tensor_of(scaling.get("other")) is not None and name.startswith("div"):  # div_with_options: a rounding mode
        return (scaling.input,), _formula_miss(node, expected, "a division that rounds to integers")
    scaled = name in ("mul", "div")
    actual = f"{name} with {scaling.get('other')}" if scaled else "a cast without a scale"
    miss = Miss("quant", Reason.STATIC_SCALE, node, expected, actual, _STATIC_ADVICE)
    return ((scaling.input, node) if scaled else (node,)), miss


def _static_scale(factor: Node) -> Miss:
    expected, actual = "a scale computed from the data", "a scale that is given"
    return Miss("quant", Reason.STATIC_SCALE, factor, expected, actual, _STATIC_ADVICE)


def _formula_miss(node: Node, expected: str, actual: str) -> Miss:
    advice = "write the quantisation as gdn_backend.ops.fp8_quant has it, or call that"
    return Miss("quant", Reason.SCALE_FORMULA, node, expected, actual, advice)


def _read_cast(view: GraphView, value: Node) -> _Cast:
    """Through clamps and casts down to the quotient."""
    nodes: list[Node] = []
    bounds: dict[str, float] = {}
    dtypes: list[torch.dtype] = []
    problem: Miss | None = None
    while True:
        top = peel(view, value)
        nodes += top.trail
        dtypes += [dtype for dtype in top.dtypes if dtype in LOW_PRECISION]
        other = next((dtype for dtype in top.dtypes if dtype not in UP_TO_FP32), None)
        if other is not None:
            advice = "divide and clamp in float32"
            expected = "a quotient in float32, bfloat16 or float16"
            problem = problem or Miss("quant", Reason.ROUNDING, top.node, expected, dtype_name(other), advice)
        op = view.op(top.node)
        if op.name != "clamp":
            break
        nodes.append(top.node)
        for side in ("min", "max"):
            bound = op.get(side)
            if isinstance(bound, int | float) and side not in bounds:
                bounds[side] = float(bound)
            elif bound is not None:
                problem = _formula_miss(top.node, "one clamp between numbers", f"{side}={bound}")
        value = op.input
    if bounds and (len(bounds) == 1 or bounds["min"] != -bounds["max"] or bounds["max"] <= 0.0):
        actual = f"a clamp to [{bounds.get('min')}, {bounds.get('max')}]"
        advice = "clamp to both limits of the FP8 dtype"
        problem = problem or Miss("quant", Reason.FP8_FORMAT, top.node, "a clamp to [-m, m]", actual, advice)
    if len(set(dtypes)) > 1:
        actual = " and ".join(dtype_name(dtype) for dtype in dict.fromkeys(dtypes))
        expected, advice = "at most one rounding before the codes", "divide and clamp in float32"
        problem = problem or Miss("quant", Reason.ROUNDING, top.node, expected, actual, advice)
    for dtype in dtypes:  # a limit between two values of the narrow dtype acts otherwise before its rounding than after
        if any(float(torch.tensor(bound, dtype=dtype)) != bound for bound in bounds.values()):
            expected, advice = f"a clamp to a limit that {dtype_name(dtype)} has", "divide and clamp in float32"
            problem = problem or Miss("quant", Reason.ROUNDING, top.node, expected, f"{bounds}", advice)
    return _Cast(top.node, bounds.get("max"), dtypes[0] if dtypes else None, (*nodes, top.node), problem)


def _read_scale(view: GraphView, factor: Node) -> _Chain | Miss | None:
    """The chain above a factor; a Miss where it comes from the data in an unknown way; None where it does not."""
    links: list[_Link] = []
    node = factor
    while len(links) < _LONGEST_CHAIN:
        op = view.op(node)
        reduction = view.op(op.input) if op.name == "item" and op.get("index") == 0 else op
        if reduction.name in ("amax", "max_with_indices"):
            return _close_chain(view, reduction, [*links, _Link(node, ())])
        power = read_power_of_two(view, op)
        if power is not None:
            links.append(_Link(node, (power.step,), power.nodes))
            node = power.source
            continue
        link = _read_link(op)
        if not isinstance(link, _Link):
            return _unreadable(view, op, link.actual if link is not None else op.name)
        links.append(link)
        node = op.input
    return _unreadable(view, view.op(node), f"a scale made in more than {_LONGEST_CHAIN} steps")


def _unreadable(view: GraphView, op: CanonicalOp, actual: str) -> Miss | None:
    """What to say of a factor whose chain cannot be followed through ``op``; None where it is not from the data."""
    if not _depends_on_magnitude(view, op.node):
        return None
    miss = _formula_miss(op.node, "a scale made of known steps from amax", actual)
    if _symbolic(op):
        return replace(miss, actual=f"{actual} by a symbolic number", advice=_SYMBOLIC_ADVICE)
    return miss


def _symbolic(op: CanonicalOp) -> bool:
    operands = (op.get("other"), op.get("min"), op.get("max"))
    return any(isinstance(operand, Node) and isinstance(value_of(operand), torch.SymFloat) for operand in operands)


def _read_link(op: CanonicalOp) -> _Link | Miss | None:
    """One node of the chain as steps; None where it is none of them."""
    dtype = dtype_of(op.node)
    if dtype not in UP_TO_FP32:
        return None
    assert dtype is not None
    other = op.get("other")
    number = float(other) if isinstance(other, int | float) else None
    value = op.get("value")
    steps: tuple[Step, ...]
    if op.name in ("reshape", "identity"):
        steps = ()
    elif op.name in BROADCASTS:
        return _Link(op.node, (), expands=True)
    elif op.name == "cast":
        steps = _rounded((), dtype, source=dtype_of(op.input))
    elif op.name in ("mul", "div", "add") and number is not None:
        steps = _rounded(((op.name, number),), dtype)
    elif op.name == "sub" and number is not None:
        steps = _rounded((("add", -number),), dtype)
    elif op.name == "reciprocal":
        steps = _rounded((("reciprocal",),), dtype)
    elif op.name == "const_div" and isinstance(value, int | float):
        steps = (*_rounded((("reciprocal",),), dtype), *_rounded((("mul", float(value)),), dtype))
    elif op.name == "clamp":
        clamped = _clamp_steps(op, dtype)
        if isinstance(clamped, Miss):
            return clamped
        steps = clamped
    else:
        return None
    return _Link(op.node, steps)


def _rounded(steps: tuple[Step, ...], dtype: torch.dtype, source: torch.dtype | None = None) -> tuple[Step, ...]:
    """``steps``, and the rounding of their result where its dtype is narrower than fp32."""
    if dtype is torch.float32 or dtype is source:
        return steps
    return (*steps, ("round", dtype_name(dtype)))


def _clamp_steps(op: CanonicalOp, dtype: torch.dtype) -> tuple[Step, ...] | Miss:
    """A floor is rounded to the dtype it works in: ``clamp(min=1e-10)`` in float16 is a clamp at zero."""
    steps: list[Step] = []
    for side, name in (("min", "max"), ("max", "min")):
        bound = op.get(side)
        if isinstance(bound, int | float):
            steps.append((name, float(torch.tensor(float(bound), dtype=dtype))))
        elif bound is not None:
            return _formula_miss(op.node, "a clamp at a number", f"a clamp at {bound}")
    return tuple(steps)


def _close_chain(view: GraphView, reduction: CanonicalOp, links: list[_Link]) -> _Chain | Miss:
    absolute = peel_exact(view, reduction.input)
    if view.op(absolute.node).name != "abs":
        actual = f"a maximum of {view.op(absolute.node).name}"
        return _formula_miss(reduction.node, "a maximum of absolute values", actual)
    inside = (reduction.node, *absolute.trail, absolute.node)
    extra = tuple(node for node in inside if node is not links[-1].node)
    return _Chain(tuple(reversed(links)), reduction, absolute.node, reduction.input, extra)


def _depends_on_magnitude(view: GraphView, node: Node) -> bool:
    """True where a maximum or absolute value stands close above ``node``."""
    seen: set[Node] = set()
    frontier = [node]
    while frontier and len(seen) < _SEARCH_LIMIT:
        current = frontier.pop(0)
        if current in seen:
            continue
        seen.add(current)
        if view.op(current).name in ("amax", "max_with_indices", "abs", "aminmax", "norm"):
            return True
        frontier += current.all_input_nodes
    return False


def _quantisation(
    view: GraphView, codes: Node, scaling: CanonicalOp, data: Node, cast: _Cast, chain: _Chain
) -> Quantisation | Miss:
    value = peel_exact(view, data)
    measured = peel_exact(view, view.op(chain.absolute).input)
    problem = cast.problem or _check_groups(chain, measured, value, data)
    if problem is not None:
        return problem
    inner = {*cast.nodes, *value.trail, *measured.trail, *chain.nodes}
    inner |= {node for link in chain.links for node in (link.node, *link.inside)}
    stored = _stored_link(view, chain, {*inner, codes})
    after = chain.links[stored + 1 :]
    dependents = {node for link in after for node in (link.node, *link.inside)}
    scales = chain.links[stored].node
    return Quantisation(
        sink=SINK,
        data=value.node,
        codes=codes,
        scales=scales,
        group_size=static_int(shape_of(chain.grouped)[-1]) or 0,
        quant=QuantSpec(
            scale_steps=_join(chain.links[: stored + 1]),
            factor_steps=_join(after),
            operation="divide" if scaling.name == "div" else "multiply",
            clamp=cast.clamp,
            quotient=dtype_name(cast.quotient) if cast.quotient is not None else None,
        ),
        fp8_dtype=dtype_name(dtype_of(codes) or torch.float8_e4m3fn),
        path=(chain.grouped, data, *value.trail, value.node),
        interior=frozenset(inner - dependents - {scales}),
        dependents=frozenset(dependents),
    )


def _join(links: Iterable[_Link]) -> tuple[Step, ...]:
    return tuple(step for link in links for step in link.steps)


def _stored_link(view: GraphView, chain: _Chain, inner: set[Node]) -> int:
    """The first value of the chain that is read from outside; the factor where none is. One for each group."""
    for index, link in enumerate(chain.links[: chain.last_compact]):
        if any(user not in inner and not reads_only_shape(user, link.node) for user in view.readers(link.node)):
            return index
    return chain.last_compact


def _check_groups(chain: _Chain, measured: Peeled, value: Peeled, data: Node) -> Miss | None:
    """The groups run along the last axis, and each meets its own factor."""
    grouped = shape_of(chain.grouped)
    dims = chain.magnitude.get("dims")
    last = len(grouped) - 1
    advice = "quantise in groups along the last axis, or per token"
    if dims is None or (len(dims) == len(grouped) and len(shape_of(value.node)) > 1):
        actual = "one scale for the whole tensor"
        return Miss("quant", Reason.PER_TENSOR, chain.magnitude.node, "one scale a group", actual, advice)
    if dims != (last,):
        actual = f"axes {list(dims)}"
        return Miss("quant", Reason.GROUP_SHAPE, chain.magnitude.node, f"groups along axis {last}", actual, advice)
    if static_int(grouped[-1]) is None:
        return Miss("quant", Reason.GROUP_SHAPE, chain.grouped, "groups of fixed size", f"{grouped[-1]}", advice)
    if measured.node is not value.node:
        actual = f"the magnitudes of {measured.node.name} and the codes of {value.node.name}"
        return _formula_miss(chain.magnitude.node, "scale and codes from one value", actual)
    compact, last_link = chain.links[chain.last_compact], chain.links[-1]
    factor, shape = shape_of(compact.node), shape_of(data)
    meets = last_link is compact or same_shape(shape_of(last_link.node), shape)
    if not meets or not same_shape(factor, (*shape[:-1], 1)) or static_int(shape[-1]) != static_int(grouped[-1]):
        expected = f"a factor of shape {[*map(str, shape[:-1]), '1']}"
        actual = f"{[str(size) for size in (factor if meets else shape_of(last_link.node))]}"
        return Miss("quant", Reason.GROUP_SHAPE, last_link.node, expected, actual, advice)
    return None
