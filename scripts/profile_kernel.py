"""Hardware counters of the fused kernel and of a copy of the same bytes: what bounds which shape.

    python scripts/profile_kernel.py [--json FILE]

Runs itself under Nsight Compute, which has to be on the path and allowed to read counters. Clocks are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from bench_kernel import RESULTS, Case, cases, copies, make_buffers, providers
from rich.console import Console
from rich.table import Table

#: Column: Nsight Compute's name.
METRICS = {
    "µs": "gpu__time_duration.sum",
    "issue slots busy %": "smsp__issue_active.avg.pct_of_peak_sustained_active",
    "MUFU and conversions %": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
    "FMA pipe %": "sm__pipe_fma_cycles_active.avg.pct_of_peak_sustained_active",
    "ALU pipe %": "sm__inst_executed_pipe_alu.avg.pct_of_peak_sustained_active",
    "L2 %": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "SM active %": "sm__cycles_active.avg.pct_of_peak_sustained_elapsed",
    "warps of 64": "sm__warps_active.avg.per_cycle_active",
    "waits for memory": "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
    "for pipes": "smsp__average_warps_issue_stalled_math_pipe_throttle_per_issue_active.ratio",
    "for results": "smsp__average_warps_issue_stalled_wait_per_issue_active.ratio",
    "for MUFU, shuffles": "smsp__average_warps_issue_stalled_short_scoreboard_per_issue_active.ratio",
    "at barriers": "smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio",
    "registers": "launch__registers_per_thread",
    "waves": "launch__waves_per_multiprocessor",
}
#: The copy that bench_kernel.py finds best, or within a percent of it, for every shape.
COPY = "copy 8x128/4"


def launch_all() -> list[tuple[Case, str]]:
    """Launch each profiled kernel once between the profiler's marks, after a first time outside them."""
    launched = []
    for case in cases(quick=False):
        if case.num_tokens > 8192:
            continue
        buffers = make_buffers(case)[:1]
        chosen = {"fused": providers(case, buffers)["fused"][0], "copy": copies(case, buffers)[COPY][0]}
        for name, launch in chosen.items():
            launch()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            launch()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
            launched.append((case, name))
    return launched


def profile() -> list[dict[str, Any]]:
    """The counters of each kernel that :func:`launch_all` launches, in its order."""
    command = ["ncu", "--clock-control", "none", "--cache-control", "none", "--profile-from-start", "off", "--csv"]
    command += ["--page", "raw", "--print-units", "base", "--metrics", ",".join(METRICS.values())]
    done = subprocess.run([*command, sys.executable, __file__, "--launch"], capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    start = next((place for place, line in enumerate(lines) if line.startswith('"ID"')), None)
    if done.returncode or start is None:
        raise SystemExit(f"Nsight Compute gave no counters:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    names = json.loads(next(line for line in lines if line.startswith("launched: ")).removeprefix("launched: "))
    rows = [row for row in csv.DictReader(lines[start:]) if row["ID"]]
    if len(rows) != len(names):
        raise SystemExit(f"{len(names)} kernels were launched, and Nsight Compute saw {len(rows)}")
    return [
        {"case": case, "kernel": kernel} | {name: _number(row[metric]) for name, metric in METRICS.items()}
        for (case, kernel), row in zip(names, rows, strict=True)
    ]


def _number(text: str) -> float:
    return float(text.replace(",", "") or "nan")


def main() -> int:
    """Profile; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "profile_kernel.json", help="where the numbers go")
    parser.add_argument("--launch", action="store_true", help="only launch the kernels, for the profiler")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("Counters need a GPU, and torch sees none.", file=sys.stderr)
        return 2
    if options.launch:
        print("launched: " + json.dumps([(case.label, name) for case, name in launch_all()]))
        return 0
    found = profile()
    for row in found:
        row["µs"] = row["µs"] / 1000  # counted in nanoseconds
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    table = Table(title=f"Counters; {device}")
    for name in ("case", "kernel", *METRICS):
        table.add_column(name, justify="left" if name in ("case", "kernel") else "right")
    for row in found:
        table.add_row(row["case"], row["kernel"], *(f"{row[name]:.2f}" for name in METRICS))
    Console(width=240).print(table)
    about = {"date": datetime.date.today().isoformat(), "device": device}
    options.json.write_text(json.dumps({**about, "counters": found}, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
