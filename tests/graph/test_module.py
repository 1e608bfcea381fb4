"""Copies of a Dynamo module's graphs: nothing lost in the copy, nothing half done in the module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from gdn_backend.graph.module import GraphCopy, copy_graphs, swap_in
from tests.qwen_site import make_inputs, make_site


def capture(model: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
    captured: list[GraphModule] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        captured.append(gm)
        return gm.forward

    with torch.no_grad():
        torch.compile(model, backend=keep, fullgraph=True)(*inputs)
    return captured[0]


def test_a_copy_has_all_that_the_original_has() -> None:
    gm = capture(make_site(), *make_inputs())
    (item,) = copy_graphs(gm)
    assert item.module is gm
    assert item.graph is not gm.graph
    for old, new in zip(gm.graph.nodes, item.graph.nodes, strict=True):
        assert new is not old
        assert (new.name, new.op, new.target, new.meta) == (old.name, old.op, old.target, old.meta)
        assert new.meta is not old.meta
    sources = [[node._dynamo_source for node in graph.find_nodes(op="placeholder")] for graph in (gm.graph, item.graph)]
    assert sources[0] == sources[1]
    assert len(sources[0]) == 3


def test_bodies_of_checkpoints_are_copied_too() -> None:
    site = make_site()

    def model(x: torch.Tensor, gate: torch.Tensor) -> Any:
        first = torch.utils.checkpoint.checkpoint(site, x, gate, use_reentrant=False)
        return first, torch.utils.checkpoint.checkpoint(site, gate, x, use_reentrant=False)

    copies = copy_graphs(capture(model, *make_inputs()))
    with_norm = [any(node.target is torch.rsqrt for node in item.graph.nodes) for item in copies]
    assert with_norm == [False, True, True]


def test_swapping_in_and_back() -> None:
    gm = capture(make_site(), *make_inputs())
    original, code = gm.graph, gm.code
    copies = copy_graphs(gm)
    before = swap_in(copies)
    assert gm.graph is copies[0].graph
    assert gm.code == code
    swap_in(before)
    assert gm.graph is original


def test_a_swap_that_fails_half_way_is_undone() -> None:
    gm, other = (capture(make_site(), *make_inputs()) for _ in range(2))
    originals = (gm.graph, other.graph)
    broken = GraphCopy(other, "not a graph")  # type: ignore[arg-type]
    with pytest.raises(AssertionError):
        swap_in([*copy_graphs(gm), broken])
    assert (gm.graph, other.graph) == originals
