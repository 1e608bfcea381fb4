"""Qwen3-Next from Hugging Face through the whole backend: prefill and decode, every form of quantisation.

What is fused and whether it is eager's is seen with the graph run as the passes left it, which takes seconds; that
Inductor compiles it to the same is seen once, in the demo's own process, and on a GPU.
"""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager

import gdn_backend
from gdn_backend.huggingface import demo
from gdn_backend.huggingface.models import Qwen3NextSize, build_qwen3_next, gated_delta_layers, new_cache
from gdn_backend.huggingface.taps import TappedModel, compare_with_eager
from gdn_backend.report.model import FusionReport, SiteReport

transformers = pytest.importorskip("transformers")

pytestmark = pytest.mark.timeout(900)  # the shared model is traced in the time of the first test that asks for it

ONE_SITE = Qwen3NextSize(num_layers=2)
TOKENS = torch.tensor([[5, 17, 3, 250, 42, 8, 111, 9]])


@pytest.fixture(scope="module")
def passes_only() -> Iterator[None]:
    """Inductor replaced by the graph itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **settings: gm.forward)
        yield


@pytest.fixture(scope="module")
def findings(passes_only: None) -> demo.Findings:
    return demo.observe(Qwen3NextSize(), num_seeds=2)


def sites_of(reports: list[FusionReport]) -> list[SiteReport]:
    return [site for report in reports for site in report.sites]


@pytest.mark.parametrize("phase", demo.PHASES)
def test_three_sites_fuse_in_one_graph(findings: demo.Findings, phase: str) -> None:
    (report,) = findings.reports[phase]
    assert (report.num_fused, report.num_missed) == (3, 0), report.to_dict()
    assert report.folded_reshapes > 0
    assert report.num_nodes > 800


@pytest.mark.parametrize("phase", demo.PHASES)
def test_sites_say_what_they_are(findings: demo.Findings, phase: str) -> None:
    for index, site in enumerate(sites_of(findings.reports[phase])):
        assert site.module == f"model.model.layers.{index}.linear_attn.norm"
        assert (site.num_heads, site.head_dim, site.group_size, site.granularity) == (4, 128, 128, "group")
        assert (site.eps, site.activation, site.norm_before_gate) == (1e-6, "silu", True)
        assert site.roundings == ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
        assert (site.sink, site.scale_format, site.fp8_dtype) == ("decomposed", "fp32", "float8_e4m3fn")
        assert site.kernel == "reference"


@pytest.mark.parametrize("phase", demo.PHASES)
def test_sites_name_a_line_of_the_norm(findings: demo.Findings, phase: str) -> None:
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

    lines, first = inspect.getsourcelines(Qwen3NextRMSNormGated.forward)
    for site in sites_of(findings.reports[phase]):
        file, _, line = site.source.partition(":")
        assert file == "modeling_qwen3_next.py"
        assert first <= int(line) < first + len(lines)


def test_every_check_of_the_demo_holds(findings: demo.Findings) -> None:
    checks = demo.check_findings(findings, num_sites=3)
    assert [check for check in checks if not check.ok] == []
    assert len(findings.sites["prefill"]) == 2 * 3
    assert len(findings.sites["decode"]) == 2 * 3 * demo.DECODE_STEPS


def test_checks_see_what_is_wrong(findings: demo.Findings) -> None:
    four_expected = demo.check_findings(findings, num_sites=4)
    assert [check.ok for check in four_expected[:2]] == [False, False]
    farther = demo.Findings(findings.reports, findings.sites, fused_logits=[0.2], inductor_logits=[0.1])
    assert [check.ok for check in demo.check_findings(farther, num_sites=3)] == [True, True, True, True, False]


def run_tapped(model: Any, **settings: Any) -> tuple[list[SiteReport], list[bool], dict[str, list[torch.Tensor]]]:
    """A prompt and a token through the compiled model: its sites, whether each is eager's, the prompt's taps."""
    tapped = TappedModel(model)
    compiled = torch.compile(tapped, backend="gdn_rocm", fullgraph=True, **settings)
    cache = new_cache(model, max_tokens=16)
    with torch.no_grad():
        taps = [compiled(tokens, cache)[1] for tokens in (TOKENS, TOKENS[:, :1])]
        exact = [site.ok for seen in taps for site in compare_with_eager(model, seen)]
    return sites_of(gdn_backend.reports()), exact, taps[0]


@pytest.mark.usefixtures("passes_only")
@pytest.mark.parametrize(
    ("quantisation", "sink", "granularity", "group_size"),
    [
        ("op", "gdn_backend::fp8_quant", "group", 128),
        ("token", "decomposed", "token", 512),
    ],
)
def test_forms_of_quantisation(quantisation: str, sink: str, granularity: str, group_size: int) -> None:
    sites, exact, _ = run_tapped(build_qwen3_next(ONE_SITE, quantisation=quantisation))
    assert [site.status for site in sites] == ["fused"] * 2, [site.detail for site in sites]
    assert {(site.sink, site.granularity, site.group_size) for site in sites} == {(sink, granularity, group_size)}
    assert exact == [True] * 2


@pytest.mark.usefixtures("passes_only")
def test_gate_that_is_a_strided_view() -> None:
    size = Qwen3NextSize(num_layers=2, num_key_heads=2, num_value_heads=2)
    sites, exact, seen = run_tapped(build_qwen3_next(size))
    assert [(site.status, site.num_heads) for site in sites] == [("fused", 2)] * 2
    assert exact == [True] * 2
    assert not any(gate.is_contiguous() for _, gate, _, _ in seen.values())


@pytest.mark.usefixtures("passes_only")
def test_growing_cache() -> None:
    """Keys and values that grow: the decode graph's lengths become symbolic at the second step."""
    model = build_qwen3_next(ONE_SITE)
    tapped = TappedModel(model)
    compiled = torch.compile(tapped, backend="gdn_rocm", fullgraph=True)
    cache, eager_cache = new_cache(model), new_cache(model)
    with torch.no_grad():
        for tokens in (TOKENS, *TOKENS[:, :4].split(1, dim=1)):
            logits, seen = compiled(tokens, cache)
            assert torch.equal(logits, tapped(tokens, eager_cache)[0])
            assert all(site.ok for site in compare_with_eager(model, seen))
    assert [(report.num_fused, report.num_missed) for report in gdn_backend.reports()] == [(1, 0)] * 3


def test_without_no_grad_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all runs, forward and back: AOTAutograd traces both, Inductor's part is left out."""
    monkeypatch.setattr(
        "torch._inductor.compile_fx.compile_fx", lambda gm, example_inputs, **settings: aot_eager(gm, example_inputs)
    )
    model = build_qwen3_next(ONE_SITE)
    embedding = model.get_input_embeddings().weight
    gradients = []
    for call in (model, torch.compile(model, backend="gdn_rocm")):
        call(input_ids=TOKENS, use_cache=False).logits.square().mean().backward()
        gradients.append(embedding.grad.clone())
        embedding.grad = None
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0.016, atol=1e-4)  # sums in another order, in bf16
    (report,) = gdn_backend.reports()
    assert report.num_fused == 0
    assert [site.reason for site in report.sites] == ["REQUIRES_GRAD"]
    assert "torch.no_grad()" in report.alert


@pytest.mark.usefixtures("passes_only")
def test_generate() -> None:
    model = build_qwen3_next(ONE_SITE)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(TOKENS, **settings)
    model.compile(backend="gdn_rocm")
    assert torch.equal(model.generate(TOKENS, **settings), expected)
    reports = [report for report in gdn_backend.reports() if report.sites]
    assert len(reports) >= 2  # prefill and decode
    assert {(report.num_fused, report.num_missed) for report in reports} == {(1, 0)}


@pytest.mark.usefixtures("passes_only")
def test_demo_prints_reports_and_checks(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--layers", "2", "--seeds", "1", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 5
    assert all(line.startswith("ok ") for line in printed.out.splitlines())
    assert "1 fused · 0 missed" in printed.err
    assert "model.model.layers.0.linear_attn.norm · modeling_qwen3_next.py:" in printed.err


@pytest.mark.usefixtures("passes_only")
def test_demo_fails_when_nothing_is_fused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GDN_ENABLED", "0")
    monkeypatch.setenv("GDN_REPORT", "off")
    assert demo.main(["--layers", "2", "--seeds", "1", "--device", "cpu"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert [line.partition(":")[0] for line in printed.err.splitlines()] == ["FAILED  prefill", "FAILED  decode"]


def run_demo(*arguments: str, report: str = "off") -> tuple[subprocess.CompletedProcess[str], Any]:
    done = subprocess.run(
        [sys.executable, "-m", "gdn_backend", "demo", "--json", *arguments],
        env={**os.environ, "GDN_REPORT": report},
        capture_output=True,
        text=True,
        check=False,
    )
    return done, json.loads(done.stdout)


def test_demo_through_inductor_prints_json_and_nothing_else() -> None:
    done, result = run_demo("--layers", "2", "--seeds", "1", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert result["ok"]
    assert [check["ok"] for check in result["checks"]] == [True] * 5
    assert [len(result["reports"][phase]) for phase in demo.PHASES] == [1, 1]
    # Plain Inductor keeps fp32 where eager rounds, so it is off: were it not, the comparison would show nothing.
    assert sum(result["logits"]["inductor"]) > 0


@pytest.mark.gpu
@pytest.mark.parametrize("quantisation", ["decomposed", "op", "token"])
def test_gpu_model(quantisation: str) -> None:
    findings = demo.observe(Qwen3NextSize(), "cuda", quantisation, num_seeds=demo.default_seeds("cuda"))
    assert [check for check in demo.check_findings(findings, num_sites=3) if not check.ok] == []
    sites = [site for phase in demo.PHASES for site in sites_of(findings.reports[phase])]
    assert {site.kernel for site in sites} == {"triton"}


@pytest.mark.gpu
def test_gpu_strided_gate() -> None:
    model = build_qwen3_next(Qwen3NextSize(num_key_heads=4, num_value_heads=4), device="cuda")
    compiled = torch.compile(TappedModel(model), backend="gdn_rocm", fullgraph=True)
    cache = new_cache(model, max_tokens=16)
    with torch.no_grad():
        for tokens in (TOKENS.cuda(), TOKENS[:, :1].cuda()):
            _, seen = compiled(tokens, cache)
            assert [site.ok for site in compare_with_eager(model, seen)] == [True] * 3
            assert not any(gate.is_contiguous() for _, gate, _, _ in seen.values())
    assert [site.kernel for site in sites_of(gdn_backend.reports())] == ["triton"] * 6


def test_taps_cover_every_gated_delta_layer() -> None:
    model = build_qwen3_next(Qwen3NextSize(num_layers=4))
    assert list(gated_delta_layers(model)) == [f"model.layers.{index}.linear_attn" for index in range(3)]
    with torch.no_grad():
        logits, seen = TappedModel(model)(TOKENS, new_cache(model))
    assert logits.shape == (1, 8, 512)
    for x, gate, codes, scales in seen.values():
        assert (x.shape, gate.shape) == ((8 * 4, 128), (8 * 4, 128))
        assert (codes.shape, codes.dtype) == ((1, 8, 512), torch.float8_e4m3fn)
        assert (scales.shape, scales.dtype) == ((1, 8, 4), torch.float32)
