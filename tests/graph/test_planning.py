"""What is decided behind the matcher: a kernel for each site, or the reason why it has none."""

from __future__ import annotations

import pytest
import torch
from torch.fx import Graph

from gdn_backend.fusion.match import Reason
from gdn_backend.options import Settings
from gdn_backend.planning import plan_sites
from tests.graph.harness import capture, find_node
from tests.graph.sites import make_inputs, site


def captured() -> Graph:
    with torch.no_grad():
        return capture(site(), *make_inputs()).graph


def test_a_kernel_is_chosen() -> None:
    plan = plan_sites(captured(), Settings())
    assert [choice.kernel for _, choice in plan.chosen] == ["reference"]
    assert plan.missed == []


@pytest.mark.parametrize(
    ("settings", "reason", "actual", "kernel_reason"),
    [
        (Settings(kernel="triton"), Reason.KERNEL, "Triton: the tensors are on cpu", "Triton: the tensors are on cpu"),
        (Settings(enabled=False), Reason.DISABLED, "False", "would have been reference"),
    ],
    ids=["a kernel that does not take it", "turned off"],
)
def test_no_kernel(settings: Settings, reason: Reason, actual: str, kernel_reason: str) -> None:
    graph = captured()
    before = str(graph)
    plan = plan_sites(graph, settings)
    ((miss, told),) = plan.missed
    assert plan.chosen == []
    assert (miss.reason, miss.actual, told) == (reason, actual, kernel_reason)
    assert miss.node is find_node(graph, "to_2")
    assert "gdn." in miss.advice
    assert miss.facts is not None
    assert str(graph) == before
