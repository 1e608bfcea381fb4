"""Runs the passes on what Dynamo captures and holds the rewritten graph, interpreted, against eager.

No Inductor: a graph is captured, its reshapes are folded, its sites are found and fused with the kernel ``reference``,
and the result runs operation by operation, so that results are compared byte by byte.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from gdn_backend.fusion.match import Match, Miss, Reason
from gdn_backend.fusion.rules import find_sites
from gdn_backend.graph.canonical import qualified_op_name, spelled_name
from gdn_backend.graph.module import copy_graphs, swap_in
from gdn_backend.graph.reshape import fold_reshapes
from gdn_backend.graph.rewrite import fuse_sites
from gdn_backend.graph.shapes import tensor_of

FUSED_OP = "gdn_backend::gated_rmsnorm_fp8_quant"
FP8 = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


@dataclass
class Passes:
    """What the passes did to the captured graphs, and to the graphs that these call."""

    group_sizes: frozenset[int] = frozenset({128})
    graphs: list[GraphModule] = field(default_factory=list)
    before: list[str] = field(default_factory=list)  # each graph as text: after folding, before fusing
    matches: list[Match] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    folded: int = 0
    captures: int = 0

    def backend(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A Dynamo backend: fuses ``gm`` in place and runs it as it is."""
        self.captures += 1
        copies = copy_graphs(gm)
        for item in copies:
            self.folded += fold_reshapes(item.graph)
            item.graph.lint()
            self.before.append(str(item.graph))
            found = find_sites(item.graph, group_sizes=self.group_sizes)
            self.matches += found.matches
            self.misses += found.misses
            fuse_sites(item.graph, ((match, "reference") for match in found.matches))
            item.graph.lint()
        swap_in(copies)
        self.graphs += [item.module for item in copies]
        return gm.forward


@dataclass(frozen=True)
class Outcome:
    """The passes' doings, and what eager and the rewritten graph gave: results, then everything they could write to."""

    passes: Passes
    expected: list[Any]
    actual: list[Any]

    @property
    def miss(self) -> Miss:
        assert len(self.passes.misses) == 1, self.passes.misses
        return self.passes.misses[0]

    @property
    def match(self) -> Match:
        assert len(self.passes.matches) == 1, self.passes.misses or "no anchor was found"
        return self.passes.matches[0]

    def nodes(self) -> Iterable[Node]:
        return (node for gm in self.passes.graphs for node in gm.graph.nodes)

    def count(self, name: str) -> int:
        """Nodes left in the graphs that call ``name`` (``"rsqrt"``, ``"mul_"``, ``"namespace::op"``)."""
        return sum(name in (spelled_name(node), qualified_op_name(node)) for node in self.nodes())


def run(
    model: Callable[..., Any],
    *inputs: Any,
    dynamic: bool | None = False,
    group_sizes: Iterable[int] = (128,),
    grad: bool = False,
    also: Iterable[tuple[Any, ...]] = (),
) -> Outcome:
    """Eager and the rewritten graph on equal copies of model and inputs (copies that share memory as they do).

    ``also`` are more inputs, which may not lead to more captures than a backend that does nothing has.
    """
    expected: list[Any] = []
    actual: list[Any] = []
    passes = Passes(frozenset(group_sizes))
    torch._dynamo.reset()
    compiled_model = copy.deepcopy(model)
    compiled = torch.compile(compiled_model, backend=passes.backend, fullgraph=True, dynamic=dynamic)
    with torch.set_grad_enabled(grad):
        for arguments in (inputs, *also):
            expected += _everything(model, model, copy.deepcopy(arguments))
            actual += _everything(compiled, compiled_model, copy.deepcopy(arguments))
        if also:
            assert passes.captures == _count_captures(model, (inputs, *also), dynamic)
    return Outcome(passes, expected, actual)


def _count_captures(model: Callable[..., Any], calls: Iterable[tuple[Any, ...]], dynamic: bool | None) -> int:
    """How many graphs the calls lead to with a backend that does nothing."""
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(copy.deepcopy(model), backend=counter, fullgraph=True, dynamic=dynamic)
    for arguments in calls:
        compiled(*copy.deepcopy(arguments))
    return counter.frame_count


def _everything(call: Callable[..., Any], model: Any, arguments: tuple[Any, ...]) -> list[Any]:
    """The results, then the arguments and the model's state behind the call."""
    results = call(*arguments)
    state = list(model.state_dict().values()) if isinstance(model, nn.Module) else []
    return pytree.tree_leaves((results, arguments, state))


def assert_equals_eager(outcome: Outcome) -> None:
    """Results and everything written: equal bytes, shapes, strides and dtypes; equal need of a gradient."""
    assert len(outcome.actual) == len(outcome.expected)
    for index, (actual, expected) in enumerate(zip(outcome.actual, outcome.expected, strict=True)):
        if not isinstance(expected, torch.Tensor):
            assert actual == expected
            continue
        facts = [
            (tensor.shape, strides_of(tensor), tensor.dtype, tensor.requires_grad) for tensor in (actual, expected)
        ]
        assert facts[0] == facts[1], f"result {index}: {facts[0]}, eager's is {facts[1]}"
        assert same_bytes(actual, expected), f"result {index} differs in {_count_differences(actual, expected)} values"


def strides_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides, which say nothing where there are no values."""
    return tensor.stride() if tensor.numel() else ()


def same_bytes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, signs of zeros included; a NaN is a NaN."""
    if torch.equal(_bytes(actual), _bytes(expected)):
        return True
    if not actual.is_floating_point():
        return False
    nan, other_nan = actual.float().isnan(), expected.float().isnan()
    zero = torch.zeros((), dtype=torch.uint8)
    left, right = (_bytes_by_value(t).masked_fill(nan.reshape(-1, 1), zero) for t in (actual, expected))
    return torch.equal(nan, other_nan) and torch.equal(left, right)


def _bytes_by_value(tensor: torch.Tensor) -> torch.Tensor:
    return _bytes(tensor).view(-1, tensor.element_size())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _count_differences(actual: torch.Tensor, expected: torch.Tensor) -> int:
    return int((_bytes_by_value(actual) != _bytes_by_value(expected)).any(-1).sum())


def assert_fused(outcome: Outcome, count: int = 1, keeps: Iterable[str] = ()) -> None:
    """Exactly ``count`` sites, none missed, none of their operations left but ``keeps``, eager's results."""
    __tracebackhide__ = True
    reasons = [(miss.reason.name, miss.render()) for miss in outcome.passes.misses]
    assert not reasons, reasons
    assert len(outcome.passes.matches) == count
    assert outcome.count(FUSED_OP) == count
    leftovers = {"rsqrt", "amax", "mean", "silu", "gdn_backend::fp8_quant"} - set(keeps)
    left = [node.name for node in outcome.nodes() if {spelled_name(node), qualified_op_name(node)} & leftovers]
    left += [node.name for node in outcome.nodes() if _casts_to_fp8(node) and "fp8" not in keeps]
    assert not left, f"still in the graph: {left}"
    assert not _unused(outcome), f"matched, unused and still in the graph: {_unused(outcome)}"
    assert_equals_eager(outcome)


def _casts_to_fp8(node: Node) -> bool:
    tensor = tensor_of(node)
    names = ("to", "type", "copy_", "type_as")
    return tensor is not None and tensor.dtype in FP8 and spelled_name(node) in names


def _unused(outcome: Outcome) -> list[str]:
    replaced = {node for match in outcome.passes.matches for node in match.replaced}
    return [node.name for node in outcome.nodes() if node in replaced and not node.users]


def assert_missed(outcome: Outcome, reason: Reason, at: str) -> None:
    """One anchor, missed for ``reason`` at the node of this name or operation; nothing changed, and a user can act."""
    __tracebackhide__ = True
    assert not outcome.passes.matches, "fused"
    assert outcome.passes.misses, "no anchor was found"
    miss = outcome.miss
    assert miss.reason is reason, f"{miss.reason.name} ({miss.render()}), not {reason.name}"
    assert miss.node is not None
    assert at in (miss.node.name, spelled_name(miss.node), qualified_op_name(miss.node)), miss.render()
    assert miss.facts is not None
    assert miss.expected and miss.actual and miss.expected != miss.actual, miss.render()
    assert miss.advice, f"no advice: {miss.render()}"
    assert [str(gm.graph) for gm in outcome.passes.graphs] == outcome.passes.before
    assert_equals_eager(outcome)


def capture(model: Callable[..., Any], *inputs: Any, dynamic: bool | None = False) -> GraphModule:
    """The graph as Dynamo captures it."""
    graphs: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True, dynamic=dynamic)(*inputs)
    assert len(graphs) == 1
    return graphs[0]


def find_node(graph: Graph, name: str) -> Node:
    """The first node that calls ``name`` or is named so."""
    return next(node for node in graph.nodes if name in (node.name, spelled_name(node), qualified_op_name(node)))
