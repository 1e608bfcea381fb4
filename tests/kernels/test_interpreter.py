"""The Triton kernel in Triton's interpreter, where there is no GPU: its cuts, layouts, formulas and roundings."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.interpreted import RANDOM_CASES
from tests.kernels.specs import SPECS


def test_every_spec_and_random_ones_are_exact() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) >= len(SPECS) + RANDOM_CASES - 5  # some of the random ones are drawn twice
    assert {name: distance for name, distance in found.items() if distance} == {}
