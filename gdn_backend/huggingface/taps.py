"""Looking into a running model: what each gated norm read, and what the quantisation behind it made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gdn_backend.exactness import Distance, measure_distance
from gdn_backend.huggingface.models import cache_argument, gated_delta_layers


class TappedModel(nn.Module):
    """A model that returns, beside its logits, what its Gated DeltaNet layers computed on the way.

    ``forward(input_ids [B, S], cache) -> (logits [B, S, V], {layer path: [x, gate, codes, scales]})`` with x and gate
    ``[B·S·H, D]`` as the layer's gated norm got them, and codes ``[B, S, H·D]`` and scales as its output projection
    quantised them. The taps are ordinary module hooks, so a compiled model returns them from the same graph as the
    logits.

    Args:
        model: a causal language model whose ``linear_attn`` layers have a gated ``norm`` and a
            :class:`~gdn_backend.huggingface.block_fp8.BlockFP8Linear` ``out_proj``.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model: nn.Module = model
        self.vocab_size: int = model.config.vocab_size
        self._cache_argument = cache_argument(model)
        self._seen: dict[str, list[torch.Tensor]] = {}
        for path, layer in gated_delta_layers(model).items():
            layer.get_submodule("norm").register_forward_pre_hook(self._record_inputs(path))
            layer.get_submodule("out_proj.quantiser").register_forward_hook(self._record_outputs(path))

    def forward(self, input_ids: torch.Tensor, cache: Any) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
        self._seen = {}
        logits = self.model(input_ids=input_ids, use_cache=True, **{self._cache_argument: cache}).logits
        seen, self._seen = self._seen, {}
        return logits, seen

    def _record_inputs(self, path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            self._seen[path] = list(inputs)

        return hook

    def _record_outputs(self, path: str) -> Any:
        def hook(module: nn.Module, inputs: tuple[torch.Tensor, ...], outputs: tuple[torch.Tensor, ...]) -> None:
            self._seen[path] += list(outputs)

        return hook


@dataclass(frozen=True)
class SiteDistance:
    """How far one site's codes and scales are from what eager makes of the same x and gate."""

    path: str
    distance: Distance
    ok: bool


def compare_with_eager(model: nn.Module, seen: dict[str, list[torch.Tensor]]) -> list[SiteDistance]:
    """Feed each layer's norm and quantisation, in eager, what the compiled model fed them.

    Args:
        model: the model whose taps these are, as it was when it ran.
        seen: the second output of :class:`TappedModel`.
    """
    results = []
    for path, layer in gated_delta_layers(model).items():
        x, gate, codes, scales = seen[path]
        normed = layer.get_submodule("norm")(x, gate)
        expected_codes, expected_scales = layer.get_submodule("out_proj.quantiser")(normed.reshape(codes.shape))
        distance = measure_distance(codes, scales, expected_codes, expected_scales)
        results.append(SiteDistance(path, distance, distance.is_exact(normed.dtype)))
    return results
