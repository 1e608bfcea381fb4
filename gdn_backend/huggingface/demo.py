"""``python -m gdn_backend demo``: a small FP8 Qwen3-Next through the backend, checked against eager."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import gdn_backend
from gdn_backend.environment import inductor_rounds_on_cpu
from gdn_backend.huggingface.block_fp8 import QUANTISATIONS
from gdn_backend.huggingface.models import MIN_LAYERS, Qwen3NextSize, build_qwen3_next, new_cache
from gdn_backend.huggingface.taps import SiteDistance, TappedModel, compare_with_eager
from gdn_backend.options import resolve_settings
from gdn_backend.report.model import FusionReport

BATCH_SIZE, PROMPT_TOKENS, DECODE_STEPS = 2, 24, 4
PHASES = ("prefill", "decode")

FEW_SEEDS, MANY_SEEDS = 4, 64

#: The compiled model's logits may be this many times as far from eager's as plain Inductor's.
MAX_LOGIT_RATIO = 1.05


@dataclass(frozen=True)
class Check:
    """One thing that the demo holds the backend to."""

    name: str
    ok: bool
    detail: str


@dataclass
class Findings:
    """What the demo saw: the reports of each phase, and distances from eager by seed."""

    reports: dict[str, list[FusionReport]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    sites: dict[str, list[SiteDistance]] = field(default_factory=lambda: {phase: [] for phase in PHASES})
    fused_logits: list[float] = field(default_factory=list)  # mean |logit - eager's| of the prompt
    inductor_logits: list[float] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the demo."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout and nothing else there")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=4, metavar="N", help="every fourth is attention; default 4")
    parser.add_argument(
        "--seeds", type=int, metavar="N", help=f"weights and prompts to try; default {FEW_SEEDS} or {MANY_SEEDS}"
    )
    parser.add_argument(
        "--quantisation", default="decomposed", choices=QUANTISATIONS, help="how activations become FP8"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse ``arguments`` and run the demo."""
    parser = argparse.ArgumentParser(prog="python -m gdn_backend demo", description=__doc__)
    add_arguments(parser)
    parsed = parser.parse_args(arguments)
    if parsed.seeds is None:
        parsed.seeds = default_seeds(parsed.device)
    for name, least in (("layers", MIN_LAYERS), ("seeds", 1)):
        if getattr(parsed, name) < least:
            parser.error(f"--{name} must be at least {least}")
    return run(parsed)


def default_seeds(device: str) -> int:
    """How many seeds tell whether logits are as near to eager's as plain Inductor's.

    Where Inductor repeats every rounding the whole model is eager's, and few do. Elsewhere (on GPUs) it is only the
    sites, and a router that picks another expert moves the logits far, so that the distances of single seeds scatter
    (``logits`` in the JSON) and only the mean of many tells.
    """
    return FEW_SEEDS if device == "cpu" and inductor_rounds_on_cpu() else MANY_SEEDS


def run(parsed: argparse.Namespace) -> int:
    """Run the demo; returns 0 when every check holds and 1 otherwise.

    Each compiled graph's report goes to stderr as it comes (in full unless ``GDN_REPORT`` says otherwise), the checks
    go to stdout. ``GDN_REPORT=off`` leaves the exit status, and on stderr the checks that failed.
    """
    style = resolve_settings().report if os.environ.get("GDN_REPORT") else "full"
    say: Callable[[str], None] = (lambda text: None) if style == "off" else _say
    size = Qwen3NextSize(num_layers=parsed.layers)
    with contextlib.redirect_stdout(sys.stderr), _without_advice():
        say(f"a Qwen3-Next of {parsed.layers} layers in block FP8 on {parsed.device}, {_versions_line()}")
        findings = observe(size, parsed.device, parsed.quantisation, parsed.seeds, style, say)
    checks = check_findings(findings, size.num_gated_delta_layers)
    ok = all(check.ok for check in checks)
    if parsed.json:
        print(json.dumps(_to_dict(parsed, findings, checks, ok), indent=2))
    elif style != "off":
        print("\n".join(_line(check) for check in checks))
    if style == "off":
        sys.stderr.writelines(_line(check) + "\n" for check in checks if not check.ok)
    return 0 if ok else 1


def check_findings(findings: Findings, num_sites: int) -> list[Check]:
    """Hold ``findings`` to what the backend promises for a model with ``num_sites`` gated norms."""
    checks = [_check_fused(phase, findings.reports[phase], num_sites) for phase in PHASES]
    checks += [_check_exact(phase, findings.sites[phase], num_sites) for phase in PHASES]
    return [*checks, _check_logits(findings)]


def _check_fused(phase: str, reports: list[FusionReport], num_sites: int) -> Check:
    fused = sum(report.num_fused for report in reports)
    missed = sum(report.num_missed for report in reports)
    folded = sum(report.folded_reshapes for report in reports)
    kernels = sorted({str(site.kernel) for report in reports for site in report.sites if site.kernel})
    ok = bool(reports) and all(report.num_fused == num_sites and report.num_missed == 0 for report in reports)
    detail = (
        f"{fused} of {num_sites * len(reports)} sites fused, {missed} missed, {folded} reshapes folded, "
        f"kernel {', '.join(kernels) or 'none'}"
    )
    return Check(f"{phase}: every site fused", ok, detail)


def _check_exact(phase: str, sites: list[SiteDistance], num_sites: int) -> Check:
    distances = [site.distance for site in sites]
    codes_off, codes = sum(each.codes_off for each in distances), sum(each.codes for each in distances)
    scales_off, scales = sum(each.scales_off for each in distances), sum(each.scales for each in distances)
    detail = f"{codes_off} of {codes} codes and {scales_off} of {scales} scales differ, in {len(sites)} runs of a site"
    bad = [f"{site.path}: {site.distance.render()}" for site in sites if not site.ok]
    ok = len(sites) >= num_sites and not bad
    return Check(f"{phase}: codes and scales are eager's", ok, "; ".join(bad[:3]) or detail)


def _check_logits(findings: Findings) -> Check:
    fused, inductor = _mean(findings.fused_logits), _mean(findings.inductor_logits)
    detail = (
        f"mean distance {fused:.3g}, plain Inductor's {inductor:.3g}, over {len(findings.fused_logits)} seeds "
        f"(at most {MAX_LOGIT_RATIO} times)"
    )
    return Check("logits are as near to eager's as plain Inductor's", fused <= MAX_LOGIT_RATIO * inductor, detail)


def observe(
    size: Qwen3NextSize,
    device: str = "cpu",
    quantisation: str = "decomposed",
    num_seeds: int = 1,
    report_style: str = "off",
    say: Callable[[str], None] = lambda text: None,
) -> Findings:
    """Run a model eagerly, through the backend and through plain Inductor; both compile once.

    Args:
        size, device, quantisation: of the model; see :func:`~gdn_backend.huggingface.models.build_qwen3_next`.
        num_seeds: how many sets of weights and tokens to run.
        report_style: ``gdn.report`` of the backend.
        say: takes a line of text before each compilation.
    """
    findings = Findings()
    model = build_qwen3_next(size, seed=0, device=device, quantisation=quantisation)
    tapped = TappedModel(model)
    fused = torch.compile(tapped, backend="gdn_rocm", fullgraph=True, options={"gdn.report": report_style})
    inductor = torch.compile(tapped, backend="inductor", fullgraph=True)
    for seed in range(num_seeds):
        if seed:
            other = build_qwen3_next(size, seed=seed, device=device, quantisation=quantisation)
            model.load_state_dict(other.state_dict())
        with torch.no_grad():
            _observe_seed(seed, tapped, fused, inductor, findings, say)
    return findings


def _observe_seed(
    seed: int, tapped: TappedModel, fused: Any, inductor: Any, findings: Findings, say: Callable[[str], None]
) -> None:
    device = next(tapped.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH_SIZE, PROMPT_TOKENS + DECODE_STEPS)
    tokens = torch.randint(tapped.vocab_size, shape, generator=generator).to(device)
    prompt, *steps = torch.split(tokens, [PROMPT_TOKENS, *[1] * DECODE_STEPS], dim=1)
    caches = [new_cache(tapped.model, max_tokens=shape[1]) for _ in range(3)]
    with _stage(findings, "prefill", say):
        logits = _run_fused(fused, prompt, caches[0], "prefill", tapped, findings)
    expected = tapped(prompt, caches[1])[0]
    for token in steps:
        with _stage(findings, "decode", say):
            _run_fused(fused, token, caches[0], "decode", tapped, findings)
    with _stage(findings, "plain Inductor", say):
        inductor_logits = inductor(prompt, caches[2])[0]
    findings.fused_logits.append(_distance(logits, expected))
    findings.inductor_logits.append(_distance(inductor_logits, expected))


def _run_fused(
    fused: Any, tokens: torch.Tensor, cache: Any, phase: str, tapped: TappedModel, findings: Findings
) -> torch.Tensor:
    known = {report.graph_id for report in gdn_backend.reports()}
    logits, seen = fused(tokens, cache)
    findings.reports[phase] += [report for report in gdn_backend.reports() if report.graph_id not in known]
    findings.sites[phase] += compare_with_eager(tapped.model, seen)
    return logits


def _distance(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return (logits.float() - expected.float()).abs().mean().item()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


@contextlib.contextmanager
def _stage(findings: Findings, name: str, say: Callable[[str], None]) -> Iterator[None]:
    """Time the first run of a stage, which compiles."""
    is_first = name not in findings.seconds
    if is_first:
        say(f"compiling: {name}")
    start = time.perf_counter()
    yield
    if is_first:
        findings.seconds[name] = round(time.perf_counter() - start, 1)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Silence what transformers and Dynamo say about packages that would make eager faster."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.")
            yield
    finally:
        logging.set_verbosity(verbosity)


def _versions() -> dict[str, str]:
    import transformers

    return {
        "gdn_backend": gdn_backend.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _versions_line() -> str:
    return ", ".join(f"{name} {version}" for name, version in _versions().items())


def _to_dict(parsed: argparse.Namespace, findings: Findings, checks: list[Check], ok: bool) -> dict[str, Any]:
    return {
        "ok": ok,
        "device": parsed.device,
        "versions": _versions(),
        "checks": [vars(check) for check in checks],
        "logits": {"fused": findings.fused_logits, "inductor": findings.inductor_logits},
        "sites": {
            phase: [{"path": site.path, "ok": site.ok, **vars(site.distance)} for site in sites]
            for phase, sites in findings.sites.items()
        },
        "reports": {phase: [report.to_dict() for report in found] for phase, found in findings.reports.items()},
        "seconds": findings.seconds,
    }


def _line(check: Check) -> str:
    return f"{'ok    ' if check.ok else 'FAILED'}  {check.name}: {check.detail}"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
