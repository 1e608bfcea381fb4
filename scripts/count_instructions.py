"""What the fused kernel compiles to for sm90, shape by shape: instructions, registers, shuffles. Needs no GPU.

    python scripts/count_instructions.py [--json FILE]

The shapes are ``bench_kernel.py``'s. Instructions are those that a thread issues, padding left out: the kernel has no
loops, and its only branches end a thread early.
"""

from __future__ import annotations

import argparse
import collections
import datetime
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from bench_kernel import EPS, RESULTS, Case, cases, make_buffers
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gdn_backend.kernels.configs import NVIDIA  # noqa: E402
from gdn_backend.kernels.gated_rmsnorm_quant import plan  # noqa: E402
from gdn_backend.kernels.gated_rmsnorm_quant_kernel import gated_rmsnorm_quant_kernel  # noqa: E402
from tests.kernels.listings import LISTINGS, compile_kernel, resource_usage, said_by  # noqa: E402

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z]\w*)", re.MULTILINE)
#: What pads the code behind its end: a branch to itself, and nothing.
PADDING = ("BRA", "NOP")


def count(case: Case) -> dict[str, Any]:
    """The counts of one shape."""
    b, spec = make_buffers(case, "meta")[0], case.spec
    programs, arguments = plan(
        b.x, b.gate, b.weight, None, EPS, spec, b.codes.view(spec.torch_fp8_dtype), b.scales, NVIDIA
    )
    num_warps = arguments["num_warps"]
    compiled = compile_kernel(gated_rmsnorm_quant_kernel, arguments, LISTINGS["sm90"].target)
    with tempfile.TemporaryDirectory() as folder:
        usage = resource_usage(compiled, Path(folder))
        binary = Path(folder) / "listed.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        listing = said_by("nvdisasm", "-c", str(binary))
    kinds = collections.Counter(INSTRUCTION.findall(listing))
    issued = sum(number for kind, number in kinds.items() if kind not in PADDING)
    values = case.num_tokens * spec.hidden_size / (programs * num_warps * 32)
    return {
        "case": case.label,
        "programs": programs,
        "warps": num_warps,
        "values of a thread": values,
        "instructions": issued,
        "of a value": issued / values,
        "registers": usage["REG"],
        "spilled bytes": usage["STACK"] + usage["LOCAL"],
        "shuffles": kinds["SHFL"] + kinds["REDUX"],
        "barriers": kinds["BAR"],
        "by kind": {kind: number for kind, number in kinds.most_common() if kind not in PADDING},
    }


def main() -> int:
    """Count, print a table, write the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS / "instructions.json", help="where the counts go")
    options = parser.parse_args()
    found = [count(case) for case in cases(quick=False)]
    columns = [name for name in found[0] if name != "by kind"]
    table = Table(title=f"The fused kernel on sm90; Triton {triton.__version__}")
    for name in columns:
        table.add_column(name, justify="left" if name == "case" else "right")
    for row in found:
        table.add_row(*(f"{row[name]:.1f}" if name == "of a value" else f"{row[name]}" for name in columns))
    Console(width=200).print(table)
    about = {"date": datetime.date.today().isoformat(), "triton": triton.__version__, "target": "sm90"}
    options.json.write_text(json.dumps({**about, "kernels": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
