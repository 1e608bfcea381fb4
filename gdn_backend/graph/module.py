"""The graphs of a Dynamo module, as copies to work on: the module changes only when all the work is done."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Graph, GraphModule


@dataclass(frozen=True)
class GraphCopy:
    """A copy of the graph of ``module``, which still has its own."""

    module: GraphModule
    graph: Graph


def copy_graphs(gm: GraphModule) -> list[GraphCopy]:
    """Copies of the graph of ``gm`` and of every graph it calls, the bodies of checkpoints and other higher-order calls."""
    return [GraphCopy(module, copy_graph(module)) for module in _called_modules(gm, seen=set())]


def copy_graph(module: GraphModule) -> Graph:
    """A copy with equal node names and metadata, and what Dynamo keeps on the nodes besides (the inputs' sources)."""
    original = module.graph
    graph = copy.deepcopy(original)
    graph.owning_module = module
    for old, new in zip(original.nodes, graph.nodes, strict=True):
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
    return graph


def swap_in(copies: Iterable[GraphCopy]) -> None:
    """Gives each module its copy; where one of them cannot be had, every module has its own graph again."""
    originals: list[tuple[GraphModule, Graph]] = []
    try:
        for item in copies:
            originals.append((item.module, item.module.graph))
            item.module.graph = item.graph
    except Exception:
        for module, graph in originals:
            module.graph = graph
        raise


def _called_modules(gm: GraphModule, seen: set[int]) -> Iterator[GraphModule]:
    if id(gm) in seen:
        return
    seen.add(id(gm))
    yield gm
    for node in gm.graph.find_nodes(op="get_attr"):
        value = gm
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        if isinstance(value, GraphModule):
            yield from _called_modules(value, seen)
