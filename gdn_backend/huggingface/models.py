"""Small models with the real architecture, built from their Hugging Face configuration with random weights."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gdn_backend.huggingface.block_fp8 import quantise_linears

#: Every fourth layer of Qwen3-Next is an attention layer, the others are Gated DeltaNet layers.
ATTENTION_INTERVAL = 4
#: A cache counts its tokens by an attention layer, so a model needs one.
MIN_LAYERS = 2


@dataclass(frozen=True)
class Qwen3NextSize:
    """The sizes of a small Qwen3-Next; heads of the Gated DeltaNet layers are 128 wide, as in the released model.

    Every fourth layer is an attention layer; of two or three layers it is the last.
    """

    num_layers: int = 4
    num_key_heads: int = 2
    num_value_heads: int = 4  # a multiple of num_key_heads; where equal, the gate is a strided view of a projection
    hidden_size: int = 256
    moe_intermediate_size: int = 128
    num_experts: int = 4
    experts_per_token: int = 2
    vocab_size: int = 512

    def __post_init__(self) -> None:
        if self.num_layers < MIN_LAYERS:
            raise ValueError(f"num_layers={self.num_layers}: expected at least {MIN_LAYERS}")

    @property
    def layer_types(self) -> list[str]:
        """What each layer is, as the configuration spells it."""
        interval = min(ATTENTION_INTERVAL, self.num_layers)
        is_attention = [(index + 1) % interval == 0 for index in range(self.num_layers)]
        return ["full_attention" if attention else "linear_attention" for attention in is_attention]

    @property
    def num_gated_delta_layers(self) -> int:
        """Layers with a gated norm in front of their output projection."""
        return self.layer_types.count("linear_attention")


def qwen3_next_config(size: Qwen3NextSize) -> Any:
    """The ``transformers.Qwen3NextConfig`` of a model of this size, mixture of experts included."""
    from transformers import Qwen3NextConfig

    return Qwen3NextConfig(
        vocab_size=size.vocab_size,
        hidden_size=size.hidden_size,
        num_hidden_layers=size.num_layers,
        layer_types=size.layer_types,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        linear_num_key_heads=size.num_key_heads,
        linear_num_value_heads=size.num_value_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        moe_intermediate_size=size.moe_intermediate_size,
        shared_expert_intermediate_size=size.moe_intermediate_size,
        num_experts=size.num_experts,
        num_experts_per_tok=size.experts_per_token,
        intermediate_size=2 * size.hidden_size,
        max_position_embeddings=512,
    )


def build_qwen3_next(
    size: Qwen3NextSize | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    quantisation: str | None = "decomposed",
) -> Any:
    """A ``Qwen3NextForCausalLM`` in eval mode with random weights.

    Args:
        size: the model's sizes.
        seed: of the weights, which are drawn on the CPU and so equal on every device.
        device, dtype: of the model.
        quantisation: turn the linear layers into block-FP8 ones of this kind (see
            :class:`~gdn_backend.huggingface.block_fp8.BlockFP8Linear`); None leaves them as they are.
    """
    from transformers import AutoModelForCausalLM

    _trace_what_eager_runs()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        # The batched experts are one traceable op; the default loops over the experts that the router picked.
        model = AutoModelForCausalLM.from_config(
            qwen3_next_config(size or Qwen3NextSize()), dtype=dtype, experts_implementation="grouped_mm"
        )
        for module in model.modules():
            if type(module).__name__ == "Qwen3NextRMSNormGated":
                nn.init.uniform_(module.weight, 0.5, 1.5)  # trained weights are not all one
    model = model.to(device).eval()
    if quantisation is not None:
        quantise_linears(model, quantisation=quantisation)
    return model


def _trace_what_eager_runs() -> None:
    """Keep compiled models from the gated delta rule's detour for exports, 63 unrolled steps a layer.

    In older versions Dynamo takes ``torch.compiler.is_exporting()`` for true (seen: 2.11 does, 2.13 does not). Eager
    never goes there, and it takes Inductor minutes.
    """
    if torch.__version__ < "2.13":  # a TorchVersion, which compares as versions do
        from transformers.models.qwen3_next import modeling_qwen3_next

        modeling_qwen3_next.is_torchdynamo_exporting = lambda: False


def new_cache(model: Any, max_tokens: int | None = None) -> Any:
    """An empty cache for keys, values, convolution and recurrent states of ``model``.

    With ``max_tokens`` its tensors have one size from the start, so that all decode steps run the same graph; without,
    keys and values grow, and a compiled model meets a second decode graph at its second step.
    """
    from transformers import DynamicCache, StaticCache

    if max_tokens is None:
        return DynamicCache(config=model.config)
    return StaticCache(config=model.config, max_cache_len=max_tokens)


def cache_argument(model: nn.Module) -> str:
    """What this version of transformers calls the cache in ``forward``: ``cache`` or ``past_key_values``."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def gated_delta_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Module path -> Gated DeltaNet layer, in the order in which they run."""
    return {path: module for path, module in model.named_modules() if path.endswith(".linear_attn")}
