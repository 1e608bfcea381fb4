"""``python -m gdn_backend``: doctor, demo, explain, bench."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import gdn_backend


class UsageError(Exception):
    """What was asked for cannot be done; the text says what to do instead."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status: 0 for success, 1 for a failure, 2 for what cannot be done."""
    parser = _parser()
    parsed, rest = parser.parse_known_args(arguments)
    if rest and not parsed.takes_rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(parsed.run(parsed, rest) or 0)
    except UsageError as error:
        print(f"gdn_backend {parsed.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gdn_backend", description=(gdn_backend.__doc__ or "").partition("\n")[0]
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., Any], text: str, *, takes_rest: bool = False) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=text, description=text, add_help=not takes_rest)
        command.set_defaults(run=run, takes_rest=takes_rest)
        return command

    doctor = add("doctor", _run_doctor, "say what this machine offers and which kernel would serve a Qwen3-Next site")
    doctor.add_argument("--json", action="store_true", help="print JSON")
    doctor.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds that probing AITER may take")
    add("demo", _run_demo, "compile a small Qwen3-Next with FP8 layers and show what was fused", takes_rest=True)
    explain = add("explain", _run_explain, "say what would be fused in a model, without compiling it")
    explain.add_argument(
        "target",
        metavar="FILE.py:FUNCTION",
        help="a function without arguments (or MODULE:FUNCTION) that returns (model, inputs), inputs being a tuple of "
        "positional or a dict of keyword arguments",
    )
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument("--grad", action="store_true", help="call the model with gradients enabled")
    add("bench", _run_bench, "time the kernels on this machine's GPU (from a checkout)", takes_rest=True)
    return parser


def _run_doctor(parsed: argparse.Namespace, rest: list[str]) -> int:
    from gdn_backend.doctor import examine, print_findings

    findings = examine(timeout=parsed.timeout)
    if parsed.json:
        print(json.dumps(findings, indent=2))
    else:
        print_findings(findings)
    return 0


def _run_demo(parsed: argparse.Namespace, rest: list[str]) -> int:
    if importlib.util.find_spec("transformers") is None:
        raise UsageError("the demo needs transformers: pip install 'gdn-backend[hf]'")
    from gdn_backend.backend import register
    from gdn_backend.huggingface import demo

    register()
    return demo.main(rest)


def _run_explain(parsed: argparse.Namespace, rest: list[str]) -> int:
    import torch

    from gdn_backend.dry_run import explain
    from gdn_backend.report.render import print_reports

    model, args, kwargs = _model_and_inputs(parsed.target)
    with torch.set_grad_enabled(parsed.grad):
        reports = explain(model, *args, **kwargs)
    if parsed.json:
        print(json.dumps([report.to_dict() for report in reports], indent=2))
    else:
        print_reports(reports)
    return 0


def _model_and_inputs(target: str) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    where, _, name = target.rpartition(":")
    if not where or not name:
        raise UsageError(f"expected FILE.py:FUNCTION or MODULE:FUNCTION, got {target!r}")
    build = getattr(_load(where), name, None)
    if not callable(build):
        raise UsageError(f"{where} has no function {name!r}")
    match build():
        case (model, tuple() | list() as args) if callable(model):
            return model, tuple(args), {}
        case (model, dict() as kwargs) if callable(model):
            return model, (), kwargs
        case other:
            raise UsageError(f"{name}() must return (model, tuple or dict of inputs), got {type(other).__name__}")


def _load(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix != ".py":
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            raise UsageError(f"no module {error.name!r}; a file's name ends in .py") from None
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise UsageError(f"no file {where}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))  # as `python FILE.py` has it
    spec.loader.exec_module(module)
    return module


def _run_bench(parsed: argparse.Namespace, rest: list[str]) -> int:
    script = Path(gdn_backend.__file__).resolve().parent.parent / "scripts" / "bench_kernel.py"
    if not script.is_file():
        raise UsageError("the benchmarks are not part of the installed package: run this from a checkout")
    before, sys.argv = sys.argv, [str(script), *rest]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.argv = before
    return 0
