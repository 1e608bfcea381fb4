"""Linear layers in block FP8: weights in 128x128 blocks, activations quantised dynamically.

The layout is that of block-FP8 checkpoints (DeepSeek-V3, Qwen3 FP8): e4m3 codes with one fp32 scale for each 128x128
block of the weight, and one for each 128 activations of a token, computed as the layer runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from gdn_backend.environment import default_fp8_dtype
from gdn_backend.ops.block_linear import BLOCK_SIZE, block_scaled_linear
from gdn_backend.ops.fp8_quant import fp8_quant

#: Layers that block-FP8 checkpoints keep in full precision: the output head, the routers (in some versions a linear
#: layer called ``gate``) and the projections to one value a head or a token.
FULL_PRECISION = ("lm_head", "gate", "router", "shared_expert_gate", "in_proj_ba")


def quantise_decomposed(x: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each 128 values of a row in plain PyTorch ops, as vLLM's native path does.

    Args:
        x: ``[..., K]``, K a multiple of 128, any float dtype.
        fp8_dtype: dtype of the codes.

    Returns:
        codes ``[..., K]`` and fp32 scales ``[..., K / 128]``: ``max(amax / fp8_max, 1 / (512 · fp8_max))``.
    """
    groups = x.view(*x.shape[:-1], x.shape[-1] // BLOCK_SIZE, BLOCK_SIZE)
    codes, scales = quantise_per_token(groups, fp8_dtype)
    return codes.view(x.shape), scales.squeeze(-1)


def quantise_with_op(x: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as :func:`quantise_decomposed` in one custom op."""
    return fp8_quant(x, group_size=BLOCK_SIZE, fp8_dtype=fp8_dtype)


def quantise_per_token(x: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row ``[K]`` of ``x [..., K]`` with one scale; scales are fp32 ``[..., 1]``."""
    fp8_max = torch.finfo(fp8_dtype).max
    amax = x.abs().amax(dim=-1, keepdim=True).float()
    scales = (amax / fp8_max).clamp(min=1.0 / (fp8_max * 512.0))
    return (x.float() / scales).clamp(-fp8_max, fp8_max).to(fp8_dtype), scales


QUANTISATIONS: dict[str, Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]] = {
    "decomposed": quantise_decomposed,
    "op": quantise_with_op,
    "token": quantise_per_token,
}


class ActivationQuantiser(nn.Module):
    """``x [..., K]`` -> FP8 codes ``[..., K]`` and fp32 scales: the first half of a block-FP8 linear layer.

    A module of its own, so that a hook on it sees the codes and scales of a running model.
    """

    def __init__(self, quantisation: str = "decomposed", fp8_dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if quantisation not in QUANTISATIONS:
            raise ValueError(f"quantisation={quantisation!r}: expected one of {', '.join(QUANTISATIONS)}")
        self.quantisation = quantisation
        self.fp8_dtype = fp8_dtype or default_fp8_dtype()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return QUANTISATIONS[self.quantisation](x, self.fp8_dtype)

    def extra_repr(self) -> str:
        return f"quantisation={self.quantisation!r}, fp8_dtype={self.fp8_dtype}"


def quantise_weight(weight: torch.Tensor, fp8_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight ``[N, K]`` in 128x128 blocks: codes ``[N, K]``, fp32 scales ``[N / 128, K / 128]``."""
    fp8_max = torch.finfo(fp8_dtype).max
    rows, columns = (size // BLOCK_SIZE for size in weight.shape)
    blocks = weight.float().view(rows, BLOCK_SIZE, columns, BLOCK_SIZE)
    scales = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / fp8_max
    codes = (blocks / scales[:, None, :, None]).clamp(-fp8_max, fp8_max).to(fp8_dtype)
    return codes.view(weight.shape), scales


class BlockFP8Linear(nn.Module):
    """``nn.Linear`` with an FP8 weight in 128x128 blocks and dynamically quantised activations.

    Args:
        in_features, out_features: multiples of 128.
        bias: whether there is a bias, in the dtype of the activations.
        quantisation: ``"decomposed"``, ``"op"`` or ``"token"``: how activations become codes and scales.
        fp8_dtype: dtype of the codes; the device's own by default.
    """

    weight: torch.Tensor
    weight_scale_inv: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        quantisation: str = "decomposed",
        fp8_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if in_features % BLOCK_SIZE or out_features % BLOCK_SIZE:
            raise ValueError(
                f"a block-FP8 layer needs multiples of {BLOCK_SIZE}, got in_features={in_features}, "
                f"out_features={out_features}"
            )
        self.in_features, self.out_features = in_features, out_features
        fp8_dtype = fp8_dtype or default_fp8_dtype(torch.device(device or "cpu"))
        self.quantiser = ActivationQuantiser(quantisation, fp8_dtype)
        codes = torch.zeros(out_features, in_features, dtype=fp8_dtype, device=device)
        scales = torch.ones(out_features // BLOCK_SIZE, in_features // BLOCK_SIZE, device=device)
        # FP8 tensors take no gradient, and a buffer says that no optimiser touches them.
        self.register_buffer("weight", codes)
        self.register_buffer("weight_scale_inv", scales)
        self.bias = nn.Parameter(torch.zeros(out_features, device=device)) if bias else None

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, quantisation: str = "decomposed", fp8_dtype: torch.dtype | None = None
    ) -> BlockFP8Linear:
        """Quantise the weight of ``linear``, whose sizes are multiples of 128; the bias is kept as it is."""
        layer = cls(
            linear.in_features,
            linear.out_features,
            quantisation=quantisation,
            fp8_dtype=fp8_dtype,
            device=linear.weight.device,
        )
        layer.weight, layer.weight_scale_inv = quantise_weight(linear.weight.detach(), layer.weight.dtype)
        layer.bias = linear.bias
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        codes, scales = self.quantiser(x)
        output = block_scaled_linear(codes, scales, self.weight, self.weight_scale_inv, x.dtype)
        return output if self.bias is None else output + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def quantise_linears(
    model: nn.Module, *, quantisation: str = "decomposed", skip: tuple[str, ...] = FULL_PRECISION
) -> list[str]:
    """Replace the linear layers of ``model`` by block-FP8 ones, in place.

    Args:
        model: any module; layers that ``skip`` matches, and those whose sizes are not multiples of 128, stay.
        quantisation: see :class:`BlockFP8Linear`.
        skip: names, without the path before them, of layers to leave alone.

    Returns:
        The paths of the linear layers that stayed as they were.
    """
    left = []
    for path, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        sizes_fit = module.in_features % BLOCK_SIZE == 0 and module.out_features % BLOCK_SIZE == 0
        parent, _, name = path.rpartition(".")
        if not sizes_fit or name in skip:
            left.append(path)
            continue
        setattr(model.get_submodule(parent), name, BlockFP8Linear.from_linear(module, quantisation=quantisation))
    return left
