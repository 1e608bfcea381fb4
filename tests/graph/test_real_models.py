"""The gated norms of Hugging Face's own layers, prefill and single-token decode, static and dynamic.

A layer hands back the codes and scales that its output projection would read; eager's are compared byte by byte.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.harness import assert_equals_eager, run

pytest.importorskip("transformers")

from gdn_backend.huggingface.layers import LAYER_FORMS, LayerForm, build_layer, is_available, new_layer_cache, run_layer

#: One family for each way of writing the norm; the others, whose norms are written the same, are slow tests. The traces
#: of a dynamic prefill are the longest, so only one norm before its gate and one behind it run by default.
STATIC = ("qwen3_next", "qwen3_next, nk=nv", "qwen4_exp, sigmoid", "olmo_hybrid", "kimi_linear", "mamba2",
          "falcon_h1, norm before gate", "falcon_h1, gate before norm", "falcon_h1, no norm")  # fmt: skip
DYNAMIC_PREFILL = ("qwen3_next", "mamba2")
DYNAMIC_DECODE = ("qwen3_5", "kimi_linear", "mamba2")
BATCH, PREFILL_LENGTH = 2, 5


class CachedLayer(nn.Module):
    """A layer with its cache."""

    def __init__(self, layer: nn.Module, cache: Any) -> None:
        super().__init__()
        self.layer, self.cache = layer, cache

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return run_layer(self.layer, hidden_states, self.cache)


def _forms(fast: tuple[str, ...]) -> list[Any]:
    return [
        pytest.param(form, id=form.name, marks=() if form.name in fast else pytest.mark.slow) for form in LAYER_FORMS
    ]


def _layer(form: LayerForm, quantisation: str = "decomposed") -> CachedLayer:
    if not is_available(form):
        pytest.skip(f"this transformers has no {form.module}")
    layer = build_layer(form, quantisation=quantisation)
    return CachedLayer(layer, new_layer_cache(layer))


def _hidden_states(model: CachedLayer, length: int) -> torch.Tensor:
    return torch.randn(BATCH, length, model.layer.config.hidden_size).bfloat16()


def _prefilled(form: LayerForm) -> CachedLayer:
    model = _layer(form)
    with torch.no_grad():
        model(_hidden_states(model, PREFILL_LENGTH))
    return model


def _check(form: LayerForm, model: CachedLayer, *lengths: int, dynamic: bool = False) -> None:
    first, *more = ([_hidden_states(model, length)] for length in lengths)
    outcome = run(model, *first, dynamic=dynamic, also=more)
    assert not outcome.passes.misses, [miss.render() for miss in outcome.passes.misses]
    assert len(outcome.passes.matches) == form.num_sites
    assert_equals_eager(outcome)


@pytest.mark.parametrize("form", _forms(STATIC))
def test_prefill(form: LayerForm) -> None:
    _check(form, _layer(form), PREFILL_LENGTH)


@pytest.mark.parametrize("form", _forms(STATIC))
def test_decode(form: LayerForm) -> None:
    _check(form, _prefilled(form), 1)


@pytest.mark.parametrize("form", _forms(DYNAMIC_PREFILL))
def test_prefill_dynamic(form: LayerForm) -> None:
    _check(form, _layer(form), PREFILL_LENGTH, dynamic=True)


@pytest.mark.parametrize("form", _forms(DYNAMIC_DECODE))
def test_decode_dynamic(form: LayerForm) -> None:
    _check(form, _prefilled(form), 1, dynamic=True)


@pytest.mark.parametrize("quantisation", ["op", "token"])
def test_other_quantisations(quantisation: str) -> None:
    form = next(form for form in LAYER_FORMS if form.name == "mamba2")
    _check(form, _layer(form, quantisation), PREFILL_LENGTH)
