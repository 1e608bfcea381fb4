"""The passes' work grows with the graph and no faster: 20,000 nodes cost ten times what 2,000 do.

Work is counted in function calls, which other work on the machine does not change; times are what
``scripts/bench_compile.py`` measures.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gdn_backend.backend import report_graph
from gdn_backend.options import Settings
from gdn_backend.report.model import FusionReport
from tests.graph.sites import BASE, make_inputs, make_weight, run_steps
from tests.graph.tracing import trace


def count_calls(run: Callable[[], Any]) -> tuple[Any, int]:
    """What ``run`` returns, and how many function calls that took."""
    calls = 0

    def profile(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(profile)
    try:
        return run(), calls
    finally:
        sys.setprofile(None)


def graph_of_sites(count: int) -> torch.fx.GraphModule:
    """``count`` sites that share a gate and a weight; each reads what the one before it quantised."""

    def model(x: Any, z: Any, w: Any) -> Any:
        results = []
        for _ in range(count):
            codes, scale = run_steps(BASE, x, z, w)
            results += [codes, scale]
            x = (codes.view(-1, 4, 128).to(torch.bfloat16) * scale.unsqueeze(-1)).to(torch.bfloat16).view(-1, 128)
        return results

    return trace(model, (*make_inputs(), make_weight()))


def measure(count: int) -> tuple[FusionReport, int]:
    gm = graph_of_sites(count)
    with torch.no_grad():
        return count_calls(lambda: report_graph(gm, Settings(), 0))


@pytest.mark.parametrize("sites", [70])
def test_work_is_linear_in_the_nodes(sites: int) -> None:
    (small, small_calls), (large, large_calls) = measure(sites), measure(10 * sites)
    assert (small.num_nodes > 2000, large.num_nodes > 20_000) == (True, True)
    assert (small.num_fused, small.num_missed) == (sites, 0)
    assert (large.num_fused, large.num_missed) == (10 * sites, 0)
    growth = (large_calls / large.num_nodes) / (small_calls / small.num_nodes)
    assert growth < 1.1, f"{growth:.2f} times the calls for each node"


def test_a_long_sum_is_no_norm_and_no_recursion() -> None:
    def model(x: Any, z: Any, w: Any) -> Any:
        total = x.float()
        for _ in range(1500):
            total = total + w
        y = (total * torch.sigmoid(z.float())).view(-1, 4, 128)
        scale = (y.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-6)
        return (y / scale).to(torch.float8_e4m3fn), scale

    gm = trace(model, (*make_inputs(), make_weight()))
    report = report_graph(gm, Settings(), 0)
    assert (report.num_fused, report.num_missed) == (0, 0)
    assert not any("failed" in note for note in report.notes)
