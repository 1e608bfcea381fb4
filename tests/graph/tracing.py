"""A quick stand-in for Dynamo: the graph of a plain function, with the fake values that Dynamo would leave on it.

``torch.fx`` records calls as they are spelt, which is what Dynamo's graph holds too, and the values come from running
the graph on meta tensors (on fake ones where sizes are symbolic) that share memory as the real inputs do. That is
some thirty times faster than Dynamo.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node, Proxy
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.fx.proxy import GraphAppendingTracer


class _KeepValues(Interpreter):
    """Runs a graph and leaves every value on its node."""

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = value
        return value


def trace(
    function: Callable[..., Any], inputs: Sequence[Any], dynamic_dims: dict[int, tuple[int, ...]] | None = None
) -> GraphModule:
    """The graph of ``function(*inputs)``.

    Args:
        inputs: tensors and ints.
        dynamic_dims: for the inputs of these indices the dims that are symbolic; each symbol is a placeholder of its
            own in front of the inputs, as in Dynamo's graph, so that the module is called as ``gm(*symbols, *inputs)``.
    """
    dynamic_dims = dynamic_dims or {}
    mode: Any
    if dynamic_dims:
        mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        fakes = [_fake(mode, value, index, dynamic_dims.get(index, ())) for index, value in enumerate(inputs)]
    else:
        mode, fakes = nullcontext(), [_meta(value) for value in inputs]
    symbols = _symbols(fakes)
    graph = Graph()
    tracer = GraphAppendingTracer(graph)
    for name in symbols:
        graph.placeholder(name)
    arguments = [Proxy(graph.placeholder(f"input_{index}"), tracer) for index in range(len(inputs))]
    result = function(*arguments)
    graph.output(_unwrap(result))
    gm = GraphModule(torch.nn.Module(), graph)
    with mode, torch.no_grad():
        _KeepValues(gm).run(*symbols.values(), *fakes)
    return gm


def call(function: Callable[..., Any], *arguments: Any) -> Any:
    """``function(*arguments)``, recorded as it is: a Proxy knows neither ``v[0] = 1`` nor ``v += 1``."""
    proxy = next((argument for argument in arguments if isinstance(argument, Proxy)), None)
    if proxy is None and function is operator.setitem:  # which Dynamo knows as a statement alone
        target, index, value = arguments
        target[index] = value
        return None
    if proxy is None:
        return function(*arguments)
    return proxy.tracer.create_proxy("call_function", function, arguments, {})


def symbol_values(inputs: Sequence[Any], dynamic_dims: dict[int, tuple[int, ...]]) -> list[int]:
    """What to pass for the symbols in front of ``inputs``: the sizes of the dynamic dims, in order."""
    return [inputs[index].shape[dim] for index, dims in dynamic_dims.items() for dim in dims]


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    size = value.untyped_storage().nbytes() // value.element_size()
    return torch.empty(size, dtype=value.dtype, device="meta").as_strided(
        value.shape, value.stride(), value.storage_offset()
    )


def _fake(mode: FakeTensorMode, value: Any, index: int, dims: tuple[int, ...]) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [DimDynamic.DYNAMIC if dim in dims else DimDynamic.STATIC for dim in range(value.dim())]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(value, symbolic_context=context, source=ConstantSource(f"input_{index}"))


def _symbols(fakes: Sequence[Any]) -> dict[str, torch.SymInt]:
    sizes: list[Any] = [size for fake in fakes if isinstance(fake, torch.Tensor) for size in fake.shape]
    return {str(size): size for size in sizes if isinstance(size, torch.SymInt)}


def _unwrap(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(_unwrap, value))
    return value.node if isinstance(value, Proxy) else value
