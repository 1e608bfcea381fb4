"""The passes' work grows with the graph and no faster: 20,000 nodes cost ten times what 2,000 do.

Work is counted in function calls, which other work on the machine does not change; times are what
``scripts/bench_compile.py`` measures.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from gdn_backend.backend import report_graph
from gdn_backend.options import Settings
from gdn_backend.report.model import FusionReport
from tests.graph.sites import BASE, FP8, Step, make_inputs, make_weight, run_steps
from tests.graph.tracing import call, trace

MAX_GROWTH = 1.1  # of the calls for each node

Model = Callable[..., Any]


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


def measure(model: Model, inputs: tuple[Any, ...], dynamic_dims: Any = None) -> tuple[FusionReport, float]:
    """What the backend says of the model's graph, and the calls that it took for each node."""
    gm = trace(model, inputs, dynamic_dims)
    with torch.no_grad():
        report, calls = count_calls(lambda: report_graph(gm, Settings(), 0))
    assert not report.alert
    return report, calls / report.num_nodes


def widened(codes: Any, scale: Any) -> Any:
    """x of the next site, from what the site before it quantised."""
    return (codes.view(-1, 4, 128).to(torch.bfloat16) * scale.unsqueeze(-1)).to(torch.bfloat16).view(-1, 128)


def chained_sites(count: int, **steps: Step) -> Model:
    """``count`` sites that share a gate and a weight; each reads what the one before it quantised."""

    def model(x: Any, z: Any, w: Any) -> Any:
        results = []
        for _ in range(count):
            codes, scale = run_steps({**BASE, **steps}, x, z, w)
            results += [codes, scale]
            x = widened(codes, scale)
        return results

    return model


def test_20_000_nodes_cost_ten_times_2_000() -> None:
    inputs = (*make_inputs(), make_weight())
    (small, small_calls), (large, large_calls) = (measure(chained_sites(sites), inputs) for sites in (70, 700))
    assert (small.num_nodes > 2000, large.num_nodes > 20_000) == (True, True)
    assert (small.num_fused, small.num_missed) == (70, 0)
    assert (large.num_fused, large.num_missed) == (700, 0)
    assert large_calls < MAX_GROWTH * small_calls


def one_buffer(count: int) -> Model:
    """Every site's rows go through the same buffer: nothing can be fused."""

    def model(x: Any, z: Any, w: Any) -> Any:
        buffer = torch.empty_like(x)
        return chained_sites(count, rows=lambda c: buffer.copy_(c.y).reshape(-1, 512))(x, z, w)

    return model


def residual_in_place(count: int) -> Model:
    """One tensor for the whole depth of the model, to which each layer adds."""

    def model(x: Any, z: Any, w: Any) -> Any:
        results, stream = [], x.clone()
        for _ in range(count):
            results += run_steps(BASE, stream, z, w)
            call(operator.iadd, stream, widened(*results[-2:]))
        return results

    return model


def views_of_written_memory(count: int) -> Model:
    """A chain of reshapes that may not be folded."""

    def model(x: Any, z: Any, w: Any) -> Any:
        value = x = x.clone()
        results = []
        for index in range(20 * count):
            value = value.view(-1, 64 if index % 2 else 256)
            results.append(value + 1)
        x.add_(1)
        return results

    return model


def scales_of_scales(count: int) -> Model:
    """Quantised with the same scale again and again, grown a little each time."""

    def model(x: Any, z: Any, w: Any) -> Any:
        scale, results = z.abs().amax().float() / 448.0, []
        for _ in range(20 * count):
            scale = scale * 1.01
            results.append((x / scale).to(FP8))
        return results

    return model


def sums_of_sums(count: int) -> Model:
    """Of one row each, so that any of them might be a bias; a walk up both operands would never end."""

    def model(x: Any, z: Any, w: Any) -> Any:
        value, results = x[:1], []
        for _ in range(4 * count):
            value = value + value
            scale = (value.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-6)
            results += [(value.float() / scale).to(FP8), scale]
        return results

    return model


@pytest.mark.parametrize(
    ("build", "fused"),
    [
        (one_buffer, 0),
        (residual_in_place, 1),
        (views_of_written_memory, 0),
        (scales_of_scales, 0),
        (sums_of_sums, 0),
    ],
)
def test_work_is_linear_whatever_the_graph(build: Callable[[int], Model], fused: int) -> None:
    inputs = (*make_inputs(), make_weight())
    (small, small_calls), (large, large_calls) = (measure(build(count), inputs) for count in (30, 120))
    assert (small.num_fused, large.num_fused) == (30 * fused, 120 * fused)
    assert large_calls < MAX_GROWTH * small_calls


def test_work_is_linear_where_batch_and_sequence_are_dynamic() -> None:
    """Results have both sizes, which are looked up in the graph."""
    steps: dict[str, Step] = {
        "h": lambda c: c.x.unflatten(-1, (4, 128)).float(),
        "gate": lambda c: c.z.unflatten(-1, (4, 128)).float(),
        "rows": lambda c: c.y.flatten(-2),
        "groups": lambda c: c.rows.unflatten(-1, (4, 128)),
        "result": lambda c: (c.codes.flatten(-2), c.scale.squeeze(-1)),
    }

    def build(count: int) -> Model:
        def model(x: Any, z: Any, w: Any) -> Any:
            return [value for _ in range(count) for value in run_steps({**BASE, **steps}, x, z, w)]

        return model

    inputs = (*(value.view(2, 3, 512) for value in make_inputs(6)), make_weight())
    both = {0: (0, 1), 1: (0, 1)}
    measure(build(10), inputs, both)  # the first symbols of a process fill caches
    (small, small_calls), (large, large_calls) = (measure(build(count), inputs, both) for count in (20, 100))
    assert (small.num_fused, large.num_fused) == (20, 100)
    assert large_calls < MAX_GROWTH * small_calls


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
