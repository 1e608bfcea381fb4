"""Which kernel serves a site, and the reasons that are given."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from gdn_backend import environment
from gdn_backend.environment import AiterProbe, Availability
from gdn_backend.ops.dispatch import (
    Choice,
    KernelUnavailableError,
    Operands,
    Refusal,
    check_requested,
    choose_kernel,
)
from gdn_backend.ops.spec import FusedSpec, QuantSpec

QWEN = ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
SPEC = FusedSpec(4096, 128, 128, 128, roundings=QWEN)
UE8M0 = QuantSpec((("div", 448.0), ("exp2_ceil_log2",), ("max", 1e-9)), clamp=448.0)
FP32_UE8M0 = dataclasses.replace(SPEC, roundings=(), quant=UE8M0)
CPU = Operands(torch.device("cpu"), torch.bfloat16, torch.bfloat16, torch.bfloat16, strided=())
GPU = dataclasses.replace(CPU, device=torch.device("cuda", 0))


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA build of torch with Triton."""
    pytest.importorskip("triton")
    monkeypatch.setattr(environment, "is_rocm", lambda: False)


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ROCm build of torch with Triton and an AITER that has the fused op."""
    pytest.importorskip("triton")
    found = Availability(True, "aiter stub")
    monkeypatch.setattr(environment, "is_rocm", lambda: True)
    monkeypatch.setattr(environment, "aiter_probe", lambda: AiterProbe(found, found, print))


class TestAuto:
    def test_reference_on_the_cpu(self) -> None:
        choice = choose_kernel(SPEC, CPU)
        assert choice == Choice("reference", "AITER: not a ROCm build of torch; Triton: the tensors are on cpu")

    def test_triton_on_a_gpu(self, nvidia: None) -> None:
        assert choose_kernel(SPEC, GPU) == Choice("triton", "AITER: not a ROCm build of torch")

    def test_aiter_on_rocm_where_it_is_exact(self, rocm: None) -> None:
        assert choose_kernel(FP32_UE8M0, GPU) == Choice("aiter", "")

    def test_triton_on_rocm_where_aiter_is_not_exact(self, rocm: None) -> None:
        choice = choose_kernel(SPEC, GPU)
        assert choice.kernel == "triton"
        assert choice.reason.startswith("AITER: its chain is fp32, the graph rounds")

    def test_fast_lets_aiter_round_as_it_likes_and_says_so(self, rocm: None) -> None:
        choice = choose_kernel(SPEC, GPU, numerics="fast")
        assert choice.kernel == "aiter"
        assert choice.reason.startswith("not exact: its chain is fp32, the graph rounds")

    def test_fast_does_not_make_aiter_express_more(self, rocm: None) -> None:
        spec = dataclasses.replace(SPEC, weight_offset=1.0)
        choice = choose_kernel(spec, GPU, numerics="fast")
        assert choice == Choice("triton", "AITER: it adds no offset to the weight (here 1)")

    def test_site_on_the_cpu_of_a_rocm_machine(self, rocm: None) -> None:
        choice = choose_kernel(FP32_UE8M0, CPU)
        assert choice == Choice("reference", "AITER: the tensors are on cpu; Triton: the tensors are on cpu")

    def test_the_reference_is_no_way_out_on_a_gpu(self, nvidia: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "triton_status", lambda: Availability(False, "the triton package is broken"))
        refusal = choose_kernel(SPEC, GPU)
        assert refusal == Refusal("auto", "AITER: not a ROCm build of torch; Triton: the triton package is broken")

    @pytest.mark.parametrize("name", ["x", "gate", "weight", "bias"])
    def test_no_kernel_takes_other_dtypes(self, name: str) -> None:
        refusal = choose_kernel(SPEC, dataclasses.replace(CPU, **{name: torch.float64}))
        assert refusal == Refusal("auto", f"{name} is float64; kernels take bfloat16, float16 and float32")

    @pytest.mark.parametrize(
        ("change", "is_taken"),
        [
            ({"norm_size": 256}, False),
            ({"norm_size": 128}, True),  # summed in eager's order
            ({"norm_size": 128, "group_size": 64}, False),
            ({"hidden_size": 5760, "head_dim": 192, "norm_size": 192}, True),  # as well
            ({"hidden_size": 3072, "head_dim": 192, "norm_size": 192, "group_size": 256}, True),
            ({"hidden_size": 3072, "head_dim": 192, "norm_size": 192, "group_size": 32}, False),
            ({"norm_size": 256, "roundings": ("output:bfloat16",)}, True),
            ({"norm_size": 256, "quant": UE8M0}, True),
        ],
    )
    def test_orders_of_summation_that_show(self, nvidia: None, change: dict[str, Any], is_taken: bool) -> None:
        spec = dataclasses.replace(SPEC, **{"roundings": (), **change})
        choice = choose_kernel(spec, GPU)
        assert isinstance(choice, Choice) is is_taken
        assert ("not summed in eager's order" in choice.reason) is not is_taken

    def test_orders_of_summation_on_the_cpu(self, nvidia: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(environment, "inductor_rounds_on_cpu", lambda: True)
        reasons = [choose_kernel(dataclasses.replace(SPEC, roundings=points), CPU).reason for points in ((), QWEN)]
        assert ["order of summation" in reason for reason in reasons] == [True, False]


class TestByName:
    def test_reference_on_a_gpu(self, nvidia: None) -> None:
        assert choose_kernel(SPEC, GPU, requested="reference") == Choice("reference", "asked for by name")

    def test_triton_for_a_site_on_the_cpu(self, nvidia: None) -> None:
        refusal = choose_kernel(SPEC, CPU, requested="triton")
        assert refusal == Refusal("triton", "Triton: the tensors are on cpu")

    def test_aiter_is_taken_with_its_numerics(self, rocm: None) -> None:
        choice = choose_kernel(SPEC, GPU, requested="aiter", numerics="exact")
        assert choice.kernel == "aiter"
        assert "asked for by name; not exact: its chain is fp32" in choice.reason

    def test_aiter_for_what_it_cannot_express(self, rocm: None) -> None:
        spec = dataclasses.replace(SPEC, group_size=256)
        refusal = choose_kernel(spec, GPU, requested="aiter")
        assert refusal == Refusal("aiter", "AITER: its groups divide the norm (256 / 128)")


class TestCheckRequested:
    def test_auto_and_reference_can_always_run(self) -> None:
        check_requested("auto")
        check_requested("reference")

    def test_unknown_name(self) -> None:
        with pytest.raises(ValueError, match="kernel='cuda': expected one of auto, aiter, triton, reference"):
            check_requested("cuda")

    def test_aiter_without_rocm(self, nvidia: None) -> None:
        environment.aiter_probe.cache_clear()
        with pytest.raises(KernelUnavailableError, match="'aiter' cannot run on this machine: not a ROCm build"):
            check_requested("aiter")

    def test_lists_those_that_can_run(self, nvidia: None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with pytest.raises(KernelUnavailableError, match=r"torch sees no GPU; kernels that can: reference$"):
            check_requested("triton")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        check_requested("triton")
        with pytest.raises(KernelUnavailableError, match=r"kernels that can: triton, reference$"):
            check_requested("aiter")
