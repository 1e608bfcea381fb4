"""The ``gdn_rocm`` backend of ``torch.compile``: fold -> find -> choose -> rewrite -> lint -> report -> Inductor.

Inductor, Triton and rich are imported when a graph is compiled, not with this module.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch._dynamo.exc import RestartAnalysis, SkipFrame, Unsupported
from torch.fx import GraphModule

from gdn_backend.environment import inductor_rounds_on_cpu
from gdn_backend.graph.module import GraphCopy, copy_graphs, swap_in
from gdn_backend.graph.reshape import fold_reshapes
from gdn_backend.graph.rewrite import fuse_sites
from gdn_backend.ops.dispatch import check_requested
from gdn_backend.options import Settings, resolve_settings, unknown_variables
from gdn_backend.planning import Plan, plan_sites
from gdn_backend.report import store
from gdn_backend.report.build import report_sites
from gdn_backend.report.model import FusionReport

BACKEND_NAME = "gdn_rocm"
GRADIENTS_ENABLED = "called with gradients enabled: wrap the call in torch.no_grad()"


class NothingFusedError(RuntimeError):
    """``gdn.strict``: a graph holds a gated norm in front of an FP8 quantisation and none was fused."""


def gdn_rocm(
    gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None
) -> Any:
    """Compiles a Dynamo graph with Inductor, its gated norms fused with the FP8 quantisation behind them.

    ``mode`` and ``options`` are those of ``torch.compile``. Wrong options and a forced kernel that cannot run on this
    machine raise; a failure of the passes leaves ``gm`` as it came, is reported, and raises only under ``gdn.strict``.
    """
    settings = resolve_settings(mode, options)
    check_requested(settings.kernel)
    report, originals = _fuse_in_place(gm, settings, store.new_graph_id())
    if settings.strict:
        _check_fused(report, settings)
    compiled, report = _compile(gm, example_inputs, settings, report, originals)
    _publish(report, settings)
    return compiled


def _reset() -> None:
    """What ``torch.compiler.reset()`` asks of a backend: lets go of CUDA graphs, as ``backend="inductor"`` does."""
    if "torch._inductor.cudagraph_trees" in sys.modules:
        from torch._inductor.cudagraph_trees import reset_cudagraph_trees

        reset_cudagraph_trees()


gdn_rocm.reset = _reset  # type: ignore[attr-defined]  # torch looks for it on the function


def register() -> None:
    """Makes the name "gdn_rocm" known where the package is on the path but not installed, so has no entry point."""
    from torch._dynamo import list_backends, register_backend

    if BACKEND_NAME not in list_backends():
        register_backend(gdn_rocm, name=BACKEND_NAME)


def report_graph(gm: GraphModule, settings: Settings, graph_id: int) -> FusionReport:
    """What the backend would say of ``gm``, which stays as it is."""
    try:
        return _fuse_copies(gm, settings, graph_id)[0]
    except Exception as error:
        return _failure(gm, graph_id, "a pass failed", error)


def _fuse_in_place(gm: GraphModule, settings: Settings, graph_id: int) -> tuple[FusionReport, list[GraphCopy]]:
    """Fuses what can be fused in ``gm``; returns the report and the graphs that were replaced, for taking it all back.

    After a failure ``gm`` is as it came, and the report says so.
    """
    try:
        report, changed = _fuse_copies(gm, settings, graph_id)
        return report, swap_in(changed)
    except Exception as error:
        if settings.strict:
            raise
        return _failure(gm, graph_id, "a pass failed", error), []


def _fuse_copies(gm: GraphModule, settings: Settings, graph_id: int) -> tuple[FusionReport, list[GraphCopy]]:
    """The passes, on copies of the graphs of ``gm``; returns the report, and the copies that were changed."""
    clock = _Clock()
    copies = copy_graphs(gm)
    with clock.time("fold"):
        folded = [fold_reshapes(copy.graph) for copy in copies]
    with clock.time("match"):
        plans = [plan_sites(copy.graph, settings) for copy in copies]
    report = _report(graph_id, copies, plans, sum(folded) if settings.enabled else 0)
    with clock.time("rewrite"):
        for copy, plan in zip(copies, plans, strict=True):
            fuse_sites(copy.graph, ((match, choice.kernel) for match, choice in plan.chosen))
            copy.graph.lint()
    is_changed = [settings.enabled and bool(plan.chosen or count) for plan, count in zip(plans, folded, strict=True)]
    changed = [copy for copy, is_new in zip(copies, is_changed, strict=True) if is_new]
    return replace(report, timings_ms=clock.milliseconds()), changed


def _report(graph_id: int, copies: list[GraphCopy], plans: list[Plan], folded: int) -> FusionReport:
    """The report but for its timings; made before the rewrite, while every node is still in its graph."""
    sites = [
        site
        for copy, plan in zip(copies, plans, strict=True)
        for site in report_sites(copy.graph, plan.chosen, plan.missed)
    ]
    alert = GRADIENTS_ENABLED if any(site.reason == "REQUIRES_GRAD" for site in sites) else ""
    notes = [alert] if alert else []
    notes += [f"environment variable {name} is set but no option reads it" for name in unknown_variables()]
    notes += [note for plan in plans for note in plan.notes]
    return FusionReport(
        graph_id=graph_id,
        num_nodes=sum(len(copy.module.graph.nodes) for copy in copies),
        folded_reshapes=folded,
        sites=tuple(sites),
        notes=tuple(dict.fromkeys(notes)),
        alert=alert,
    )


def _failure(gm: GraphModule, graph_id: int, what: str, error: Exception) -> FusionReport:
    alert = f"{what}, so the graph is compiled as it came: {type(error).__name__}: {error}"
    return FusionReport(graph_id, len(gm.graph.nodes), notes=(alert,), alert=alert)


def _publish(report: FusionReport, settings: Settings) -> None:
    from gdn_backend.report.render import show

    store.add_report(report)
    show(report, settings.report)


def _check_fused(report: FusionReport, settings: Settings) -> None:
    """Raises NothingFusedError where there was something to fuse and nothing was, unless fusion is turned off."""
    if settings.enabled and report.sites and not report.num_fused:
        _publish(report, settings)
        raise NothingFusedError("; ".join(f"{site.module or site.source}: {site.detail}" for site in report.sites))


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    settings: Settings,
    report: FusionReport,
    originals: list[GraphCopy],
) -> tuple[Any, FusionReport]:
    """Inductor's result for ``gm``, or for its ``originals`` where Inductor fails on what the passes made of it."""
    try:
        return _run_inductor(gm, example_inputs, settings, report), report
    except (RestartAnalysis, SkipFrame, Unsupported):
        raise  # Dynamo's own signals: it traces the frame again, or leaves it to eager
    except Exception as error:
        if settings.strict or not originals:
            raise
        swap_in(originals)
        report = _failure(gm, report.graph_id, "Inductor failed on the fused graph", error)
    return _run_inductor(gm, example_inputs, settings, report), report


def _run_inductor(gm: GraphModule, example_inputs: Sequence[Any], settings: Settings, report: FusionReport) -> Any:
    """Inductor keeps fp32 between the ops that it fuses, which is not eager's result.

    On the CPU ``emulate_precision_casts`` makes it round where the graph does, in a torch that has that; on a GPU each
    site rounds in its own kernel.
    """
    from torch._inductor.compile_fx import compile_fx

    patches = dict(settings.inductor)
    is_on_cpu = any(site.status == "fused" and site.device == "cpu" for site in report.sites)
    if is_on_cpu and inductor_rounds_on_cpu():
        patches.setdefault("emulate_precision_casts", True)
    return compile_fx(gm, list(example_inputs), config_patches=patches)


class _Clock:
    """Milliseconds of named passes, and since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._spent: dict[str, float] = {}

    @contextmanager
    def time(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._spent[name] = (time.perf_counter() - start) * 1e3

    def milliseconds(self) -> dict[str, float]:
        spent = {**self._spent, "total": (time.perf_counter() - self._start) * 1e3}
        return {name: round(value, 3) for name, value in spent.items()}
