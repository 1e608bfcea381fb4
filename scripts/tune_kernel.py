"""Launch configurations of the fused kernel against each other: for choosing those of ``kernels/configs.py``.

    python scripts/tune_kernel.py [--json FILE]

Each configuration's time is given as times that of ``bench_kernel.py``'s copy of the same bytes, both from one run.
Needs a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import itertools
import json
import multiprocessing
import os
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from bench_kernel import EPS, RESULTS, Buffers, Case, Launch, cases, copies, make_buffers, time_interleaved

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gdn_backend.kernels.configs import ACCESS, LaunchConfig, describe  # noqa: E402
from gdn_backend.kernels.gated_rmsnorm_quant import plan  # noqa: E402
from gdn_backend.kernels.gated_rmsnorm_quant_kernel import gated_rmsnorm_quant_kernel  # noqa: E402

TOKENS = (1, 16, 128, 512, 2048, 8192, 32768)


def configurations(case: Case) -> list[LaunchConfig]:
    """Programs of up to 8,192 values, up to 48 of them in a thread."""
    arguments = plan_for(case, make_buffers(dataclasses.replace(case, num_tokens=1))[0], None)[1]
    piece, pieces, parts = arguments["PIECE"], arguments["PIECES"], arguments["PARTS"]
    found = []
    for units, num_warps in itertools.product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8)):
        values = units * pieces * piece // (32 * num_warps)  # of a part, in a thread
        if 4 <= values <= 32 and values * parts <= 48 and units * parts * pieces * piece <= 8192:
            found.append(LaunchConfig(units, max(1, values // ACCESS), num_warps))
    return found


def plan_for(case: Case, buffers: Buffers, config: LaunchConfig | None) -> tuple[Any, dict[str, Any]]:
    """Programs and arguments of a launch that writes to the same tensors every time."""
    codes = buffers.codes.view(case.spec.torch_fp8_dtype)
    machine = describe(codes.device)
    return plan(
        buffers.x, buffers.gate, buffers.weight, None, EPS, case.spec, codes, buffers.scales, machine, config=config
    )


def launch(case: Case, buffers: Buffers, config: LaunchConfig) -> Launch:
    """The kernel of a configuration."""
    programs, arguments = plan_for(case, buffers, config)
    return lambda: gated_rmsnorm_quant_kernel[(programs,)](**arguments)


def warm(case: Case, config: LaunchConfig) -> None:
    """Compile a configuration, in a process of its own."""
    launch(case, make_buffers(case)[0], config)()
    torch.cuda.synchronize()


def measure(case: Case) -> dict[str, Any]:
    """How many times the copy's time each configuration takes."""
    buffers = make_buffers(case)
    named = {
        f"units={config.units} chunks={config.chunks} warps={config.num_warps}": [
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
    parser.add_argument("--json", type=Path, default=RESULTS / "tune_kernel.json", help="where the numbers go")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("Launch configurations need a GPU, and torch sees none.", file=sys.stderr)
        return 2
    shapes = {case.name: dataclasses.replace(case, num_tokens=1) for case in cases(quick=False)}.values()
    pairs = [(case, config) for case in shapes for config in configurations(case)]
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm, *zip(*pairs, strict=True)))
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    about = {"date": datetime.date.today().isoformat(), "device": device}
    results = []
    for case in (dataclasses.replace(shape, num_tokens=count) for shape in shapes for count in TOKENS):
        results.append(measure(case))
        torch.cuda.empty_cache()
        best = sorted(results[-1]["ratios"].items(), key=lambda item: item[1])[:5]
        print(case.label, *(f"{name}: {ratio:.3f}" for name, ratio in best), sep="\n    ", flush=True)
        options.json.write_text(
            json.dumps({**about, "results": results}, indent=1) + "\n"
        )  # lest a time limit take all
    return 0


if __name__ == "__main__":
    sys.exit(main())
