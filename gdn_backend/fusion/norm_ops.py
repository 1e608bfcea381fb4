"""Norms in one call: ``torch.rms_norm``, vLLM's gated norm, and calls whose inside cannot be seen.

``torch.rms_norm`` (``nn.RMSNorm``, ``F.rms_norm``) computes in fp32, weight included, and rounds once, to the input's
dtype (aten/src/ATen/native/layer_norm.cpp, ``rms_norm_symint``; the fused kernel rounds in the same place); an absent
eps is the epsilon of fp32, the dtype that it computes in. Seen with torch 2.13 on a CPU, 2.11 on a CPU and an H200:
bf16 byte-equal to that chain, fp16 and fp32 up to reduction order.

``vllm::fla_rms_norm_gated(x, z?, weight, eps, group_size?, norm_before_gate, activation)`` too computes in fp32 and
rounds once, at its end (vLLM's layernorm_guard.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from gdn_backend.fusion.match import GatedNorm, Miss, Reason
from gdn_backend.fusion.walk import LOW_PRECISION, Peeled, dtype_of, peel_exact
from gdn_backend.graph.canonical import CREATIONS, GraphView, op_arguments, qualified_op_name
from gdn_backend.graph.shapes import same_shape, same_size, shape_of, static_int, tensor_of, value_of
from gdn_backend.ops.spec import dtype_name

VLLM_GATED_NORM = "vllm::fla_rms_norm_gated"
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}
_GATED_NORM_NAME = re.compile(r"(?=.*norm)(?=.*gate)", re.IGNORECASE)
_NORM_NAME = re.compile(r"rms_?norm", re.IGNORECASE)
_OPAQUE_ADVICE = "norm and gate in plain torch, as gdn_backend.rms_norm_gated does, can be fused"
_OWN = "gdn_backend::"


@dataclass(frozen=True)
class NormCall:
    """A norm without a gate, in one call: its operands, and whether it can be expressed."""

    h: Node
    weight: Node | None
    eps: float | Node
    norm_size: int
    problem: Miss | None


def read_norm_call(view: GraphView, node: Node) -> NormCall | None:
    """``torch.rms_norm`` over the last axis, or an opaque op with such a name; None for anything else."""
    op = view.op(node)
    if op.name == "rms_norm" and tensor_of(op.get("input")) is not None:
        return _read_torch(view, node)
    name = qualified_op_name(node) or ""
    if name.startswith((_OWN, "aten::")) or not _NORM_NAME.search(name):
        return None
    operands = _operands_like(node)
    if not operands:
        return None
    return NormCall(operands[0], None, 0.0, _width(operands[0]), opaque_miss(node, name))


def _read_torch(view: GraphView, node: Node) -> NormCall:
    op = view.op(node)
    h, weight, eps = op.input, op.get("weight"), op.get("eps")
    shape = op.get("normalized_shape")
    shape = tuple(shape) if isinstance(shape, tuple | list | torch.Size) else (shape,)
    problem = None
    if len(shape) != 1:
        expected, advice = "a norm over the last axis", "norm the merged axis"
        problem = Miss("norm", Reason.NORM_AXIS, node, expected, f"a norm over {len(shape)} axes", advice)
    if static_int(shape_of(h)[-1]) is None:
        actual, advice = f"width {shape_of(h)[-1]}", "give the norm a fixed width"
        problem = problem or Miss("norm", Reason.NORM_AXIS, node, "a norm of fixed width", actual, advice)
    if eps is None:
        eps = torch.finfo(torch.float32).eps
    is_number = isinstance(eps, int | float)
    is_symbol = isinstance(eps, Node) and isinstance(value_of(eps), torch.SymFloat)
    if not is_number and not is_symbol:
        problem = problem or Miss("norm", Reason.EPS, node, "a number", "a tensor", "pass eps as a Python float")
    return NormCall(h, weight, float(eps) if is_number else eps if is_symbol else 0.0, _width(h), problem)


def _width(node: Node) -> int:
    return (static_int(shape_of(node)[-1]) if shape_of(node) else None) or 1


def find_gated_norm_call(view: GraphView, top: Peeled) -> GatedNorm | None:
    """A gated norm in one call at ``top``: vLLM's, or an opaque one, which comes with its problem."""
    if qualified_op_name(top.node) == VLLM_GATED_NORM:
        return _read_vllm(view, top)
    call = _opaque_call(view, top.node)
    if call is None:
        return None
    node, name = call
    operands = _operands_like(node, top.node)
    if not operands:
        return None
    x, gate = operands[0], operands[min(1, len(operands) - 1)]
    return _gated_norm(view, top, x, gate, norm_size=_width(x), problem=opaque_miss(node, name))


def _read_vllm(view: GraphView, top: Peeled) -> GatedNorm | None:
    arguments = {name: view.current(value, top.node) for name, value in op_arguments(top.node).items()}
    x, gate, eps = arguments["x"], arguments["z"], arguments["eps"]
    if tensor_of(x) is None or tensor_of(gate) is None:
        return None  # without a gate it is a plain norm
    activation = _ACTIVATIONS.get(str(arguments["activation"]))
    problem = None
    if activation is None:
        actual, advice = str(arguments["activation"]), "a gate of another activation stays as it is"
        problem = Miss("norm", Reason.ACTIVATION, top.node, "silu or sigmoid of the gate", actual, advice)
    if not top.is_expressible or dtype_of(top.node) is not dtype_of(x):
        actual = " then ".join(dtype_name(dtype) for dtype in top.dtypes)
        problem = problem or Miss("norm", Reason.ROUNDING, top.node, "one rounding", actual, "cast once")
    return _gated_norm(
        view, top, x, gate,
        weight=arguments["weight"], eps=float(eps) if isinstance(eps, int | float) else eps, problem=problem,
        norm_size=arguments["group_size"] or _width(x), norm_before_gate=arguments["norm_before_gate"],
        activation=activation or "silu",
    )  # fmt: skip


def _gated_norm(view: GraphView, top: Peeled, x: Node, gate: Node, **facts: Any) -> GatedNorm:
    value, gates = peel_exact(view, x), peel_exact(view, gate)
    weight = facts.pop("weight", None)
    vector = peel_exact(view, weight) if tensor_of(weight) is not None else None
    rounding = next((dtype for dtype in top.dtypes if dtype in LOW_PRECISION), None)
    defaults = {"eps": 0.0, "activation": "silu", "norm_before_gate": True}
    return GatedNorm(
        x=value.node,
        gate=gates.node,
        weight=vector.node if vector else None,
        bias=None,
        output=top.node,
        weight_offset=0.0,
        roundings=() if rounding is None else (f"output:{dtype_name(rounding)}",),
        path=(*top.trail, top.node),
        interior=frozenset({*top.trail, top.node, *value.trail, *gates.trail, *(vector.trail if vector else ())}),
        **{**defaults, **facts},
    )


def opaque_miss(node: Node, name: str) -> Miss:
    return Miss(
        "norm", Reason.OPAQUE_NORM, node, "a norm whose operations are seen", f"a call of {name}", _OPAQUE_ADVICE
    )


def _opaque_call(view: GraphView, node: Node) -> tuple[Node, str] | None:
    """The call that gave ``node``, if its name says gated norm: an op, an autograd function, a Triton launch."""
    op = view.op(node)
    if op.name == "item" and isinstance(op.get("input"), Node):
        node = op.args["input"]
    if op.name in CREATIONS:  # a buffer that a launch fills
        launches = [user for user in node.users if _is_launch(user)]
        node = launches[0] if launches else node
    name = callee_name(node)
    return (node, name) if name is not None and _GATED_NORM_NAME.search(name) else None


def names_gated_norm(node: Node) -> bool:
    """True for a call whose inside cannot be seen and whose name says gated norm."""
    if node.op != "call_function":
        return False
    name = callee_name(node)
    return name is not None and name != VLLM_GATED_NORM and _GATED_NORM_NAME.search(name) is not None


def _is_launch(node: Node) -> bool:
    return getattr(node.target, "__name__", "") == "triton_kernel_wrapper_mutation"


def callee_name(node: Node) -> str | None:
    """What an opaque call calls: the op, the kernel, or, of an autograd function, the module that it stands in."""
    name = qualified_op_name(node)
    if name is not None:
        return None if name.startswith(("aten::", _OWN)) else name
    if _is_launch(node):
        from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

        kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])  # type: ignore[arg-type]
        return str(getattr(kernel, "__name__", ""))
    if getattr(node.target, "__name__", "") != "autograd_function_apply":
        return None
    modules = list(node.meta.get("nn_module_stack", {}).values())
    return str(getattr(modules[-1][1], "__name__", modules[-1][1])) if modules else None


def _operands_like(node: Node, result: Node | None = None) -> list[Node]:
    """The floating-point operands of as many values as the result, in the order in which they are given."""
    tensor = tensor_of(result or node)
    operands = [operand for operand in node.all_input_nodes if dtype_of(operand) in (*LOW_PRECISION, torch.float32)]
    if tensor is None:
        return []
    same = [
        operand
        for operand in operands
        if same_shape(shape_of(operand), tuple(tensor.shape)) or _same_count(operand, tensor)
    ]
    return [operand for operand in same if operand is not result]


def _same_count(operand: Node, tensor: torch.Tensor) -> bool:
    other = tensor_of(operand)
    return other is not None and same_size(other.numel(), tensor.numel())
