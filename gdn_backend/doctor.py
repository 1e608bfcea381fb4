"""What this machine offers, for people who wonder why a kernel was chosen."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import torch

from gdn_backend import environment
from gdn_backend.options import describe, resolve_settings, unknown_variables

_PROBE = "from gdn_backend.doctor import probe_kernels; probe_kernels()"


def examine(*, timeout: float) -> dict[str, Any]:
    """What is here, as JSON-ready values; AITER is probed in another process, for at most ``timeout`` seconds."""
    findings: dict[str, Any] = {
        "torch": torch.__version__,
        "rocm": torch.version.hip,
        "cuda": torch.version.cuda,
        "devices": [_device(index) for index in range(torch.cuda.device_count())],
        "fp8_dtype": str(environment.default_fp8_dtype()).removeprefix("torch."),
        "triton": environment.triton_status().reason,
        **_probe_elsewhere(timeout),
    }
    try:
        findings["options"] = describe(resolve_settings())
    except ValueError as error:  # a variable that no graph would be compiled with
        findings["options"] = {"options": str(error)}
    findings["unknown_variables"] = unknown_variables()
    return findings


def _device(index: int) -> str:
    return f"{torch.cuda.get_device_name(index)} ({environment.architecture(torch.device('cuda', index))})"


def _probe_elsewhere(timeout: float) -> dict[str, Any]:
    """Importing AITER may start compilers, hang or end the process, so it is tried in one that can be lost."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=timeout, check=False
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        failure = f"the probe did not end within {timeout:g} s"
    except (IndexError, json.JSONDecodeError):
        last_line = (done.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        failure = f"the probe ended with status {done.returncode}: {last_line}"
    return {"aiter": {"usable": False, "reason": failure}, "kernel": {"auto": None, "reason": failure}}


def probe_kernels() -> None:
    """Prints, as one line of JSON, whether AITER can be used and which kernel would serve a Qwen3-Next site here."""
    from gdn_backend.ops.dispatch import Choice, Operands, choose_kernel
    from gdn_backend.ops.spec import FusedSpec

    usable, reason = environment.gdn_triton_kernels_status()
    roundings = ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
    spec = FusedSpec(hidden_size=4096, head_dim=128, norm_size=128, group_size=128, roundings=roundings)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    operands = Operands(device, torch.bfloat16, torch.bfloat16, torch.bfloat16, weight_size=128)
    choice = choose_kernel(spec, operands)
    kernel = choice.kernel if isinstance(choice, Choice) else None
    print(
        json.dumps({"aiter": {"usable": usable, "reason": reason}, "kernel": {"auto": kernel, "reason": choice.reason}})
    )


def print_findings(findings: dict[str, Any]) -> None:
    """The findings of :func:`examine`, for people."""
    from rich.console import Console
    from rich.table import Table

    build = (
        f"ROCm {findings['rocm']}" if findings["rocm"] else f"CUDA {findings['cuda']}" if findings["cuda"] else "CPU"
    )
    aiter, kernel = findings["aiter"], findings["kernel"]
    rows = [
        ("torch", f"{findings['torch']} ({build})"),
        ("triton", findings["triton"]),
        ("devices", "\n".join(findings["devices"]) or "no GPU"),
        ("FP8", findings["fp8_dtype"]),
        ("AITER", f"{'usable' if aiter['usable'] else 'not usable'}: {aiter['reason']}"),
        ("auto kernel", f"{kernel['auto'] or 'none'} ({kernel['reason']})"),
        *findings["options"].items(),
        *((name, "set, but no option reads it") for name in findings["unknown_variables"]),
    ]
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(name, str(value))
    Console(highlight=False).print(table)
