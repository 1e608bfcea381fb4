"""Block-FP8 linear layers: what they compute, what they replace, what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gdn_backend.huggingface.block_fp8 import QUANTISATIONS, BlockFP8Linear, quantise_linears, quantise_weight
from gdn_backend.ops.block_linear import block_scaled_linear, dequantise_blocks, dequantise_rows, has_block_gemm

FP8 = torch.float8_e4m3fn


def linear(in_features: int = 256, out_features: int = 384, bias: bool = False) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(in_features, out_features, bias=bias).bfloat16()


@pytest.mark.parametrize("shape", [(5,), (3, 7), (0,)])
@pytest.mark.parametrize("quantisation", QUANTISATIONS)
@torch.no_grad()
def test_layer_is_near_the_linear_that_it_replaces(quantisation: str, shape: tuple[int, ...]) -> None:
    full = linear(bias=True)
    layer = BlockFP8Linear.from_linear(full, quantisation=quantisation)
    x = torch.randn(*shape, 256).bfloat16()
    output, expected = layer(x), full(x)
    assert (output.shape, output.dtype) == (expected.shape, torch.bfloat16)
    # Two FP8 roundings of 2^-4 each at most, averaged over 256 products.
    assert (output - expected).norm() <= 0.06 * expected.norm()


@torch.no_grad()
def test_product_is_that_of_the_dequantised_factors() -> None:
    weight, weight_scales = quantise_weight(linear().weight, FP8)
    assert (weight_scales.shape, weight_scales.dtype) == ((3, 2), torch.float32)
    codes = torch.randn(4, 256).to(FP8)
    scales = torch.rand(4, 2) + 0.5
    activations = (codes.double().view(4, 2, 128) * scales[:, :, None]).view(4, 256)
    blocks = (weight.double().view(3, 128, 2, 128) * weight_scales[:, None, :, None]).view(384, 256)
    output = block_scaled_linear(codes, scales, weight, weight_scales, torch.float32)
    torch.testing.assert_close(output.double(), activations @ blocks.T, rtol=1e-5, atol=1e-5)


def test_forms_agree_on_codes_and_scales() -> None:
    x = torch.randn(6, 256).bfloat16()
    x[0] = 0
    (codes, scales), (op_codes, op_scales) = (QUANTISATIONS[name](x, FP8) for name in ("decomposed", "op"))
    assert torch.equal(codes.view(torch.uint8), op_codes.view(torch.uint8))
    assert torch.equal(scales, op_scales)
    assert torch.equal(scales[0], torch.full((2,), 1.0 / (448.0 * 512.0)))
    _, token_scales = QUANTISATIONS["token"](x, FP8)
    assert torch.equal(token_scales, scales.amax(dim=-1, keepdim=True))


def test_weight_blocks_use_the_whole_range() -> None:
    codes, scales = quantise_weight(linear().weight, FP8)
    blocks = codes.float().view(3, 128, 2, 128).abs().amax(dim=(1, 3))
    assert torch.equal(blocks, torch.full((3, 2), 448.0))
    assert quantise_weight(torch.zeros(128, 128), FP8)[0].float().abs().max() == 0
    assert scales.isfinite().all()


def test_quantise_linears_says_what_it_left() -> None:
    model = nn.ModuleDict(
        {
            "proj": linear(),
            "odd": nn.Linear(100, 128),
            "router": linear(),
            "lm_head": linear(),
            "mlp": nn.ModuleDict({"gate": linear(), "gate_proj": linear()}),
        }
    )
    assert quantise_linears(model) == ["odd", "router", "lm_head", "mlp.gate"]
    replaced = [path for path, module in model.named_modules() if isinstance(module, BlockFP8Linear)]
    assert replaced == ["proj", "mlp.gate_proj"]


@pytest.mark.parametrize("num_scales", [1, 2])
def test_gradients_are_those_of_the_dequantised_product(num_scales: int) -> None:
    weight, weight_scales = quantise_weight(linear().weight.detach(), FP8)
    codes = torch.randn(3, 256).to(FP8).requires_grad_()
    scales = (torch.rand(3, num_scales) + 0.5).requires_grad_()
    block_scaled_linear(codes, scales, weight, weight_scales, torch.float32).square().sum().backward()
    plain_codes, plain_scales = codes.detach().requires_grad_(), scales.detach().requires_grad_()
    activations = dequantise_rows(plain_codes, plain_scales)
    nn.functional.linear(activations, dequantise_blocks(weight, weight_scales)).square().sum().backward()
    assert codes.grad is not None and plain_codes.grad is not None
    assert torch.equal(codes.grad.float(), plain_codes.grad.float())
    torch.testing.assert_close(scales.grad, plain_scales.grad)


def test_errors_say_what_was_wrong() -> None:
    with pytest.raises(ValueError, match="multiples of 128, got in_features=100"):
        BlockFP8Linear(100, 128)
    with pytest.raises(ValueError, match="quantisation='tensor': expected one of decomposed, op, token"):
        BlockFP8Linear(128, 128, quantisation="tensor")
    weight, weight_scales = quantise_weight(linear().weight, FP8)
    codes, scales = torch.zeros(2, 256).to(FP8), torch.ones(2, 2)
    with pytest.raises(ValueError, match="codes have 128 values a row: the weight expects 256"):
        block_scaled_linear(codes[:, :128], scales, weight, weight_scales)
    with pytest.raises(ValueError, match="scales have 3 values a row: expected 1 or 2"):
        block_scaled_linear(codes, torch.ones(2, 3), weight, weight_scales)
    with pytest.raises(ValueError, match=r"weight_scales is \(2, 3\): expected \(3, 2\)"):
        block_scaled_linear(codes, scales, weight, weight_scales.T)
    with pytest.raises(ValueError, match="weight is 100x256"):
        block_scaled_linear(codes, scales, weight[:100], weight_scales)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [0, 1, 63, 64, 200])
@pytest.mark.parametrize("num_scales", [1, 2])
@torch.no_grad()
def test_gpu_block_gemm(num_rows: int, num_scales: int) -> None:
    weight, weight_scales = quantise_weight(linear().weight, FP8)
    codes = torch.randn(num_rows, 256).to(FP8)
    scales = torch.rand(num_scales, num_rows).T + 0.5  # column-major
    expected = block_scaled_linear(codes, scales, weight, weight_scales, torch.float32)
    operands = [tensor.cuda() for tensor in (codes, scales, weight, weight_scales)]
    assert has_block_gemm(operands[0].device, FP8)
    output = block_scaled_linear(*operands, torch.float32)
    # FP8 matrix units keep about 14 bits of a sum.
    torch.testing.assert_close(
        output.cpu(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().amax() if num_rows else 1)
    )
    compiled = torch.compile(block_scaled_linear, dynamic=True)(*operands, torch.float32)
    assert torch.equal(compiled, output)
