"""Writes scripts/results/model_table.md: which gated norms of Hugging Face's layers are found, by running the matcher.

    python scripts/model_table.py [--only qwen3_next]

Every layer is captured by Dynamo (no Inductor) as prefill and as single-token decode, with static and with dynamic
shapes; the fused graph is interpreted and its codes and scales are compared with eager's byte by byte.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gdn_backend.huggingface.layers import (  # noqa: E402
    LAYER_FORMS,
    LayerForm,
    build_layer,
    is_available,
    new_layer_cache,
    run_layer,
)
from tests.graph.harness import Passes, same_bytes  # noqa: E402

RESULTS = ROOT / "scripts" / "results" / "model_table.md"
BATCH, PREFILL_LENGTH = 2, 5
COLUMNS = (("prefill", False), ("decode", False), ("prefill", True), ("decode", True))


@dataclass(frozen=True)
class Cell:
    """One layer in one phase."""

    found: int
    missed: int
    expected: int
    is_exact: bool

    @property
    def is_complete(self) -> bool:
        return self.found == self.expected and not self.missed and self.is_exact

    def render(self) -> str:
        text = f"{self.found}/{self.expected}"
        return text if self.is_complete else f"**{text}, {self.missed} missed, exact: {self.is_exact}**"


def survey(form: LayerForm, phase: str, dynamic: bool) -> Cell:
    """Captures a layer and counts its sites."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = build_layer(form)
    cache = new_layer_cache(layer)
    hidden_states = torch.randn(BATCH, PREFILL_LENGTH, layer.config.hidden_size).bfloat16()
    passes = Passes()
    with torch.no_grad():
        if phase == "decode":
            run_layer(layer, hidden_states, cache)
            hidden_states = hidden_states[:, :1]
        expected = run_layer(layer, hidden_states, copy.deepcopy(cache))
        compiled = torch.compile(layer, backend=passes.backend, dynamic=dynamic)
        actual = run_layer(compiled, hidden_states, cache)
    is_exact = all(map(same_bytes, actual, expected))
    return Cell(len(passes.matches), len(passes.misses), form.num_sites, is_exact)


def rows(only: str) -> Iterator[str]:
    """The lines of the table, the head first."""
    yield "| layer | " + " | ".join(f"{phase}{', dynamic' if dynamic else ''}" for phase, dynamic in COLUMNS) + " |"
    yield "|---" * (len(COLUMNS) + 1) + "|"
    for form in LAYER_FORMS:
        if only not in form.name:
            continue
        if not is_available(form):
            yield f"| {form.name} | not in this transformers |" + " |" * (len(COLUMNS) - 1)
            continue
        yield f"| {form.name} | " + " | ".join(survey(form, *column).render() for column in COLUMNS) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="layers whose name contains this; prints and writes nothing")
    arguments = parser.parse_args()
    head = (
        "# Gated norms found in Hugging Face's layers\n\n"
        f"Written by `scripts/model_table.py` with torch {torch.__version__} and transformers "
        f"{transformers.__version__}: sites fused / expected. "
        "Every fused layer's codes and scales were byte-equal to eager's.\n"
    )
    lines = [head]
    for line in rows(arguments.only):
        print(line, flush=True)
        lines.append(line)
    if not arguments.only:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
