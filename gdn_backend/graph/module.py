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
    """Copies of the graph of ``gm`` and of every graph it calls: bodies of checkpoints and other higher-order calls."""
    return [GraphCopy(module, copy_graph(module)) for module in _called_modules(gm, seen=set())]


def copy_graph(module: GraphModule) -> Graph:
    """A copy with equal node names and metadata, and what Dynamo keeps on the nodes besides (the inputs' sources)."""
    original = module.graph
    graph = copy.deepcopy(original)
    graph.owning_module = module
    for old, new in zip(original.nodes, graph.nodes, strict=True):
        vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
    return graph


def swap_in(copies: Iterable[GraphCopy]) -> list[GraphCopy]:
    """Gives each module its copy and returns what they had; if one of them fails, all have their own graphs again."""
    originals: list[GraphCopy] = []
    try:
        for item in copies:
            originals.append(GraphCopy(item.module, item.module.graph))
            item.module.graph = item.graph
    except Exception:
        for item in originals:
            item.module.graph = item.graph
        raise
    return originals


def _called_modules(gm: GraphModule, seen: set[int]) -> Iterator[GraphModule]:
    if id(gm) in seen:
        return
    seen.add(id(gm))
    yield gm
    for node in gm.graph.find_nodes(op="get_attr"):
        value: object = gm
        for name in str(node.target).split("."):
            value = getattr(value, name, None)
        if isinstance(value, GraphModule):
            yield from _called_modules(value, seen)
