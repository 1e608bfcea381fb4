"""A compiled graph on disk is never served to another implementation, formula or kernel (field case F34).

Each run is a Python process of its own, all with one cache directory and one copy of the package that the test may
edit.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gdn_backend

CODE = """
import json, sys, torch
from torch._dynamo.utils import counters
from gdn_backend.ops.call import encode_call, encode_quant, implementation_version
from gdn_backend.ops.spec import FusedSpec, QuantSpec
import gdn_backend.ops.fp8_quant, gdn_backend.ops.gated_rmsnorm_quant

floor, kernel = float(sys.argv[1]), sys.argv[2]
quant = QuantSpec((("div", 448.0), ("max", floor)), clamp=448.0)
call = encode_call(FusedSpec(256, 128, 128, 128, quant=quant), kernel)
spec = encode_quant(quant, torch.float8_e4m3fn)

@torch.compile(fullgraph=True)
def run(x, gate, weight):
    _, fused = torch.ops.gdn_backend.gated_rmsnorm_fp8_quant(x, gate, weight, None, 1e-6, call)
    _, alone = torch.ops.gdn_backend.fp8_quant(x, 128, spec)
    return fused, alone

with torch.no_grad():
    fused, alone = run(torch.zeros(2, 256), torch.zeros(2, 256), torch.ones(128))
result = {"fused": fused[0, 0].item(), "alone": alone[0, 0].item(), "version": implementation_version()}
print(json.dumps({**result, "hits": counters["aot_autograd"]["autograd_cache_hit"]}))
"""


class Machine:
    """Runs :data:`CODE` with a copy of the package and a cache directory."""

    def __init__(self, folder: Path) -> None:
        self.package = folder / "gdn_backend"
        self.cache = folder / "cache"
        shutil.copytree(Path(gdn_backend.__file__).parent, self.package, ignore=shutil.ignore_patterns("__pycache__"))

    def run(self, floor: float = 0.5, kernel: str = "reference") -> dict[str, Any]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.package.parent),
            "TORCHINDUCTOR_CACHE_DIR": str(self.cache),
            "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, "-c", CODE, str(floor), kernel]
        done = subprocess.run(
            command, env=environment, cwd=self.package.parent, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.package / file
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.field_case("F34")
def test_a_changed_implementation_is_compiled_anew(machine: Machine) -> None:
    first = machine.run()
    assert (first["fused"], first["alone"]) == (0.5, 0.5)
    assert first["hits"] == 0

    again = machine.run()
    assert again["hits"] == 1, "nothing was cached, so this test shows nothing"
    assert (again["fused"], again["alone"]) == (0.5, 0.5)

    machine.edit("kernels/reference.py", "value = value.clamp(min=bound)", "value = value.clamp(min=2 * bound)")
    changed = machine.run()
    assert changed["version"] != first["version"]
    assert changed["hits"] == 0
    assert (changed["fused"], changed["alone"]) == (1.0, 1.0), "the body that was compiled before was served"


@pytest.mark.field_case("F34")
@pytest.mark.slow
def test_another_formula_and_another_kernel_are_compiled_anew(machine: Machine) -> None:
    machine.run()
    other_formula = machine.run(floor=0.25)
    assert (other_formula["fused"], other_formula["alone"]) == (0.25, 0.25)
    assert other_formula["hits"] == 0
    assert machine.run(kernel="triton")["hits"] == 0


@pytest.mark.slow
def test_without_the_version_the_old_body_would_be_served(machine: Machine) -> None:
    """The fault that the version is there for, so that the test above is known to be able to see it."""
    machine.edit("ops/call.py", "digest.update(path.read_bytes())", "pass")
    machine.run()
    machine.edit("kernels/reference.py", "value = value.clamp(min=bound)", "value = value.clamp(min=2 * bound)")
    stale = machine.run()
    assert stale["hits"] == 1
    assert (stale["fused"], stale["alone"]) == (0.5, 0.5)
