"""Writes scripts/results/model_table.md, by running the matcher: norms that are found, quantisations that are fused.

    python scripts/model_table.py [--only qwen3_next] [--sinks]

First table: every layer is captured by Dynamo (no Inductor) as prefill and as single-token decode, with static and with
dynamic shapes; the fused graph is interpreted and its codes and scales are compared with eager's byte by byte. Second
table: every form of quantisation behind Qwen3-Next's norm, fused and compared, or refused by name. Ops of other
packages are stand-ins with their schemas and formulas.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from gdn_backend.ops.fp8_quant import fp8_quant  # noqa: E402
from gdn_backend.ops.spec import QuantSpec  # noqa: E402
from tests.graph import quant_ops  # noqa: E402
from tests.graph.harness import Passes, run, same_bytes  # noqa: E402
from tests.graph.sites import UNQUANTISED, make_inputs, site  # noqa: E402
from tests.graph.triton_launch import ACT_QUANT_SOURCES, run_launch  # noqa: E402

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
    config: Any = layer.config
    hidden_states = torch.randn(BATCH, PREFILL_LENGTH, config.hidden_size).bfloat16()
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


def plain(x: torch.Tensor, power: Callable[[torch.Tensor], torch.Tensor] | None = None, size: int | None = 128) -> Any:
    """A quantisation in plain torch, ``size=None`` per token."""
    groups = x.view(*x.shape[:-1], -1, size or x.shape[-1])
    scales = (groups.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-10)
    scales = scales if power is None else power(scales)
    codes = (groups.float() / scales).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return codes.view(x.shape), scales.squeeze(-1)


def column(result: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales made column-major, as vLLM's native path does it."""
    return result[0], result[1].t().contiguous().t()


def per_tensor(x: torch.Tensor) -> Any:
    scale = x.abs().amax().float() / 448.0
    return (x.float() / scale).to(torch.float8_e4m3fn), scale


def static(x: torch.Tensor) -> Any:
    return (x.float() / 0.5).to(torch.float8_e4m3fn)


def fake(x: torch.Tensor) -> Any:
    codes, scales = plain(x)
    return (codes.to(x.dtype).view(*x.shape[:-1], -1, 128) * scales.unsqueeze(-1)).view(x.shape)


def by_logarithm(scales: torch.Tensor) -> torch.Tensor:
    return scales.log2().ceil().exp2()


def own(steps: Any = None, **options: Any) -> Callable[[torch.Tensor], Any]:
    quant = QuantSpec(options.pop("floor", (("div", 448.0), ("max", 1e-10))) + (steps or ()), clamp=448.0, **options)
    return lambda x: fp8_quant(x, 128, quant)


SINK_FORMS = ("fp32", "UE8M0, log2", "UE8M0, bits", "column-major", "per token", "per tensor", "static", "fake")
VLLM, HUB = torch.ops.vllm, torch.ops.finegrained_fp8_0a1b2c3
SINKS: dict[str, dict[str, Callable[[torch.Tensor], Any]]] = {
    "plain torch": {
        "fp32": plain,
        "UE8M0, log2": lambda x: plain(x, by_logarithm),
        "UE8M0, bits": lambda x: plain(x, quant_ops.ceil_to_ue8m0),
        "column-major": lambda x: column(plain(x)),
        "per token": lambda x: plain(x, size=None),
        "per tensor": per_tensor,
        "static": static,
        "fake": fake,
    },
    "DeepGEMM's cast, padded": {
        "fp32": quant_ops.deepgemm_cast,
        "UE8M0, bits": lambda x: quant_ops.deepgemm_cast(x, ue8m0=True),
    },
    "gdn_backend::fp8_quant": {
        "fp32": own(),
        "UE8M0, log2": own((("exp2_ceil_log2",),)),
        "UE8M0, bits": own((("ceil_pow2_bits",),)),
        "column-major": own(scale_layout="column"),
        "per token": lambda x: fp8_quant(x, None),
    },
    "_C::per_token_group_fp8_quant (vLLM)": {
        "fp32": quant_ops.call_group_writer,
        "UE8M0, log2": lambda x: quant_ops.call_group_writer(x, ue8m0=True),
        "column-major": lambda x: quant_ops.call_group_writer(x, column=True),
    },
    "_C::*_scaled_fp8_quant (vLLM)": {
        "per token": quant_ops.call_token_writer,
        "per tensor": quant_ops.call_tensor_writer,
        "static": quant_ops.call_static_writer,
    },
    "vllm::triton_per_token_group_quant_fp8": {"fp32": lambda x: VLLM.triton_per_token_group_quant_fp8(x, 128)},
    "vllm::rocm_aiter_group_fp8_quant": {
        "fp32": lambda x: VLLM.rocm_aiter_group_fp8_quant(x, 128),
        "column-major": lambda x: VLLM.rocm_aiter_group_fp8_quant(x, 128, True),
    },
    "finegrained_fp8_*::fp8_act_quant (hub)": {"fp32": HUB.fp8_act_quant},
    "an op that is not known": {"fp32": torch.ops.somebody.secret_quant},
}


def survey_sink(quantise: Callable[[torch.Tensor], Any]) -> str:
    """``fused``, or the reason of the refusal."""
    with torch.no_grad():
        outcome = run(site(UNQUANTISED, result=lambda c: quantise(c.rows)), *make_inputs())
    return _verdict(outcome.passes, all(map(same_bytes, outcome.actual, outcome.expected)))


def survey_launch(scale: str, codes: str, formula: Callable[[torch.Tensor], Any]) -> str:
    """The same for a Triton kernel's launch; ``formula`` is what it computes."""
    passes, fused, rows = run_launch(scale, codes)
    with torch.no_grad():
        return _verdict(passes, all(map(same_bytes, fused(), formula(rows))))


def _verdict(passes: Passes, is_exact: bool) -> str:
    if passes.misses:
        return ", ".join(miss.reason.name for miss in passes.misses)
    return "fused" if is_exact and len(passes.matches) == 1 else "**neither fused nor refused**"


def sink_rows() -> Iterator[str]:
    """The lines of the second table, the head first."""
    yield "| quantisation | " + " | ".join(SINK_FORMS) + " |"
    yield "|---" * (len(SINK_FORMS) + 1) + "|"
    for name, forms in SINKS.items():
        cells = [survey_sink(forms[form]) if form in forms else "" for form in SINK_FORMS]
        yield f"| `{name}` | " + " | ".join(cells) + " |"
    launches = {survey_launch(*source) for source in ACT_QUANT_SOURCES.values()}
    yield f"| `act_quant_kernel` (Triton) | {', '.join(launches)} |" + " |" * (len(SINK_FORMS) - 1)


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
    parser.add_argument("--sinks", action="store_true", help="the second table alone; prints and writes nothing")
    arguments = parser.parse_args()
    lines = [
        "# What the matcher finds",
        "",
        f"Written by `scripts/model_table.py` on {datetime.date.today()}, on a CPU ({platform.machine()}), with torch "
        f"{torch.__version__} and transformers {transformers.__version__}.",
        "",
        "Gated norms of Hugging Face's layers in front of a quantised output projection: sites fused / expected. "
        "Codes and scales of every fused layer were byte-equal to eager's.",
        "",
    ]
    sections = [] if arguments.sinks else [rows(arguments.only)]
    sections += [] if arguments.only else [sink_rows()]
    for index, section in enumerate(sections):
        if index:
            lines += [
                "",
                "Quantisations behind Qwen3-Next's norm: fused, byte-equal to eager's, or the reason given. "
                "Empty: there is no such form.",
                "",
            ]
        for line in section:
            print(line, flush=True)
            lines.append(line)
    if len(sections) == 2:
        RESULTS.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
