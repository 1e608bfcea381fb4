"""Hugging Face's layers compiled by Inductor: three ways of writing the norm, each held against eager.

What is found in every family is in ``tests/graph/test_real_models.py``, without Inductor.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gdn_backend
from tests.exactness import assert_exact

pytest.importorskip("transformers")

from gdn_backend.huggingface.layers import LAYER_FORMS, build_layer, is_available, new_layer_cache, run_layer

#: A norm of 192 under groups of 128 that straddle heads; the gate before the norm; a sigmoid gate with one rounding.
FAMILIES = ("olmo_hybrid", "mamba2", "kimi_linear")
BATCH, PREFILL_LENGTH = 2, 5


class WithNormInputs(nn.Module):
    """A layer that returns, beside its codes and scales, the x and gate that its norm got."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.seen: list[torch.Tensor] = []
        norms = [module for module in layer.modules() if "Norm" in type(module).__name__]
        (self.norm,) = [norm for norm in norms if "Gated" in type(norm).__name__]
        self.norm.register_forward_pre_hook(self._record, with_kwargs=True)

    def _record(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.seen = [*args, *kwargs.values()]

    def forward(self, hidden_states: torch.Tensor, cache: Any) -> tuple[torch.Tensor, ...]:
        codes, scales = run_layer(self.layer, hidden_states, cache)
        return (codes, scales, *self.seen)


@pytest.mark.parametrize("name", [*FAMILIES[:2], pytest.param(FAMILIES[2], marks=pytest.mark.slow)])
def test_compiled_layer_is_exact(name: str) -> None:
    form = next(form for form in LAYER_FORMS if form.name == name)
    if not is_available(form):
        pytest.skip(f"this transformers has no {form.module}")
    layer = build_layer(form)
    model, cache = WithNormInputs(layer), new_layer_cache(layer)
    compiled = torch.compile(model, backend="gdn_rocm", fullgraph=True)
    for length in (PREFILL_LENGTH, 1):
        hidden_states = torch.randn(BATCH, length, layer.config.hidden_size).bfloat16()
        with torch.no_grad():
            codes, scales, x, gate = compiled(hidden_states, cache)
            normed = model.norm(x, gate).to(hidden_states.dtype)  # Mamba2's prefill rounds behind its norm
            expected = layer.get_submodule(form.projection)(normed.reshape(codes.shape))
        assert_exact(codes, scales, *expected, input_dtype=normed.dtype)
    assert [(report.num_fused, report.num_missed) for report in gdn_backend.reports()] == [(1, 0)] * 2
