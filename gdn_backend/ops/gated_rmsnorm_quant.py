"""The fused op: gated RMSNorm and dynamic FP8 quantisation of its merged rows.

``gdn_backend::gated_rmsnorm_fp8_quant`` is what a compiled graph calls. It is a ``triton_op``: on a GPU Inductor sees the
Triton kernel in it, on the CPU the plain PyTorch operations, which it fuses. What must not be looked into (AITER, and the
reference on a GPU, where Inductor would skip roundings) sits in ops of its own that stay opaque.
:func:`gated_rmsnorm_fp8_quant` is the same for users, with its arguments checked and its kernel chosen.
"""

from __future__ import annotations

import torch

from gdn_backend import environment
from gdn_backend.kernels.reference import reference
from gdn_backend.ops.call import decode_call, encode_call
from gdn_backend.ops.dispatch import Operands, Refusal, choose_kernel
from gdn_backend.ops.spec import Activation, FusedSpec, QuantSpec, dtype_name


def allocate_outputs(x: torch.Tensor, spec: FusedSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """The output contract that all kernels share: empty codes and scales for the rows of ``x``.

    codes: ``[T, hidden_size]``, contiguous. scales: fp32 ``[T, num_groups]``; row-major, or column-major with strides
    ``(1, T)``.
    """
    rows = x.numel() // spec.hidden_size
    codes = torch.empty((rows, spec.hidden_size), dtype=spec.torch_fp8_dtype, device=x.device)
    if spec.quant.scale_layout == "column":
        return codes, torch.empty((spec.num_groups, rows), dtype=torch.float32, device=x.device).t()
    return codes, torch.empty((rows, spec.num_groups), dtype=torch.float32, device=x.device)


def _launch_triton(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    spec: FusedSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    from gdn_backend.kernels.gated_rmsnorm_quant import launch

    codes, scales = allocate_outputs(x, spec)
    if codes.numel():
        launch(x, gate, weight, bias, eps, spec, codes, scales)
    return codes, scales


@torch.library.triton_op("gdn_backend::gated_rmsnorm_fp8_quant", mutates_args=())
def gated_rmsnorm_fp8_quant_op(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    call: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The graph op. ``call`` is :func:`~gdn_backend.ops.call.encode_call`'s string; shapes as in ``reference``."""
    spec, kernel = decode_call(call)
    if x.device.type == "cpu":
        return reference(x, gate, weight, bias, eps, spec)
    if kernel == "triton":
        return _launch_triton(x, gate, weight, bias, eps, spec)
    return torch.ops.gdn_backend.gated_rmsnorm_fp8_quant_eager(x, gate, weight, bias, eps, call)


@torch.library.custom_op("gdn_backend::gated_rmsnorm_fp8_quant_eager", mutates_args=())
def _eager_op(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    call: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference, one eager operation after the other: for a GPU, where Inductor would skip its roundings."""
    return reference(x, gate, weight, bias, eps, decode_call(call)[0])


@_eager_op.register_fake
def _(x, gate, weight, bias, eps, call):  # type: ignore[no-untyped-def]
    return allocate_outputs(x, decode_call(call)[0])


def gated_rmsnorm_fp8_quant(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    *,
    activation: Activation = "silu",
    norm_before_gate: bool = True,
    norm_size: int | None = None,
    group_size: int | None = 128,
    weight_offset: float = 0.0,
    bias: torch.Tensor | None = None,
    roundings: tuple[str, ...] = (),
    quant: QuantSpec = QuantSpec(),
    fp8_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gated RMSNorm and dynamic FP8 quantisation in one kernel."""
    hidden_size = x.shape[-1] * x.shape[-2]
    fp8_dtype = fp8_dtype or environment.default_fp8_dtype(x.device)
    spec = FusedSpec(
        hidden_size=hidden_size,
        head_dim=x.shape[-1],
        norm_size=norm_size or x.shape[-1],
        group_size=group_size or hidden_size,
        granularity="token" if group_size is None else "group",
        activation=activation,
        norm_before_gate=norm_before_gate,
        weight_offset=weight_offset,
        roundings=tuple(roundings),
        quant=quant,
        fp8_dtype=dtype_name(fp8_dtype),
    )
    operands = Operands(
        device=x.device,
        x=x.dtype,
        gate=gate.dtype,
        weight=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
    )
    choice = choose_kernel(spec, operands)
    if isinstance(choice, Refusal):
        raise NotImplementedError(choice.reason)
    codes, scales = torch.ops.gdn_backend.gated_rmsnorm_fp8_quant(
        x, gate, weight, bias, eps, encode_call(spec, choice.kernel)
    )
    rows = x.shape[:-2]
    return codes.reshape(*rows, hidden_size), scales.reshape(*rows, spec.num_groups)
