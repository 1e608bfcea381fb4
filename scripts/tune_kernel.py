"""Launch configurations of the fused kernel against each other: for choosing those of ``kernels/configs.py``.

    python scripts/tune_kernel.py [--json FILE]

Each configuration's time is given as times that of ``bench_kernel.py``'s copy of the same bytes, both from one run.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from bench_kernel import EPS, Buffers, Case, Launch, cases, copies, make_buffers, time_interleaved

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gdn_backend.kernels.configs import LaunchConfig, describe  # noqa: E402
from gdn_backend.kernels.gated_rmsnorm_quant import plan  # noqa: E402
from gdn_backend.kernels.gated_rmsnorm_quant_kernel import gated_rmsnorm_quant_kernel  # noqa: E402
from gdn_backend.ops.outputs import allocate_outputs  # noqa: E402


def configurations(case: Case) -> list[LaunchConfig]:
    """Programs of 512 to 4,096 values in one or two tiles, 4 to 32 values a thread."""
    unit = math.lcm(case.spec.norm_size, case.spec.group_size)
    units = (1,) if unit > 128 else (4, 8, 16)  # a unit of several pieces is a program of its own
    found = []
    for count, chunks, num_warps, tiles in itertools.product(units, (1, 2), (1, 2, 4, 8), (1, 2)):
        values = count * triton.next_power_of_2(unit) // (32 * num_warps)
        if 4 <= values <= 32:
            found.append(LaunchConfig(count, chunks, num_warps, tiles))
    return found


def launch(case: Case, buffers: Buffers, config: LaunchConfig) -> Launch:
    """The kernel of a configuration, which writes to the same tensors every time."""
    outputs = allocate_outputs(buffers.x, case.spec)
    machine = describe(buffers.x.device)
    programs, arguments = plan(
        buffers.x, buffers.gate, buffers.weight, None, EPS, case.spec, *outputs, machine, config=config
    )
    return lambda: gated_rmsnorm_quant_kernel[(programs,)](**arguments)


def warm(case: Case) -> None:
    """Compile every configuration, in a process of its own."""
    buffers = make_buffers(case)[0]
    for config in configurations(case):
        launch(case, buffers, config)()
    torch.cuda.synchronize()


def measure(case: Case) -> dict[str, Any]:
    """How many times the copy's time each configuration takes."""
    buffers = make_buffers(case)
    named = {
        f"units={config.units} chunks={config.chunks} warps={config.num_warps} tiles={config.tiles}": [
            launch(case, each, config) for each in buffers
        ]
        for config in configurations(case)
    }
    times = time_interleaved(named | copies(case, buffers), len(buffers))
    medians = {name: statistics.median(values) for name, values in times.items()}
    copy = min(median for name, median in medians.items() if name not in named)
    return {"case": case.label, "copy_microseconds": copy, "ratios": {name: medians[name] / copy for name in named}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--json", type=Path, help="where the numbers go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("Launch configurations need a GPU, and torch sees none.", file=sys.stderr)
        return 2
    chosen = cases(quick=True)
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm, chosen))
    results = []
    for case in chosen:
        results.append(measure(case))
        torch.cuda.empty_cache()
        best = sorted(results[-1]["ratios"].items(), key=lambda item: item[1])[:5]
        print(case.label, *(f"{name}: {ratio:.3f}" for name, ratio in best), sep="\n    ", flush=True)
    if options.json is not None:
        device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
        about = {"date": datetime.date.today().isoformat(), "device": device}
        options.json.write_text(json.dumps({**about, "results": results}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
