"""What the metadata of a Dynamo node says of its value, read without ever installing a guard."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.functions import FloorDiv

Size = int | torch.SymInt


def value_of(node: Node) -> Any:
    """The fake value Dynamo recorded for ``node`` (a fake tensor, a tuple, a SymInt, ...), or None."""
    return node.meta.get("example_value", node.meta.get("val"))


def tensor_of(node: object) -> torch.Tensor | None:
    """The fake tensor of ``node``, or None where it is not a node or its value is not a tensor."""
    if not isinstance(node, Node):
        return None
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def shape_of(node: Node) -> tuple[Size, ...]:
    """The shape of a node that holds a tensor; symbolic sizes stay symbolic."""
    tensor = tensor_of(node)
    assert tensor is not None, f"{node.name} does not hold a tensor"
    return tuple(tensor.shape)


def static_int(size: Size) -> int | None:
    """``size`` as a plain int where it is one whatever the inputs, else None.

    A view of s rows of 128 as ``(-1, 4, 128)`` has a last axis of ``32 * (s // (s // 4))``, which is 128 for every s
    that the view takes: the size that it has for the traced inputs is tried (a hint installs no guard).
    """
    if isinstance(size, int):
        return size
    expression = size.node.expr
    if expression.is_number:
        return int(expression)
    hint = size.node.hint if expression.has(FloorDiv) else None
    return hint if isinstance(hint, int) and statically_known_true(size == hint) else None


def same_size(left: Size, right: Size) -> bool:
    """True where the two sizes are known to be equal; an unknown answer is False."""
    if isinstance(left, int) and isinstance(right, int):
        return left == right
    return statically_known_true(left == right)


def same_shape(left: tuple[Size, ...], right: tuple[Size, ...]) -> bool:
    """True where the two shapes are known to be equal."""
    return len(left) == len(right) and all(map(same_size, left, right))


def contiguous_strides(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    """Row-major strides of ``shape``; PyTorch counts an axis of no values as one of one."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step if static_int(size) == 0 else step * size
    return tuple(reversed(strides))


def is_contiguous(tensor: torch.Tensor) -> bool:
    """True where ``tensor`` is known to be row-major; strides of dimensions of size one do not matter."""
    shape = tuple(tensor.shape)
    if any(static_int(size) == 0 for size in shape):
        return True
    return all(
        static_int(size) == 1 or same_size(stride, expected)
        for size, stride, expected in zip(shape, tensor.stride(), contiguous_strides(shape), strict=True)
    )


def is_row_major(tensor: torch.Tensor) -> bool:
    """:func:`is_contiguous` to the last stride, also of axes of size one, which permutations leave in other places."""
    return all(map(same_size, tensor.stride(), contiguous_strides(tuple(tensor.shape))))


def is_transformed(tensor: torch.Tensor) -> bool:
    """True inside ``torch.vmap``, ``torch.func.grad`` and the like, whose tensors hide axes or levels."""
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for fake tensors that share memory: Dynamo's fakes share a storage where their tensors do."""
    return tensor.untyped_storage()._cdata
