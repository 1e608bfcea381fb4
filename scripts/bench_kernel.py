"""Time the fused kernel against Inductor and against a copy of the same bytes, on this machine's GPU.

    python scripts/bench_kernel.py [--quick] [--json FILE] [--plot FILE]

Every provider of a case runs in one process, one after the other in five rounds, as CUDA graphs of many launches. What
is larger than the L2 cache is read from, and written to, as many buffers as overflow it. Inductor chooses its launch
configurations three times, and the fastest counts. A case whose fused result is not exact (as
``gdn_backend/exactness.py`` has it) is reported as a failure and not timed.

Providers: ``inductor`` is eager's code compiled by Inductor, quantisation and all; ``opaque quant`` the same with the
quantisation in a custom op, a Triton kernel with a program for each group as transformers has launched it; ``two
graphs`` with the quantisation compiled by Inductor too, but by itself: the best that an opaque one could be. ``fused``
is the op with eager's roundings, ``fused fp32`` without them. ``copy`` reads x and gate and writes codes and scales
with nothing computed, its tile size tuned case by case: the floor.
"""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime
import functools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from rich.console import Console
from rich.table import Table
from torch._inductor.runtime.cache_dir_utils import cache_dir

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gdn_backend.exactness import Distance, measure_distance  # noqa: E402
from gdn_backend.kernels.reference import quantise, reference, rms_norm_gated  # noqa: E402
from gdn_backend.ops.call import encode_call  # noqa: E402
from gdn_backend.ops.gated_rmsnorm_quant import gated_rmsnorm_fp8_quant_op  # noqa: E402
from gdn_backend.ops.spec import FusedSpec  # noqa: E402
from tests.e2e.act_quant_kernel import act_quant  # noqa: E402

QWEN = ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
HEADS_32 = FusedSpec(hidden_size=4096, head_dim=128, norm_size=128, group_size=128, roundings=QWEN)
HEADS_16 = dataclasses.replace(HEADS_32, hidden_size=2048)
OLMO = dataclasses.replace(HEADS_32, hidden_size=5760, head_dim=192, norm_size=192)
MAMBA2 = dataclasses.replace(
    HEADS_32, hidden_size=8192, norm_size=1024, norm_before_gate=False, roundings=("output:bfloat16",)
)
EPS = 1e-6
ROUNDS = 5
COMPILED = ("inductor", "two graphs", "opaque quant")  # providers whose launches Inductor configures
INDUCTOR_ATTEMPTS = 3
CLOCKED = (8192, 65536)  # token counts where clock and power are looked at
L2_BYTES = 200_000_000  # several times any GPU's
RESULTS = ROOT / "scripts" / "results"

Launch = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One shape. ``strided``: the gate is the last columns of HF's projection ``[T, H/2, 768]``."""

    name: str
    spec: FusedSpec
    num_tokens: int
    strided: bool = False

    @property
    def label(self) -> str:
        return f"{self.name}, T={self.num_tokens}"

    @property
    def num_bytes(self) -> int:
        """Of x, gate, codes and scales, each moved once."""
        return self.num_tokens * (self.spec.hidden_size * (2 + 2 + 1) + self.spec.num_groups * 4)


def cases(quick: bool) -> list[Case]:
    """The named shapes."""
    tokens = (1, 16, 128, 2048, 8192) if quick else (1, 16, 128, 512, 2048, 8192, 32768, 65536)
    some = (1, 8192) if quick else (1, 16, 128, 2048, 8192)
    return [
        *(Case("32 heads of 128", HEADS_32, count) for count in tokens),
        *(Case("32 heads of 128, strided gate", HEADS_32, count, strided=True) for count in some),
        *(Case("16 heads of 128", HEADS_16, count) for count in some),
        *(Case("30 heads of 192 (OLMo)", OLMO, count) for count in some),
        *(Case("8192, norm of 1024, gate first (Mamba2)", MAMBA2, count) for count in some),
    ]


@dataclass(frozen=True)
class Buffers:
    """One set of inputs and outputs."""

    x: torch.Tensor
    gate: torch.Tensor
    weight: torch.Tensor
    codes: torch.Tensor
    scales: torch.Tensor


def make_buffers(case: Case, device: str = "cuda") -> list[Buffers]:
    """As many sets as overflow the L2 cache; one where all of a case fits a corner of it, as after a real kernel."""
    count = 1 if case.num_bytes < 4_000_000 else min(64, L2_BYTES // case.num_bytes + 1)
    hidden = case.spec.hidden_size
    width = case.spec.norm_size if case.spec.norm_before_gate else hidden
    weight = (1 + 0.1 * torch.randn(width, device=device)).bfloat16()

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16)

    def gate() -> torch.Tensor:
        if not case.strided:
            return normal(case.num_tokens, hidden)
        return normal(case.num_tokens, hidden // 256, 768)[..., 512:]

    return [
        Buffers(
            normal(case.num_tokens, hidden),
            gate(),
            weight,
            torch.empty(case.num_tokens, hidden, dtype=torch.uint8, device=device),
            torch.empty(case.num_tokens, case.spec.num_groups, device=device),
        )
        for _ in range(count)
    ]


@triton.jit(do_not_specialize=["num_rows"])
def _copy_kernel(
    x_ptr,
    gate_ptr,
    codes_ptr,
    scales_ptr,
    num_rows,
    gate_token_stride,
    gate_run_stride,
    HIDDEN: tl.constexpr,
    RUN: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Rows of 128 values: the bytes of the fused op and nothing else."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = tl.arange(0, 128)[None, :]
    token = (row // (HIDDEN // 128)).to(tl.int64)
    column = row % (HIDDEN // 128) * 128
    offsets = (token * HIDDEN + column)[:, None] + inside
    gate_offsets = (token * gate_token_stride + column // RUN * gate_run_stride + column % RUN)[:, None] + inside
    mask = (row < num_rows)[:, None]
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.int16, bitcast=True)
    gate = tl.load(gate_ptr + gate_offsets, mask=mask).to(tl.int16, bitcast=True)
    tl.store(codes_ptr + tl.max_contiguous(offsets, [1, 8]), (x ^ gate).to(tl.uint8), mask=mask)
    tl.store(scales_ptr + row, row.to(tl.float32), mask=row < num_rows)


#: (rows of 128, warps) that the copy is tuned over.
COPY_TILES = (
    (1, 1),
    (2, 1),
    (4, 1),
    (4, 2),
    (4, 4),
    (8, 1),
    (8, 2),
    (8, 4),
    (16, 2),
    (16, 4),
    (32, 4),
    (32, 8),
    (64, 8),
)


def copies(case: Case, buffers: list[Buffers]) -> dict[str, list[Launch]]:
    """The copy kernel, once for each of its tile sizes."""
    num_rows = case.num_tokens * case.spec.hidden_size // 128

    def launch(b: Buffers, rows: int, warps: int) -> Launch:
        strides = (b.gate.stride(0), b.gate.stride(1)) if case.strided else (case.spec.hidden_size, 0)
        run = 256 if case.strided else case.spec.hidden_size
        grid = (triton.cdiv(num_rows, rows),)
        return lambda: _copy_kernel[grid](
            b.x, b.gate, b.codes, b.scales, num_rows, *strides, case.spec.hidden_size, run, rows, num_warps=warps
        )

    return {f"copy {rows}x128/{warps}": [launch(b, rows, warps) for b in buffers] for rows, warps in COPY_TILES}


def eager_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, spec: FusedSpec) -> torch.Tensor:
    """The gated norm, ``[T, hidden]``, in the dtype of its last rounding."""
    return rms_norm_gated(
        x,
        gate.reshape(x.shape),
        weight,
        EPS,
        norm_before_gate=spec.norm_before_gate,
        norm_size=spec.norm_size,
        roundings=spec.roundings,
    )


@torch.library.custom_op("gdn_bench::act_quant", mutates_args=())
def act_quant_op(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A quantisation that Inductor cannot look into."""
    return act_quant(y)


@act_quant_op.register_fake
def _(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return y.new_empty(y.shape, dtype=torch.float8_e4m3fn), y.new_empty(len(y), y.shape[1] // 128, dtype=torch.float32)


def providers(case: Case, buffers: list[Buffers]) -> dict[str, list[Launch]]:
    """Everything but the copies, as functions to be captured."""
    spec = case.spec
    fp32 = dataclasses.replace(spec, roundings=())
    norm = torch.compile(lambda x, gate, weight: eager_norm(x, gate, weight, spec), dynamic=False)
    quant = torch.compile(lambda y: quantise(y, spec.group_size, spec.quant, spec.torch_fp8_dtype), dynamic=False)
    both = torch.compile(
        lambda x, gate, weight: quantise(
            eager_norm(x, gate, weight, spec), spec.group_size, spec.quant, spec.torch_fp8_dtype
        ),
        dynamic=False,
    )
    with_opaque = torch.compile(lambda x, gate, weight: act_quant_op(eager_norm(x, gate, weight, spec)), dynamic=False)

    def fused(b: Buffers, chosen: FusedSpec) -> Any:
        return gated_rmsnorm_fp8_quant_op(b.x, b.gate, b.weight, None, EPS, encode_call(chosen, "triton"))

    chosen: dict[str, Callable[[Buffers], Any]] = {
        "fused": lambda b: fused(b, spec),
        "fused fp32": lambda b: fused(b, fp32),
        "inductor": lambda b: both(b.x, b.gate, b.weight),
        "two graphs": lambda b: quant(norm(b.x, b.gate, b.weight)),
        "opaque quant": lambda b: with_opaque(b.x, b.gate, b.weight),
    }
    return {name: [functools.partial(call, b) for b in buffers] for name, call in chosen.items()}


def capture(launches: list[Launch], count: int) -> torch.cuda.CUDAGraph:
    """A graph of ``count`` launches that go round the buffers, and whose results do not take each other's memory."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        for launch in launches[:3]:
            launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    kept = collections.deque[Any](maxlen=len(launches))
    with torch.no_grad(), torch.cuda.graph(graph):
        for index in range(count):
            kept.append(launches[index % len(launches)]())
    return graph


def replay(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Microseconds of one launch: the median of a few replays."""
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def launches_of_a_graph(num_buffers: int) -> int:
    """How many launches a graph holds."""
    return max(num_buffers, 100 if num_buffers == 1 else 10)


def busy_clock(launches: list[Launch]) -> str:
    """What ``nvidia-smi`` says of clock and power half a second into running one provider; "" where there is none.

    What computes more also draws more, and a GPU at its limit lowers the clock: then times of long launches are its.
    """
    if shutil.which("nvidia-smi") is None:
        return ""
    count = launches_of_a_graph(len(launches))
    graph = capture(launches, count)
    for _ in range(math.ceil(2e6 / (count * replay(graph, count)))):
        graph.replay()
    time.sleep(0.5)
    uuid = torch.cuda.get_device_properties().uuid
    query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader", f"--id=GPU-{uuid}"]
    said = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    torch.cuda.synchronize()
    return said


def time_interleaved(named: dict[str, list[Launch]], num_buffers: int) -> dict[str, list[float]]:
    """Microseconds of each provider in each round, one provider after the other in every round."""
    count = launches_of_a_graph(num_buffers)
    return time_graphs({name: capture(launches, count) for name, launches in named.items()}, count)


def time_graphs(graphs: dict[str, torch.cuda.CUDAGraph], count: int) -> dict[str, list[float]]:
    """:func:`time_interleaved` for graphs of ``count`` launches."""
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for graph in graphs.values():
        replay(graph, count)
    for _ in range(ROUNDS):
        for name, graph in graphs.items():
            times[name].append(replay(graph, count))
    return times


def distance_from_eager(case: Case, launch: Launch, b: Buffers) -> Distance:
    """How far a provider's result is from eager's."""
    with torch.no_grad():
        codes, scales = launch()
        eager = reference(b.x, b.gate, b.weight, None, EPS, case.spec)
    return measure_distance(codes, scales, *eager)


def counts(distance: Distance) -> str:
    """How many codes and scales differ."""
    return f"{distance.codes_off}/{distance.codes} codes, {distance.scales_off}/{distance.scales} scales"


def measure(case: Case) -> dict[str, Any]:
    """Time all providers of a case; ``{"failed": why}`` where the fused result is not exact."""
    buffers = make_buffers(case)
    count = launches_of_a_graph(len(buffers))
    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for attempt in range(INDUCTOR_ATTEMPTS):
        forget_choices()
        torch.compiler.reset()
        named = providers(case, buffers)
        graphs |= {f"{name} {attempt}": capture(named[name], count) for name in COMPILED}
    distance = distance_from_eager(case, named["fused"][0], buffers[0])
    if not distance.is_exact(case.spec.rounding("output") or torch.float32):
        return {"case": case.label, "failed": f"not exact: {distance.render()}"}
    inductor_distance = distance_from_eager(case, named["inductor"][0], buffers[0])
    others = {name: launches for name, launches in named.items() if name not in COMPILED} | copies(case, buffers)
    times = time_graphs(graphs | {name: capture(launches, count) for name, launches in others.items()}, count)

    def fastest(prefix: str) -> str:
        return min((name for name in times if name.startswith(prefix)), key=lambda name: statistics.median(times[name]))

    copy = fastest("copy")
    kept = {name: times[fastest(f"{name} ") if name in COMPILED else name] for name in named} | {"copy": times[copy]}
    clocked = {"fused": named["fused"], "copy": others[copy]} if case.num_tokens in CLOCKED else {}
    return {
        "case": case.label,
        "shape": case.name,
        "num_tokens": case.num_tokens,
        "bytes": case.num_bytes,
        "copy_tile": copy,
        "microseconds": {
            name: {"median": statistics.median(values), "low": min(values), "high": max(values)}
            for name, values in kept.items()
        },
        "fused_from_eager": counts(distance),
        "inductor_from_eager": counts(inductor_distance),
        "clocks": {name: busy_clock(launches) for name, launches in clocked.items()},
    }


def warm(case: Case) -> None:
    """Compile all that a case launches, in a process of its own; the caches on disk keep it for :func:`measure`."""
    torch._inductor.config.compile_threads = 1
    buffers = make_buffers(case)[:1]
    with torch.no_grad():
        for launches in (providers(case, buffers) | copies(case, buffers)).values():
            launches[0]()
    torch.cuda.synchronize()


def forget_choices() -> None:
    """Have Inductor choose its launch configurations again.

    For :func:`warm` it timed them while others ran, and of kernels of a few microseconds it chooses badly now and then,
    by a factor of three.
    """
    for choice in Path(cache_dir()).rglob("*.best_config"):
        choice.unlink()


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Fused over copy, Inductor and opaque quant over fused, exact over fp32."""
    median = {name: times["median"] for name, times in result["microseconds"].items()}
    return {
        "fused / copy": median["fused"] / median["copy"],
        "inductor / fused": median["inductor"] / median["fused"],
        "opaque / fused": median["opaque quant"] / median["fused"],
        "exact / fp32": median["fused"] / median["fused fp32"],
    }


def missed_marks(result: dict[str, Any]) -> list[str]:
    """Where the times of a case are not what the kernel is meant to reach."""
    tokens, found = result["num_tokens"], ratios(result)
    nearest = next(mark for least, mark in ((8192, 1.10), (2048, 1.15), (128, 1.25), (0, 1.20)) if tokens >= least)
    least_gain = 1.5 if "strided" in result["shape"] and tokens >= 2048 else 1.1
    marks = [
        ("fused / copy", found["fused / copy"] <= nearest, f"at most {nearest:.2f}"),
        ("inductor / fused", found["inductor / fused"] >= least_gain, f"at least {least_gain:.1f}"),
        ("opaque / fused", found["opaque / fused"] >= 2.2, "at least 2.2"),
        ("exact / fp32", found["exact / fp32"] <= 1.03, "at most 1.03"),
    ]
    return [f"{result['case']}: {name} is {found[name]:.3f}, meant {mark}" for name, held, mark in marks if not held]


def render(results: list[dict[str, Any]], device: str) -> Table:
    """The table that is printed."""
    table = Table(title=f"Microseconds, medians of {ROUNDS} rounds (spread in percent); {device}")
    names = ("copy", "fused", "fused fp32", "inductor", "two graphs", "opaque quant")
    for column in ("case", *names, "TB/s", "fused/copy", "inductor/fused", "opaque/fused", "exact/fp32"):
        table.add_column(column, justify="left" if column == "case" else "right")
    table.add_column("fused from eager")
    table.add_column("Inductor from eager")
    for result in results:
        if "failed" in result:
            table.add_row(result["case"], f"[red]{result['failed']}[/red]")
            continue
        times = result["microseconds"]
        cells = [
            f"{times[name]['median']:.2f} ({100 * (times[name]['high'] / times[name]['low'] - 1):.0f})"
            for name in names
        ]
        bandwidth = result["bytes"] / times["fused"]["median"] * 1e-6
        table.add_row(
            result["case"],
            *cells,
            f"{bandwidth:.2f}",
            *(f"{value:.2f}" for value in ratios(result).values()),
            result["fused_from_eager"],
            result["inductor_from_eager"],
        )
    return table


def plot(results: list[dict[str, Any]], file: Path, device: str) -> None:
    """Time and share of the copy's bandwidth over T, for the contiguous and the strided gate of 32 heads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2))
    timed = [result for result in results if "failed" not in result]
    main = [result for result in timed if result["shape"] == HEADS_LABEL]
    tokens = [result["num_tokens"] for result in main]
    for name in ("opaque quant", "two graphs", "inductor", "fused", "copy"):
        axes[0].plot(tokens, [r["microseconds"][name]["median"] for r in main], marker="o", markersize=3, label=name)
    axes[0].set(xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", title=HEADS_LABEL)
    axes[0].legend()
    for shape in dict.fromkeys(result["shape"] for result in timed):
        chosen = [result for result in timed if result["shape"] == shape]
        share = [1 / ratios(result)["fused / copy"] for result in chosen]
        axes[1].plot([r["num_tokens"] for r in chosen], share, marker="o", markersize=3, label=shape)
    axes[1].set(xscale="log", ylim=(0, 1.05), xlabel="tokens", title="fused op: share of the copy's bandwidth")
    axes[1].legend(fontsize=7)
    figure.suptitle(device, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=130)


HEADS_LABEL = "32 heads of 128"


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; 1 where a result was not exact, 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer shapes")
    parser.add_argument("--jobs", type=int, default=min(8, os.cpu_count() or 1), help="processes that compile")
    parser.add_argument("--json", type=Path, default=RESULTS / "bench_kernel.json", help="where the numbers go")
    parser.add_argument("--plot", type=Path, default=RESULTS / "bench_kernel.png", help="where the plot goes")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("The kernel benchmark needs a GPU, and torch sees none.", file=sys.stderr)
        return 2
    device = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"
    torch.manual_seed(0)
    results = []
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(warm, cases(options.quick)))
    for case in cases(options.quick):
        results.append(measure(case))
        torch.cuda.empty_cache()
        print(results[-1]["case"], results[-1].get("failed", ""), file=sys.stderr)
    Console(width=240).print(render(results, device))
    missed = [line for result in results if "failed" not in result for line in missed_marks(result)]
    print("\n".join(missed) or "every mark is reached")
    about = {"date": datetime.date.today().isoformat(), "device": device, "rounds": ROUNDS}
    options.json.write_text(json.dumps({**about, "results": results, "missed_marks": missed}, indent=1) + "\n")
    plot(results, options.plot, device)
    return int(any("failed" in result for result in results))


if __name__ == "__main__":
    sys.exit(main())
