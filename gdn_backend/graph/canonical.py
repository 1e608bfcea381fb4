"""One view of a node, whatever its spelling.

Dynamo keeps a call as the user wrote it: ``torch.mul``, ``x * y``, ``x.mul_(y)`` and ``torch.ops.aten.mul.Tensor`` are
four targets for one operation. :class:`GraphView` turns each node into a :class:`CanonicalOp` with one name and named
arguments; patterns read nothing else. The names:

===============  =====================================================================================================
``mul add sub``  with ``input`` and ``other`` (a node or a number); two equal factors are ``square``
``div``          ``input / other``; ``const_div`` is a number over a tensor: to eager, reciprocal times number
``square rsqrt sqrt reciprocal abs exp2 log2 ceil sigmoid silu``    also as powers
``mean sum amax``  with ``dims`` (tuple of non-negative ints, or None for all) and ``keepdim``
``clamp``        with ``min`` and ``max`` (numbers, nodes or None)
``cast``         a change of dtype; ``identity`` copies or passes a value on
``reshape``      keeps the row-major order of the values: view, flatten, ``[..., None]``, axes of size one moved
``item``         an element of a tuple
``bitcast``      ``view(dtype)``
===============  =====================================================================================================

Anything else keeps its own name. In-place operations are followed: an operand names the node that last gave the tensor
its value, so ``s.div_(448); s.clamp_(min=t)`` reads as the chain it is, and filling a whole buffer passes the filled
value on.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from gdn_backend.graph.shapes import Size, same_shape, same_size, shape_of, static_int, tensor_of, value_of

_ALIASES = {
    "multiply": "mul", "imul": "mul", "rmul": "mul",
    "iadd": "add", "radd": "add",
    "subtract": "sub", "isub": "sub",
    "truediv": "div", "itruediv": "div", "divide": "div", "true_divide": "div",
    "ipow": "pow", "float_power": "float_power",
    "absolute": "abs", "clip": "clamp",
    "swish": "silu",
    "_unsafe_view": "reshape", "view_as": "view", "reshape_as": "view", "view_copy": "view",
    "expand_dims": "unsqueeze",
    "bitwise_and": "and", "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift", "not_equal": "ne",
    "moveaxis": "movedim", "swapaxes": "transpose", "swapdims": "transpose",
}  # fmt: skip

_BINARY = ("input", "other")
_REDUCTION = ("input", "dim", "keepdim", "dtype")
_PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "mul": _BINARY, "add": _BINARY, "sub": _BINARY, "div": _BINARY, "maximum": _BINARY, "minimum": _BINARY,
    "and": _BINARY, "lshift": _BINARY, "rshift": _BINARY, "ne": _BINARY,
    "pow": ("input", "exponent"),
    "mean": _REDUCTION, "sum": _REDUCTION,
    "amax": ("input", "dim", "keepdim"), "max": ("input", "dim", "keepdim"),
    "clamp": ("input", "min", "max"), "clamp_min": ("input", "min"), "clamp_max": ("input", "max"),
    "silu": ("input", "inplace"), "dropout": ("input", "p", "training", "inplace"),
    "getitem": ("input", "index"), "setitem": ("input", "index", "value"), "copy": ("input", "value"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}  # fmt: skip
_KEYWORDS = {"self": "input", "axis": "dim", "keepdims": "keepdim", "a": "input", "b": "other", "src": "value"}

_CASTS = {"to", "type", "type_as", "float", "half", "bfloat16", "double", "int", "long", "short", "char", "byte",
          "bool", "_to_copy", "clone", "contiguous", "detach", "alias", "lift_fresh_copy"}  # fmt: skip
_RESHAPES = {"view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"}
_PERMUTES = {"transpose", "permute", "t", "movedim", "mT", "T", "adjoint", "mH"}
BROADCASTS = ("expand", "expand_as", "broadcast_to")
#: Operations whose result is a tensor that nobody else has.
CREATIONS = frozenset(
    ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty", "new_zeros",
     "new_ones", "new_full", "empty_strided")
)  # fmt: skip
_READS_SHAPE = frozenset(
    ("size", "dim", "numel", "stride", "is_contiguous", "ndimension", "element_size", "nelement", "shape", "empty_like",
     "zeros_like", "ones_like", "new_empty", "new_zeros", "new_ones")
)  # fmt: skip
_TAKES_AFTER = ("expand_as", "view_as", "reshape_as", "type_as")  # of its second operand it needs no data
_POWERS = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}


@dataclass(frozen=True)
class CanonicalOp:
    """One operation: its name, its arguments by name, the node it stands at."""

    name: str
    node: Node
    args: Mapping[str, Any]

    @property
    def input(self) -> Node:
        """The first tensor operand."""
        return self.args["input"]

    def get(self, name: str, default: Any = None) -> Any:
        return self.args.get(name, default)


#: Named with an underscore because they are Python keywords, not because they write.
_KEYWORD_OPERATORS: Mapping[Any, str] = {
    operator.and_: "and", operator.or_: "or", operator.not_: "not", operator.is_: "is"
}  # fmt: skip


def spelled_name(node: Node) -> str | None:
    """The bare name of what ``node`` calls (``"mul_"``, ``"truediv"``), or None for anything but a torch operation."""
    target = node.target
    if node.op == "call_method":
        return str(target)
    if target in _KEYWORD_OPERATORS:
        return _KEYWORD_OPERATORS[target]
    if node.op != "call_function":
        return None
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name.rpartition("::")[2] if target.namespace == "aten" else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        namespace, _, name = target._qualified_op_name.partition("::")
        return name if namespace == "aten" else None
    if target is getattr:  # x.T and x.mT
        return str(node.args[1])
    module = getattr(target, "__module__", None) or ""
    self_module = getattr(getattr(target, "__self__", None), "__name__", "")
    is_ours = module.split(".")[0] in ("torch", "_operator", "operator") or self_module.startswith("torch")
    if is_ours or _is_torch(target):
        return str(getattr(target, "__name__", target))
    return None


def reads_only_shape(user: Node, value: Node) -> bool:
    """True for a user of ``value`` that looks at its sizes, strides and dtype alone: it needs no data once the graph is
    traced."""
    name = spelled_name(user)
    return name in _READS_SHAPE or (name in _TAKES_AFTER and len(user.args) == 2 and user.args[0] is not value)


def _is_torch(target: Any) -> bool:
    """Built-in functions of torch carry no module; they are attributes of these."""
    name = getattr(target, "__name__", "")
    homes = (torch, torch._C._nn, torch.nn.functional, torch.special)
    return any(getattr(home, name, None) is target for home in homes)


def qualified_op_name(node: Node) -> str | None:
    """``"namespace::name"`` of a custom op, called as packet or overload; None for anything else."""
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target._schema.name
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target._qualified_op_name
    return None


def op_arguments(node: Node) -> dict[str, Any]:
    """The arguments of a custom op by the names of its schema, defaults included; the first overload of a packet."""
    target: Any = node.target
    overload = target if isinstance(target, torch._ops.OpOverload) else getattr(target, target.overloads()[0])
    parameters = overload._schema.arguments
    bound = {parameter.name: parameter.default_value for parameter in parameters if parameter.has_default_value()}
    bound |= dict(zip((parameter.name for parameter in parameters), node.args, strict=False))
    return {**bound, **node.kwargs}


def is_inplace_name(name: str) -> bool:
    """True for ``mul_`` and for ``imul``, the function behind ``*=``."""
    if name.startswith("__"):
        return name.strip("_") in _INPLACE_OPERATORS
    return name.endswith("_") or (name in _INPLACE_OPERATORS)


_INPLACE_OPERATORS = {name for name in dir(operator) if name.startswith("i") and hasattr(operator, f"__{name}__")} - {
    "index", "inv", "invert"
}  # fmt: skip


class GraphView:
    """The canonical view of one graph, built once; the graph must not change while it is read."""

    def __init__(self, graph: Graph) -> None:
        self.nodes: list[Node] = list(graph.nodes)
        self.position: dict[Node, int] = {node: index for index, node in enumerate(self.nodes)}
        self._ops: dict[Node, CanonicalOp] = {}
        self._root: dict[Node, Node] = {}  # in-place result -> the node that made the tensor
        self._versions: dict[Node, list[Node]] = {}  # root -> the in-place results on it, in order
        self._readers: dict[Node, list[Node]] | None = None
        for node in self.nodes:
            written = overwritten_operand(node)
            if written is not None:
                root = self._root.get(written, written)
                # Dynamo leaves a setitem without a value; to its readers it is the tensor that it filled.
                if tensor_of(node) is None:
                    node.meta["example_value"] = tensor_of(written)
                self._root[node] = root
                self._versions.setdefault(root, []).append(node)

    def op(self, node: Node) -> CanonicalOp:
        """The canonical operation of ``node``."""
        found = self._ops.get(node)
        if found is None:
            found = self._ops[node] = _canonicalise(self, node)
        return found

    def forget(self, node: Node) -> None:
        """Reads ``node`` anew at the next call of :meth:`op`, after its target or arguments were changed."""
        self._ops.pop(node, None)

    def family(self, node: Node) -> tuple[Node, ...]:
        """The node that made the tensor ``node`` holds, and every in-place result on it, in program order."""
        root = self._root.get(node, node)
        return (root, *self._versions.get(root, ()))

    def readers(self, node: Node) -> Sequence[Node]:
        """The users that see the value of ``node``: an in-place result is also read through the tensor it overwrote."""
        if self._readers is None:  # all at once: a tensor that every layer writes to has a family as long as the graph
            self._readers = {}
            for user in self.nodes:
                for value in dict.fromkeys(self.current(operand, user) for operand in user.all_input_nodes):
                    self._readers.setdefault(value, []).append(user)
        return self._readers.get(node, ())

    def current(self, value: Any, reader: Node) -> Any:
        """The node that gave ``value``, a node, the contents that ``reader`` sees; numbers come back as they are."""
        if not isinstance(value, Node):
            return value
        root = self._root.get(value, value)
        versions = self._versions.get(root)
        if not versions:
            return value
        index = bisect_left(versions, self.position[reader], key=self.position.__getitem__)
        return versions[index - 1] if index else root


def overwritten_operand(node: Node) -> Node | None:
    """The tensor whose every element ``node`` replaces in place, or None.

    That is an in-place pointwise operation, ``copy_``, and ``setitem`` over the whole tensor. Other writes (``out=``,
    partial ``setitem``, custom ops) are writes for :mod:`gdn_backend.graph.effects`, but no value that can be followed.
    """
    name = spelled_name(node)
    if name is None or not node.args or not isinstance(node.args[0], Node):
        return None
    operand = node.args[0]
    if tensor_of(operand) is None:
        return None
    if name == "setitem":
        return operand if _covers_whole(operand, node.args[1], node.args[2]) else None
    if is_inplace_name(name) or _flag(node, "inplace", 1, name in ("silu",)):
        return operand
    return None


def _flag(node: Node, keyword: str, position: int, known: bool) -> bool:
    if node.kwargs.get(keyword) is True:
        return True
    return known and len(node.args) > position and node.args[position] is True


def _covers_whole(tensor: Node, index: Any, value: Any) -> bool:
    shape = shape_of(tensor)
    source = tensor_of(value)
    index = index if isinstance(index, tuple) else (index,)
    if source is None or not same_shape(tuple(source.shape), shape):
        return False
    return _is_full_index(index, shape)


def _is_full_index(index: tuple[Any, ...], shape: tuple[Any, ...]) -> bool:
    """True where an index of slices and ellipses takes everything."""
    dims = iter(shape)
    for entry in index:
        if entry is Ellipsis:
            return all(item == slice(None) for item in index[index.index(Ellipsis) + 1 :] if item is not None)
        if entry is None:
            continue
        if not isinstance(entry, slice):
            return False
        size = next(dims)
        stop = value_of(entry.stop) if isinstance(entry.stop, Node) else entry.stop
        if entry.start not in (None, 0) or entry.step not in (None, 1):
            return False
        if stop is not None and not same_size(stop, size):
            return False
    return True


def _canonicalise(view: GraphView, node: Node) -> CanonicalOp:
    name = spelled_name(node)
    if name is None:
        return CanonicalOp(str(node.target), node, {})
    bare = name[:-1] if name.endswith("_") and not name.startswith("__") else name
    if bare.startswith("__") and bare.endswith("__"):
        bare = bare[2:-2]
    bare = _ALIASES.get(bare, bare)
    args = {key: view.current(value, node) for key, value in _bind(bare, node).items()}
    refine = _REFINEMENTS.get(bare)
    if refine is not None:
        return refine(node, bare, args)
    return CanonicalOp(bare, node, args)


def _bind(name: str, node: Node) -> dict[str, Any]:
    parameters = _PARAMETERS.get(name, ("input",))
    bound = dict(zip(parameters, node.args, strict=False))
    if len(node.args) > len(parameters):
        bound["rest"] = node.args[len(parameters) :]
    for key, value in node.kwargs.items():
        bound[_KEYWORDS.get(key, key)] = value
    return bound


def _refine_binary(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    left, right = args.get("input"), args.get("other")
    if args.get("rounding_mode") is not None or args.get("alpha", 1) != 1:
        return CanonicalOp(f"{name}_with_options", node, args)
    if name == "mul" and left is right:
        return CanonicalOp("square", node, {"input": left})
    if isinstance(left, Node) and tensor_of(left) is not None:
        return CanonicalOp(name, node, {"input": left, "other": right})
    if name in ("mul", "add"):  # number on the left: the operands commute
        return CanonicalOp(name, node, {"input": right, "other": left})
    if name == "div" and tensor_of(right) is not None and left == 1:
        return CanonicalOp("reciprocal", node, {"input": right})
    if name == "div" and spelled_name(node) == "truediv":  # torch.div(2.0, x) is a real division
        return CanonicalOp("const_div", node, {"input": right, "value": left})
    return CanonicalOp(f"r{name}", node, {"input": right, "other": left})


def _refine_pow(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    exponent = args.get("exponent")
    power = _POWERS.get(float(exponent)) if isinstance(exponent, int | float) else None
    return CanonicalOp(power or "pow", node, args)


def _refine_extremum(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    """``maximum(x, 1e-4)`` and ``max(x, y)`` are clamps; ``max(x, dim)`` is a reduction with two results."""
    bound = args.get("other", args.get("dim"))
    if name in ("maximum", "minimum") or (name == "max" and tensor_of(bound) is not None):
        side = "min" if name in ("maximum", "max") else "max"
        return CanonicalOp("clamp", node, {"input": args["input"], side: bound})
    return _refine_reduction(node, "max_with_indices" if "dim" in args else "amax", args)


def _refine_clamp(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    bounds = {"min": args.get("min"), "max": args.get("max")}
    return CanonicalOp("clamp", node, {"input": args["input"], **bounds})


def _refine_reduction(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    ndim = len(shape_of(args["input"]))
    dims = args.get("dim")
    if dims is not None:
        dims = dims if isinstance(dims, tuple | list) else (dims,)
        dims = tuple(sorted(dim % ndim if ndim else dim for dim in dims)) or None
    return CanonicalOp(name, node, {"input": args["input"], "dims": dims, "keepdim": bool(args.get("keepdim", False))})


def _refine_cast(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    source, result = tensor_of(args.get("input")), tensor_of(node)
    if source is None or result is None or source.device != result.device:
        return CanonicalOp(f"{name}_across", node, args)
    if source.requires_grad and name == "detach":  # the end of the gradient's way is no copy to look through
        return CanonicalOp(name, node, args)
    kind = "identity" if source.dtype == result.dtype else "cast"
    return CanonicalOp(kind, node, {"input": args["input"]})


def _refine_dropout(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    is_off = args.get("training", args.get("train", True)) is False
    return CanonicalOp("identity", node, {"input": args["input"]}) if is_off else CanonicalOp(name, node, args)


def _refine_view(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    rest = args.get("rest", ())
    if any(isinstance(value, torch.dtype) for value in (*rest, args.get("dtype"))):
        return CanonicalOp("bitcast", node, {"input": args["input"]})
    return CanonicalOp("reshape", node, {"input": args["input"]})


def _refine_permute(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    """A permutation that only moves axes of size one keeps the row-major order."""
    source, result = tensor_of(args.get("input")), tensor_of(node)
    if source is None or result is None:
        return CanonicalOp(name, node, args)
    # Equal sizes do not show which axis went where, equal strides do: axes of size one aside, both must agree.
    before, after = _axes(source), _axes(result)
    kept = len(before) == len(after) and all(
        same_size(a[0], b[0]) and same_size(a[1], b[1]) for a, b in zip(before, after, strict=True)
    )
    return CanonicalOp("reshape" if kept else "permute", node, {"input": args["input"]})


def _axes(tensor: torch.Tensor) -> list[tuple[Size, Size]]:
    """Size and stride of every axis of more than one value."""
    return [axis for axis in zip(tensor.shape, tensor.stride(), strict=True) if static_int(axis[0]) != 1]


def _refine_getitem(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    source, index = args.get("input"), args.get("index")
    tensor = tensor_of(source)
    if tensor is None:
        return CanonicalOp("item", node, args)
    index = index if isinstance(index, tuple) else (index,)
    basic = all(entry is None or entry is Ellipsis or isinstance(entry, slice) for entry in index)
    if basic and _is_full_index(index, tuple(tensor.shape)):
        return CanonicalOp("reshape", node, {"input": source})
    return CanonicalOp("slice", node, args)


def _refine_assign(node: Node, name: str, args: dict[str, Any]) -> CanonicalOp:
    """A buffer filled as a whole holds the value it was filled with."""
    target, source = tensor_of(args.get("input")), tensor_of(args.get("value"))
    whole = target is not None and source is not None and same_shape(tuple(target.shape), tuple(source.shape))
    if not whole or (name == "setitem" and overwritten_operand(node) is None):
        return CanonicalOp(name, node, args)
    assert target is not None
    assert source is not None
    same = target.dtype == source.dtype
    return CanonicalOp("identity" if same else "cast", node, {"input": args["value"]})


_REFINEMENTS: dict[str, Callable[[Node, str, dict[str, Any]], CanonicalOp]] = {
    **dict.fromkeys(("mul", "add", "sub", "div"), _refine_binary),
    "pow": _refine_pow,
    **dict.fromkeys(("maximum", "minimum", "max"), _refine_extremum),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _refine_clamp),
    **dict.fromkeys(("mean", "sum", "amax"), _refine_reduction),
    **dict.fromkeys(_CASTS, _refine_cast),
    **dict.fromkeys(_RESHAPES, _refine_view),
    **dict.fromkeys(_PERMUTES, _refine_permute),
    "getitem": _refine_getitem,
    "dropout": _refine_dropout,
    **dict.fromkeys(("setitem", "copy"), _refine_assign),
}
