"""How much of a compilation the backend's own passes take, and how that grows with the model.

    python scripts/bench_compile.py                     a cold compile of the demo model (4 layers): the passes' share
    python scripts/bench_compile.py --layers 4 12 48    the same for deeper models of the same widths (slow)
    python scripts/bench_compile.py --trace-only        the passes alone, on Dynamo's graphs of 2,000 to 20,000 nodes

A share of 1% or more, or a node that costs more than 1.25 times what it does in the smallest graph of 2,000 nodes or
more, ends with exit status 1. Every result goes to a file under ``scripts/results/``, with date, device and versions.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

import gdn_backend
from gdn_backend.backend import gdn_rocm, report_graph
from gdn_backend.huggingface.models import Qwen3NextSize, build_qwen3_next, cache_argument, new_cache
from gdn_backend.options import Settings
from gdn_backend.report.model import FusionReport

BATCH_SIZE, PROMPT_TOKENS = 2, 24
MAX_SHARE = 0.01
TRACED_LAYERS = [7, 17, 34, 68]  # about 2,000, 5,000, 10,000 and 20,000 nodes
FROM_NODES, MAX_GROWTH = 2000, 1.25  # of the time for a node
REPEATS = 7  # of the passes on one captured graph


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", metavar="N", help="default 4; 7 17 34 68 with --trace-only")
    parser.add_argument("--trace-only", action="store_true", help="time the passes alone, with nothing behind them")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the result")
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)  # in a process of its own
    parsed = parser.parse_args()
    layers = parsed.layers or (TRACED_LAYERS if parsed.trace_only else [4])
    if parsed.one:
        print(json.dumps(compile_cold(layers[0], parsed.device)))
        return 0
    if parsed.trace_only:
        measure_traced(4, parsed.device)  # the first graph of a process pays for imports
        rows = [_shown(measure_traced(count, parsed.device)) for count in layers]
    else:
        rows = [_shown(_compile_in_new_process(count, parsed.device)) for count in layers]
    failures = judge(rows)
    name = f"compile_{'trace' if parsed.trace_only else 'cold'}_{parsed.device.partition(':')[0]}.json"
    parsed.out.mkdir(parents=True, exist_ok=True)
    (parsed.out / name).write_text(json.dumps(_described(rows, failures, parsed.device), indent=2) + "\n")
    print("\n".join(failures) or f"all limits held; {parsed.out / name}")
    return 1 if failures else 0


def compile_cold(num_layers: int, device: str) -> dict[str, Any]:
    """Compile a prefill with nothing cached; milliseconds of the passes and of the whole first call."""
    inductor_seconds: list[float] = []
    run = _prefill(num_layers, device, _timing_inductor(inductor_seconds))
    start = time.perf_counter()
    run()
    seconds = time.perf_counter() - start
    report = gdn_backend.last_report()
    assert report is not None, "the backend was not called"
    return {
        **_row(num_layers, report.num_nodes, report.num_fused, dict(report.timings_ms)),
        "first_call_ms": round(seconds * 1e3, 1),
        "share": round(report.timings_ms["total"] / (seconds * 1e3), 5),
        # Everything that the backend does around Inductor, drawing the report and importing included.
        "around_inductor_ms": round(inductor_seconds[0] - inductor_seconds[1], 1),
    }


def measure_traced(num_layers: int, device: str) -> dict[str, Any]:
    """Milliseconds of the passes on a prefill graph as Dynamo captured it, in the fastest of several runs.

    ``cpu_ms`` is the process's own time, which other work on the machine does not lengthen.
    """
    runs: list[tuple[float, FusionReport]] = []

    def passes_only(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        for graph_id in range(REPEATS):
            start = time.process_time()
            report = report_graph(gm, Settings(), graph_id)
            runs.append(((time.process_time() - start) * 1e3, report))
        return gm.forward

    torch._dynamo.reset()
    _prefill(num_layers, device, passes_only)()
    cpu_ms, fastest = min(runs, key=lambda run: run[0])
    return {
        **_row(num_layers, fastest.num_nodes, fastest.num_fused, dict(fastest.timings_ms)),
        "cpu_ms": round(cpu_ms, 1),
        "cpu_us_per_node": round(cpu_ms * 1e3 / fastest.num_nodes, 1),
        "median_cpu_ms": round(statistics.median(run[0] for run in runs), 1),
    }


def judge(rows: list[dict[str, Any]]) -> list[str]:
    """What was not held to: one line for each limit that a row is over, by itself or beside the smallest graph."""
    failures = [
        f"{row['num_layers']} layers: the passes took {row['share']:.2%} of the compilation, at most {MAX_SHARE:.0%}"
        for row in rows
        if row.get("share", 0) >= MAX_SHARE
    ]
    failures += [
        f"{row['num_layers']} layers: {row['num_fused']} of {row['num_sites']} sites fused"
        for row in rows
        if row["num_fused"] != row["num_sites"]
    ]
    traced = [row for row in rows if "cpu_us_per_node" in row and row["num_nodes"] >= FROM_NODES]
    smallest = min(traced, key=lambda row: row["num_nodes"], default=None)
    failures += [
        f"{row['num_nodes']:,} nodes: {row['cpu_us_per_node']} us each, {smallest['cpu_us_per_node']} us among "
        f"{smallest['num_nodes']:,}; at most {MAX_GROWTH} times that"
        for row in traced
        if smallest and row["cpu_us_per_node"] > MAX_GROWTH * smallest["cpu_us_per_node"]
    ]
    return failures


def _prefill(num_layers: int, device: str, backend: Callable[..., Any]) -> Callable[[], Any]:
    """A call of the demo model at this depth, compiled when it is first made."""
    model = build_qwen3_next(Qwen3NextSize(num_layers=num_layers), device=device)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    tokens = torch.zeros(BATCH_SIZE, PROMPT_TOKENS, dtype=torch.long, device=device)
    cache = {cache_argument(model): new_cache(model, max_tokens=PROMPT_TOKENS)}

    def run() -> Any:
        with torch.no_grad():
            return compiled(input_ids=tokens, use_cache=True, **cache)

    return run


def _timing_inductor(milliseconds: list[float]) -> Callable[..., Any]:
    """The backend, noting how long a call of it took and how much of that was Inductor."""
    from torch._inductor.compile_fx import compile_fx

    def timed_inductor(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        result = compile_fx(*args, **kwargs)
        milliseconds.append((time.perf_counter() - start) * 1e3)
        return result

    def backend(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        start = time.perf_counter()
        with mock.patch("torch._inductor.compile_fx.compile_fx", timed_inductor):
            result = gdn_rocm(gm, example_inputs)
        milliseconds.insert(0, (time.perf_counter() - start) * 1e3)
        return result

    return backend


def _compile_in_new_process(num_layers: int, device: str) -> dict[str, Any]:
    """:func:`compile_cold` where nothing was compiled before and no cache is found."""
    with tempfile.TemporaryDirectory() as cache:
        command = [sys.executable, __file__, "--one", "--layers", str(num_layers), "--device", device]
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TRITON_CACHE_DIR": f"{cache}/triton"}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _row(num_layers: int, num_nodes: int, num_fused: int, timings_ms: dict[str, float]) -> dict[str, Any]:
    return {
        "num_layers": num_layers,
        "num_nodes": num_nodes,
        "num_sites": Qwen3NextSize(num_layers=num_layers).num_gated_delta_layers,
        "num_fused": num_fused,
        "timings_ms": timings_ms,
    }


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    text = f"{row['num_layers']:3} layers, {row['num_nodes']:6,} nodes: passes {row['timings_ms']['total']:8.1f} ms"
    if "cpu_ms" in row:
        text += f" ({row['cpu_ms']:.1f} ms of CPU time, {row['cpu_us_per_node']:.1f} us a node)"
    if "share" in row:
        text += f", {row['share']:.3%} of a first call of {row['first_call_ms'] / 1e3:.1f} s"
    print(text, flush=True)
    return row


def _described(rows: list[dict[str, Any]], failures: list[str], device: str) -> dict[str, Any]:
    is_gpu = torch.device(device).type == "cuda"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name(device) if is_gpu else f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "gdn_backend": gdn_backend.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "tokens": [BATCH_SIZE, PROMPT_TOKENS],
        "rows": rows,
        "failures": failures,
    }


if __name__ == "__main__":
    sys.exit(main())
