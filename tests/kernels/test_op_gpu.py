"""The op through Inductor on a GPU: eager's bytes, one kernel a site, no copy, for every mode and token count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.profiler import ProfilerActivity, profile

from gdn_backend import fp8_quant, gated_rmsnorm_fp8_quant
from gdn_backend.kernels.reference import quantise, reference
from gdn_backend.ops.call import encode_call
from gdn_backend.ops.spec import DEFAULT_QUANT, FusedSpec, QuantSpec
from tests.exactness import assert_exact

pytestmark = pytest.mark.gpu

QWEN = ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
SPEC = FusedSpec(4096, 128, 128, 128, roundings=QWEN)
COLUMN = dataclasses.replace(SPEC, quant=QuantSpec(scale_layout="column"))
TMA = dataclasses.replace(SPEC, quant=QuantSpec(scale_layout="column_tma"))
TOKENS = [0, 1, 7, 33, 2051]

Result = tuple[Tensor, Tensor]


def make_inputs(num_tokens: int, device: str = "cuda") -> tuple[Tensor, Tensor, Tensor]:
    """x ``[T, 32, 128]``, a projection ``[T, 16, 768]`` whose last 256 columns are the gate, and a weight; bf16."""
    x = torch.randn(num_tokens, 32, 128, device=device).bfloat16()
    projection = torch.randn(num_tokens, 16, 768, device=device).bfloat16()
    return x, projection, (torch.rand(128, device=device) + 0.5).bfloat16()


def make_site(spec: FusedSpec, kernel: str = "triton") -> Callable[..., Result]:
    call = encode_call(spec, kernel)

    def site(x: Tensor, projection: Tensor, weight: Tensor, eps: float = 1e-6) -> Result:
        gate = projection[..., 512:]
        return torch.ops.gdn_backend.gated_rmsnorm_fp8_quant(x, gate, weight, None, eps, call)

    return site


def expected(spec: FusedSpec, x: Tensor, projection: Tensor, weight: Tensor, eps: float = 1e-6) -> Result:
    return reference(x, projection[..., 512:], weight, None, eps, spec)


def poison(num_tokens: int) -> None:
    """Leaves NaN in the memory that the next outputs of this size are likely to get."""
    for size in (num_tokens * 4096, num_tokens * 32 * 4):
        torch.full((size,), 0x7F, dtype=torch.uint8, device="cuda")


def kernel_names(run: Callable[[], Any]) -> list[str]:
    """Names of everything the GPU does in one call, copies and fills included; after a warm-up."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    return [event.name for event in recorded.events() if event.device_type == torch.autograd.DeviceType.CUDA]


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


class TestEager:
    @pytest.mark.parametrize("num_tokens", TOKENS)
    @pytest.mark.parametrize("spec", [SPEC, COLUMN, TMA], ids=["row", "column", "tma"])
    def test_is_exact(self, num_tokens: int, spec: FusedSpec) -> None:
        inputs = make_inputs(num_tokens)
        poison(num_tokens)
        codes, scales = make_site(spec)(*inputs)
        assert_exact(codes, scales, *expected(spec, *inputs), torch.bfloat16)

    @pytest.mark.parametrize("num_tokens", [0, 1, 5])
    def test_opcheck(self, num_tokens: int) -> None:
        x, projection, weight = make_inputs(num_tokens)
        gate = x.clone() if num_tokens == 0 else projection[..., 512:]  # opcheck cannot copy a strided view of nothing
        op = torch.ops.gdn_backend.gated_rmsnorm_fp8_quant.default
        torch.library.opcheck(op, (x, gate, weight, None, 1e-6, encode_call(SPEC, "triton")))

    def test_users_function_takes_triton(self) -> None:
        x, projection, weight = make_inputs(7)
        gate = projection[..., 512:].reshape(7, 32, 128)
        names = kernel_names(lambda: gated_rmsnorm_fp8_quant(x, gate, weight, 1e-6, roundings=QWEN))
        assert len(names) == 1, names
        codes, scales = gated_rmsnorm_fp8_quant(x, gate, weight, 1e-6, roundings=QWEN)
        assert_exact(codes, scales, *expected(SPEC, x, projection, weight), torch.bfloat16)

    @pytest.mark.field_case("F25")
    @pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    def test_runs_on_the_device_of_its_tensors(self) -> None:
        inputs = make_inputs(7, "cuda:1")
        with torch.cuda.device(0):
            codes, scales = make_site(SPEC)(*inputs)
            compiled = torch.compile(make_site(SPEC), fullgraph=True)(*inputs)
            assert torch.cuda.current_device() == 0
        assert codes.device == scales.device == torch.device("cuda", 1)
        for ours in ((codes, scales), compiled):
            assert_exact(*ours, *expected(SPEC, *inputs), torch.bfloat16)


class TestCompiled:
    @pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
    @pytest.mark.parametrize("num_tokens", [1, 7, 2051])
    @pytest.mark.parametrize("spec", [SPEC, TMA], ids=["row", "tma"])
    def test_is_exact_and_one_kernel(self, mode: str, num_tokens: int, spec: FusedSpec) -> None:
        inputs = make_inputs(num_tokens)
        for tensor in inputs:
            torch._dynamo.mark_static_address(tensor)  # or CUDA graphs copy the inputs to where they were recorded
        run = torch.compile(make_site(spec), fullgraph=True, mode=mode)
        names = kernel_names(lambda: run(*inputs))
        assert len(names) == 1, names
        assert "gated_rmsnorm" in names[0]
        poison(num_tokens)
        codes, scales = (result.clone() for result in run(*inputs))
        assert_exact(codes, scales, *expected(spec, *inputs), torch.bfloat16)

    def test_gate_out_of_a_matmul_is_not_copied(self) -> None:
        num_tokens = 64
        x, _, weight = make_inputs(num_tokens)
        hidden = torch.randn(num_tokens, 256, device="cuda").bfloat16()
        matrix = torch.randn(256, 16 * 768, device="cuda").bfloat16()
        site = make_site(SPEC)

        def layer(x: Tensor, hidden: Tensor) -> Result:
            return site(x, (hidden @ matrix).view(num_tokens, 16, 768), weight)

        run = torch.compile(layer, fullgraph=True)
        names = kernel_names(lambda: run(x, hidden))
        assert sum("gated_rmsnorm" in name for name in names) == 1, names
        assert not [name for name in names if "copy" in name.lower() or "triton_poi" in name], names
        projection = (hidden @ matrix).view(num_tokens, 16, 768)
        assert_exact(*run(x, hidden), *expected(SPEC, x, projection, weight), torch.bfloat16)

    @pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
    def test_any_token_count(self, mode: str) -> None:
        options = {"triton.cudagraphs": True} if mode == "reduce-overhead" else {}
        counter = CompileCounterWithBackend("inductor")
        with torch._inductor.config.patch(options):
            run = torch.compile(make_site(SPEC), fullgraph=True, dynamic=True, backend=counter)
            for num_tokens in (7, 2051, 33, 128, 5000):
                inputs = make_inputs(num_tokens)
                poison(num_tokens)
                codes, scales = (result.clone() for result in run(*inputs))
                assert_exact(codes, scales, *expected(SPEC, *inputs), torch.bfloat16)
                if num_tokens == 7:
                    compiled = counter.frame_count
            assert counter.frame_count == compiled, "recompiled for a token count"
            for num_tokens in (0, 1):  # sizes that Dynamo always compiles by themselves
                inputs = make_inputs(num_tokens)
                codes, scales = (result.clone() for result in run(*inputs))
                assert_exact(codes, scales, *expected(SPEC, *inputs), torch.bfloat16)

    def test_symbolic_token_count_and_eps_are_one_kernel(self) -> None:
        run = torch.compile(make_site(SPEC), fullgraph=True, dynamic=True)
        for num_tokens, eps in ((7, 1e-6), (33, 1e-6), (33, 0.1)):
            inputs = make_inputs(num_tokens)
            codes, scales = run(*inputs, eps)
            assert_exact(codes, scales, *expected(SPEC, *inputs, eps), torch.bfloat16)
            names = kernel_names(lambda inputs=inputs, eps=eps: run(*inputs, eps))
            assert len(names) == 1, names

    def test_forced_reference_keeps_its_roundings(self) -> None:
        inputs = make_inputs(33)
        codes, scales = torch.compile(make_site(SPEC, "reference"), fullgraph=True)(*inputs)
        ref_codes, ref_scales = expected(SPEC, *inputs)
        assert torch.equal(codes.view(torch.uint8), ref_codes.view(torch.uint8))
        assert torch.equal(scales, ref_scales)

    def test_fp8_quant(self) -> None:
        y = torch.randn(33, 4096, device="cuda").bfloat16()
        codes, scales = torch.compile(fp8_quant, fullgraph=True)(y)
        assert_exact(codes, scales, *quantise(y, 128, DEFAULT_QUANT, codes.dtype), torch.bfloat16)
