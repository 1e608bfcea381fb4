"""Reports: what they hold, how they are kept, how they look. Graphs are captured, none is compiled."""

from __future__ import annotations

import gc
import io
import json
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import gdn_backend
from gdn_backend import backend
from gdn_backend.backend import report_graph
from gdn_backend.options import Settings
from gdn_backend.report import store
from gdn_backend.report.model import FusionReport
from gdn_backend.report.render import print_reports, show
from tests import qwen_site
from tests.qwen_site import GatedNorm, make_inputs, make_site

SITE_FIELDS = (
    "status reason detail module source num_heads head_dim group_size granularity eps eps_symbolic activation "
    "norm_before_gate roundings scale_format fp8_dtype sink kernel kernel_reason"
).split()


def line_of(text: str) -> str:
    """``"qwen_site.py:25"`` for the line of that file that holds ``text``."""
    lines = Path(qwen_site.__file__).read_text().splitlines()
    return f"qwen_site.py:{1 + next(number for number, line in enumerate(lines) if text in line)}"


@torch.no_grad()
def capture(model: Callable[..., Any], *inputs: torch.Tensor, **settings: Any) -> FusionReport:
    """The report of the one graph of ``model``."""
    reports: list[FusionReport] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        reports.append(report_graph(gm, Settings(**settings), graph_id=store.new_graph_id()))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=keep, fullgraph=True)(*inputs)
    return reports[0]


@pytest.fixture(scope="module")
def fused() -> FusionReport:
    return capture(make_site(), *make_inputs())


@pytest.fixture(scope="module")
def missed() -> FusionReport:
    return capture(make_site(64), *make_inputs())


def test_what_a_fused_site_says(fused: FusionReport) -> None:
    (site,) = fused.to_dict()["sites"]
    assert set(SITE_FIELDS) <= site.keys()
    assert {name: site[name] for name in SITE_FIELDS if name != "kernel_reason"} == {
        "status": "fused",
        "reason": None,
        "detail": "",
        "module": "norm",
        "source": line_of("F.silu"),
        "num_heads": 4,
        "head_dim": 128,
        "group_size": 128,
        "granularity": "group",
        "eps": 1e-6,
        "eps_symbolic": False,
        "activation": "silu",
        "norm_before_gate": True,
        "roundings": ["norm:bfloat16", "weight:bfloat16", "output:bfloat16"],
        "scale_format": "fp32",
        "fp8_dtype": "float8_e4m3fn",
        "sink": "decomposed",
        "kernel": "reference",
    }
    assert "AITER" in site["kernel_reason"]


def test_what_a_missed_site_says(missed: FusionReport) -> None:
    (site,) = missed.to_dict()["sites"]
    assert (site["status"], site["reason"], site["kernel"]) == ("missed", "GROUP_SIZE", None)
    assert (site["module"], site["source"], site["group_size"]) == ("norm", line_of("F.silu"), 64)
    assert "expected groups of 128, got 64 at " in site["detail"]
    assert f"({line_of('.to(torch.float8_e4m3fn)')})" in site["detail"]
    assert "gdn.group_sizes" in site["detail"]


def test_what_a_report_says(fused: FusionReport) -> None:
    report = fused.to_dict()
    assert (report["num_fused"], report["num_missed"], report["notes"]) == (1, 0, [])
    assert report["folded_reshapes"] >= 1
    assert report["num_nodes"] > 20
    timings = report["timings_ms"]
    assert timings.keys() == {"fold", "match", "rewrite", "total"}
    assert 0 < timings["fold"] + timings["match"] + timings["rewrite"] <= timings["total"]


def test_reports_are_plain_data(fused: FusionReport, missed: FusionReport) -> None:
    for report in (fused, missed):
        assert pickle.loads(pickle.dumps(report)) == report
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()


def test_a_report_pins_no_graph() -> None:
    graphs: list[weakref.ref[GraphModule]] = []
    reports: list[FusionReport] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        graphs.append(weakref.ref(gm))
        reports.append(report_graph(gm, Settings(group_sizes=(64, 128)), graph_id=0))
        return gm.forward

    with torch.no_grad():
        torch.compile(make_site(), backend=keep)(*make_inputs())
    torch._dynamo.reset()
    gc.collect()
    assert reports[0].num_fused == 1
    assert graphs[0]() is None


def test_reports_are_kept_oldest_first() -> None:
    assert gdn_backend.last_report() is None
    assert gdn_backend.reports() == []
    for number in range(store.CAPACITY + 3):
        store.add_report(FusionReport(graph_id=number, num_nodes=1))
    kept = gdn_backend.reports()
    assert [report.graph_id for report in kept] == list(range(3, store.CAPACITY + 3))
    assert gdn_backend.last_report() == kept[-1]
    gdn_backend.clear_reports()
    assert gdn_backend.reports() == []


def test_off_is_silent(fused: FusionReport, capfd: pytest.CaptureFixture[str]) -> None:
    show(fused, "off")
    assert capfd.readouterr() == ("", "")


def test_the_summary(fused: FusionReport, capfd: pytest.CaptureFixture[str]) -> None:
    show(fused, "summary")
    out, err = capfd.readouterr()
    assert out == ""
    for part in ("1 fused · 0 missed", f"✓ norm · {line_of('F.silu')}", "4 × 128", "eps 1e-06", "before silu gate",
                 "norm, weight, output to bfloat16", "decomposed, groups of 128, fp32 scales, float8_e4m3fn",
                 "reference (AITER"):  # fmt: skip
        assert part in err
    assert max(map(len, err.splitlines())) <= 120


def test_full_has_each_pass_and_each_site(fused: FusionReport, capfd: pytest.CaptureFixture[str]) -> None:
    (site,) = fused.sites
    twins = replace(fused, sites=(replace(site, module="layers.0.norm"), replace(site, module="layers.1.norm")))
    show(twins, "full")
    full = capfd.readouterr().err
    assert all(text in full for text in ("fold ", "match ", "rewrite ", "total ", "layers.0.norm", "layers.1.norm"))
    gdn_backend.clear_reports()
    show(twins, "summary")
    summary = capfd.readouterr().err
    assert "2 fused" in summary
    assert "and 1 more like it" in summary
    assert "layers.1.norm" not in summary


def test_a_miss_shows_reason_and_advice(missed: FusionReport, capfd: pytest.CaptureFixture[str]) -> None:
    show(missed, "summary")
    err = " ".join(capfd.readouterr().err.replace("│", "").split())
    assert f"✗ norm · {line_of('F.silu')} · GROUP_SIZE" in err
    assert 'options={"gdn.group_sizes": [64, 128]}' in err


def test_gradients_are_the_first_thing_said(capfd: pytest.CaptureFixture[str]) -> None:
    with torch.enable_grad():
        (report,) = gdn_backend.explain(make_site(), *make_inputs())
    assert [site.reason for site in report.sites] == ["REQUIRES_GRAD"]
    assert report.notes[0].startswith("called with gradients enabled: wrap the call in torch.no_grad()")
    show(report, "summary")
    assert report.notes[0] in capfd.readouterr().err.splitlines()[1]


@pytest.mark.field_case("F30")
def test_no_sites_is_said_with_the_reason(capfd: pytest.CaptureFixture[str]) -> None:
    report = capture(torch.nn.Linear(4, 4), torch.ones(2, 4))
    show(report, "summary")
    assert "0 sites: no FP8 quantisation behind a gated norm was found" in capfd.readouterr().err


@pytest.mark.field_case("F30")
def test_a_gated_norm_without_quantisation_is_a_note() -> None:
    report = capture(GatedNorm(), *make_inputs())
    assert report.sites == ()
    assert any("norm" in note for note in report.notes)


def test_equal_reports_take_one_line(fused: FusionReport, capfd: pytest.CaptureFixture[str]) -> None:
    show(replace(fused, graph_id=3), "summary")
    capfd.readouterr()
    for graph_id, times in ((7, 2), (9, 3)):
        show(replace(fused, graph_id=graph_id, timings_ms={"total": 5.0}), "summary")
        assert capfd.readouterr().err == f"gdn_rocm · graph {graph_id} · same as graph 3 (×{times})\n"


def test_printed_lists_collapse(fused: FusionReport, missed: FusionReport, capfd: pytest.CaptureFixture[str]) -> None:
    print_reports([fused, missed, replace(fused, graph_id=99)])
    out, err = capfd.readouterr()
    assert err == ""
    assert out.count("╭") == 2
    assert "(×2)" in out


@pytest.mark.parametrize(("rank", "shown"), [("0", True), ("1", False)])
def test_one_process_of_a_job_shows(
    fused: FusionReport, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], rank: str, shown: bool
) -> None:
    monkeypatch.setenv("RANK", rank)
    show(fused, "summary")
    assert bool(capfd.readouterr().err) == shown


def test_a_stream_of_ascii_gets_ascii(fused: FusionReport, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stderr", io.TextIOWrapper(raw, encoding="ascii"))
    show(fused, "summary")
    assert b"+ norm - qwen_site.py" in raw.getvalue()


def test_a_report_that_cannot_be_shown_costs_nothing(fused: FusionReport, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr("sys.stderr", stream)
    show(fused, "summary")


def test_a_misspelt_variable_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_KERNAL", "triton")
    assert capture(torch.nn.Linear(4, 4), torch.ones(2, 4)).notes == (
        "environment variable GDN_KERNAL is set but no option reads it",
    )


@pytest.mark.parametrize("style", ["off", "summary", "full"])
def test_the_option_reaches_the_screen(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], style: str
) -> None:
    monkeypatch.setenv("GDN_REPORT", style)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, config_patches: gm.forward)
    with torch.no_grad():
        torch.compile(make_site(), backend=backend.gdn_rocm)(*make_inputs())
    out, err = capfd.readouterr()
    assert out == ""
    assert (err == "") == (style == "off")
    assert ("match " in err) == (style == "full")
    assert gdn_backend.last_report() is not None
