"""One small layer of every Hugging Face model family with a gated RMSNorm, its output projection quantised.

The layers are transformers' own classes, built from their own configurations: only the sizes are small. In place of the
output projection stands its activation quantisation, so that a layer returns the codes and scales that its matmul would
read, and a fused layer can be compared with eager byte by byte.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gdn_backend.environment import default_fp8_dtype
from gdn_backend.huggingface.block_fp8 import QUANTISATIONS

_GATED_DELTA = {
    "hidden_size": 128,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "num_hidden_layers": 4,
}
_MAMBA = {
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_chunk_size": 4,
}
_FALCON = {**_MAMBA, "mamba_d_ssm": 512}
_DELTA_ATTENTION = {"hidden_size": 128, "linear_num_heads": 2, "linear_head_dim": 128, "num_hidden_layers": 4}


@dataclass(frozen=True)
class LayerForm:
    """A family of models and how to build one layer of it.

    ``num_sites`` is the number of gated norms in front of the output projection: one, or none where the model's default
    gates without a norm.
    """

    name: str
    module: str  # of transformers.models: where the layer is
    config_class: str
    layer_class: str
    settings: Mapping[str, Any] = field(repr=False)
    projection: str = "out_proj"
    num_sites: int = 1


def _form(name: str, stem: str, layer: str, settings: Mapping[str, Any], **rest: Any) -> LayerForm:
    module = rest.pop("module", name)
    return LayerForm(name, module, f"{stem}Config", f"{rest.pop('layer_stem', stem)}{layer}", settings, **rest)


LAYER_FORMS: tuple[LayerForm, ...] = (
    _form("qwen3_next", "Qwen3Next", "GatedDeltaNet", _GATED_DELTA),
    _form("qwen3_next, nk=nv", "Qwen3Next", "GatedDeltaNet", {**_GATED_DELTA, "linear_num_key_heads": 4},
          module="qwen3_next"),
    _form("qwen3_5", "Qwen3_5Text", "GatedDeltaNet", _GATED_DELTA, layer_stem="Qwen3_5"),
    _form("qwen3_5_moe", "Qwen3_5MoeText", "GatedDeltaNet", _GATED_DELTA, layer_stem="Qwen3_5Moe"),
    _form("qwen4_exp", "Qwen4ExpText", "GatedDeltaNet", _GATED_DELTA),
    _form("qwen4_exp, sigmoid", "Qwen4ExpText", "GatedDeltaNet", {**_GATED_DELTA, "output_gate_type": "sigmoid"},
          module="qwen4_exp"),
    _form("olmo_hybrid", "OlmoHybrid", "GatedDeltaNet",
          {**_GATED_DELTA, "linear_num_key_heads": 10, "linear_num_value_heads": 10, "linear_key_head_dim": 32,
           "linear_value_head_dim": 192}, projection="o_proj"),
    _form("kimi_linear", "KimiLinear", "DeltaAttention", _DELTA_ATTENTION, projection="o_proj"),
    _form("glm5_next", "Glm5NextText", "LinearAttention", _DELTA_ATTENTION, projection="o_proj"),
    _form("bailing_hybrid", "BailingHybrid", "DeltaAttention",
          {"hidden_size": 128, "num_attention_heads": 2, "head_dim": 128, "num_hidden_layers": 4}, projection="o_proj"),
    _form("lara_mini", "LaraMini", "GatedDeltaNet", _GATED_DELTA),
    _form("mamba2", "Mamba2", "Mixer",
          {"hidden_size": 256, "num_hidden_layers": 1, "num_heads": 8, "head_dim": 64, "n_groups": 2, "state_size": 16,
           "chunk_size": 4}),
    _form("bamba", "Bamba", "Mixer", _MAMBA),
    _form("nemotron_h", "NemotronH", "Mamba2Mixer",
          {"hidden_size": 256, "layers_block_type": ["linear_attention"], "mamba_num_heads": 8, "mamba_head_dim": 64,
           "n_groups": 2, "ssm_state_size": 16, "chunk_size": 4}),
    _form("zamba2", "Zamba2", "MambaMixer",
          {"hidden_size": 256, "num_hidden_layers": 1, "layers_block_type": ["linear_attention"], "mamba_d_state": 16,
           "mamba_ngroups": 2, "n_mamba_heads": 8, "chunk_size": 4, "num_attention_heads": 4}),
    _form("granitemoehybrid", "GraniteMoeHybrid", "MambaLayer", _MAMBA),
    _form("falcon_h1, norm before gate", "FalconH1", "Mixer", {**_FALCON, "mamba_rms_norm": True}, module="falcon_h1"),
    _form("falcon_h1, gate before norm", "FalconH1", "Mixer",
          {**_FALCON, "mamba_rms_norm": True, "mamba_norm_before_gate": False}, module="falcon_h1"),
    _form("falcon_h1, no norm", "FalconH1", "Mixer", _FALCON, module="falcon_h1", num_sites=0),
)  # fmt: skip


class QuantisedActivation(nn.Module):
    """Stands for a block-FP8 output projection: returns the codes and scales of its input instead of the product."""

    def __init__(self, quantisation: str = "decomposed") -> None:
        super().__init__()
        self.quantise = QUANTISATIONS[quantisation]
        self.fp8_dtype = default_fp8_dtype(torch.device("cpu"))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.quantise(x, self.fp8_dtype)


def is_available(form: LayerForm) -> bool:
    """Whether the installed transformers has the model family."""
    return importlib.util.find_spec(f"transformers.models.{form.module}") is not None


def build_layer(
    form: LayerForm, *, quantisation: str = "decomposed", dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> nn.Module:
    """The layer of ``form`` in eval mode with random weights.

    Args:
        quantisation: of the activations in front of the output projection; see
            :data:`~gdn_backend.huggingface.block_fp8.QUANTISATIONS`.
        dtype: of the weights.

    Raises:
        ImportError: the installed transformers lacks the model family.
    """
    modeling = importlib.import_module(f"transformers.models.{form.module}.modeling_{form.module}")
    configuration = importlib.import_module(f"transformers.models.{form.module}.configuration_{form.module}")
    config = getattr(configuration, form.config_class)(**form.settings)
    config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        layer = getattr(modeling, form.layer_class)(config, layer_idx=0)
        if hasattr(modeling, "compute_mup_vector"):  # Falcon's model gives this to its layers
            layer.register_buffer("mup_vector", modeling.compute_mup_vector(config))
        layer = layer.to(dtype).eval()
        for name, parameter in layer.named_parameters():
            is_norm = name.endswith("norm.weight")
            parameter.uniform_(0.5, 1.5) if is_norm else parameter.uniform_(-0.2, 0.2)
    setattr(layer, form.projection, QuantisedActivation(quantisation))
    layer.config = config
    return layer


def new_layer_cache(layer: nn.Module) -> Any:
    """An empty cache for :func:`build_layer`'s layer."""
    from transformers import DynamicCache

    config: Any = layer.config
    return DynamicCache(config=config)


def run_layer(layer: Callable[..., Any], hidden_states: torch.Tensor, cache: Any = None) -> Any:
    """Calls a layer, compiled or not, on ``hidden_states [B, S, hidden_size]``: codes and scales."""
    forward = getattr(layer, "_orig_mod", layer).forward  # type: ignore[union-attr]
    name = next(name for name in ("cache", "cache_params") if name in inspect.signature(forward).parameters)
    return layer(hidden_states, **{name: cache})
