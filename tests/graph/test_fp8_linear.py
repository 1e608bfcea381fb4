"""transformers' own ``FP8Linear`` behind its own Gated DeltaNet layer: the graph that a block-FP8 checkpoint gives.

Its kernels come from the hub and run on GPUs alone. In their place stand DeepGEMM's cast, written out, and ops with the
matmuls' schemas.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.graph.harness import Outcome, assert_fused, run
from tests.graph.quant_ops import deepgemm_cast

pytest.importorskip("transformers")

from transformers.integrations import deepgemm, finegrained_fp8

from gdn_backend.huggingface.layers import LAYER_FORMS, build_layer, new_layer_cache, run_layer
from gdn_backend.ops.block_linear import dequantise_blocks, dequantise_rows

_MATMULS = torch.library.Library("gdn_backend_tests", "FRAGMENT")
_MATMULS.define("fp8_gemm_nt(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor! output) -> ()")
_MATMULS.define("w8a8_matmul(Tensor a, Tensor b, Tensor b_scales) -> Tensor")


def _gemm(a: Any, a_scales: Any, b: Any, b_scales: Any, output: Any) -> None:
    output.copy_(nn.functional.linear(dequantise_rows(a, a_scales), dequantise_blocks(b, b_scales)))


def _quantising_matmul(a: Any, b: Any, b_scales: Any) -> Any:
    output = a.new_empty((*a.shape[:-1], b.shape[0]))
    codes, scales = deepgemm_cast(a.reshape(-1, a.shape[-1]))
    _gemm(codes, scales, b, b_scales, output.view(-1, b.shape[0]))
    return output


for _key in ("CPU", "Meta"):
    _MATMULS.impl("fp8_gemm_nt", _gemm, _key)
    _MATMULS.impl("w8a8_matmul", _quantising_matmul, _key)


def _cast(x: torch.Tensor, use_ue8m0: bool, gran_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return deepgemm_cast(x, use_ue8m0, gran_k)


def _deepgemm_matmul(a: Any, b: Any, output: torch.Tensor, recipe: Any = None) -> None:
    torch.ops.gdn_backend_tests.fp8_gemm_nt(*a, *b, output)


def _triton_matmul(a: Any, b: Any, b_scales: Any, block_size: Any, dtype: Any, activation_scale: Any = None) -> Any:
    return torch.ops.gdn_backend_tests.w8a8_matmul(a, b, b_scales)


class Layer(nn.Module):
    """A Qwen3-Next layer that ends in transformers' FP8 linear."""

    def __init__(self) -> None:
        super().__init__()
        form = next(form for form in LAYER_FORMS if form.name == "qwen3_next")
        self.layer: Any = build_layer(form)
        linear = finegrained_fp8.FP8Linear(512, 128, block_size=(128, 128))
        with torch.no_grad():
            linear.weight.copy_(torch.randn(128, 512))
            linear.weight_scale_inv.uniform_(0.5, 1.5)
        self.layer.out_proj = linear
        self.cache = new_layer_cache(self.layer)

    def forward(self, hidden_states: torch.Tensor) -> Any:
        return run_layer(self.layer, hidden_states, self.cache)


def _run(monkeypatch: pytest.MonkeyPatch, has_deepgemm: bool) -> Outcome:
    kernels = dict.fromkeys(deepgemm.DeepGEMM.__dataclass_fields__)
    kernels |= {"per_token_cast_to_fp8": _cast, "fp8_fp4_matmul": _deepgemm_matmul}
    monkeypatch.setattr(deepgemm, "_DEEPGEMM", deepgemm.DeepGEMM(**kernels))
    monkeypatch.setattr(finegrained_fp8, "_FINEGRAINED_FP8", finegrained_fp8.FineGrainedFP8(_triton_matmul, None, None))
    monkeypatch.setattr(finegrained_fp8, "is_deepgemm_loadable", lambda: has_deepgemm)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    model = Layer()
    with torch.no_grad():
        return run(model, torch.randn(2, 5, model.layer.config.hidden_size).bfloat16())


def test_deepgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _run(monkeypatch, has_deepgemm=True)
    assert_fused(outcome, keeps=("rsqrt", "mean", "silu"))  # those of the layer's convolution and l2 norms
    assert outcome.match.facts.sink == "decomposed"
    assert outcome.count("fill_") == 0, "the padding buffer is still there"
    assert outcome.count("gdn_backend_tests::fp8_gemm_nt") == 1


def test_a_matmul_that_quantises_inside_is_no_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = _run(monkeypatch, has_deepgemm=False)
    assert (outcome.passes.matches, outcome.passes.misses) == ([], [])
    assert outcome.count("gdn_backend_tests::w8a8_matmul") == 1
