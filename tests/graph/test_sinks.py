"""The forms of quantisation beyond plain torch: DeepGEMM's cast, opaque ops, ops that write to their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gdn_backend.fusion.match import Reason
from gdn_backend.fusion.sinks.act_quant import HUB_OP, read_formula
from tests.graph import quant_ops
from tests.graph.harness import Outcome, assert_fused, assert_missed, run, same_bytes
from tests.graph.quant_ops import call_group_writer, call_token_writer, deepgemm_cast, packed
from tests.graph.sites import HIDDEN, ONE_ROUNDING, UNQUANTISED, make_inputs, site
from tests.graph.triton_launch import ACT_QUANT_SOURCES, FakeKernel, run_launch

Quantise = Callable[[torch.Tensor], Any]

VLLM, HUB = torch.ops.vllm, torch.ops.finegrained_fp8_0a1b2c3

#: name -> quantisation of rows ``[T, K]``, the sink's name in the report.
FUSED: dict[str, tuple[Quantise, str]] = {
    "deepgemm": (deepgemm_cast, "decomposed"),
    "deepgemm, ue8m0 by bits": (lambda x: deepgemm_cast(x, ue8m0=True), "decomposed"),
    "deepgemm, ue8m0 packed": (lambda x: packed(*deepgemm_cast(x, ue8m0=True)), "decomposed"),
    "vllm triton": (lambda x: VLLM.triton_per_token_group_quant_fp8(x, 128), "vllm::triton_per_token_group_quant_fp8"),
    "vllm triton, overload": (
        lambda x: VLLM.triton_per_token_group_quant_fp8.default(x, group_size=128),
        "vllm::triton_per_token_group_quant_fp8",
    ),
    "aiter by vllm": (lambda x: VLLM.rocm_aiter_group_fp8_quant(x, 128), "vllm::rocm_aiter_group_fp8_quant"),
    "vllm cuda": (call_group_writer, "_C::per_token_group_fp8_quant"),
    "vllm cuda, ue8m0": (lambda x: call_group_writer(x, ue8m0=True), "_C::per_token_group_fp8_quant"),
    "vllm cuda, column-major": (lambda x: call_group_writer(x, column=True), "_C::per_token_group_fp8_quant"),
    "vllm cuda, per token": (call_token_writer, "_C::dynamic_per_token_scaled_fp8_quant"),
    "hub": (HUB.fp8_act_quant, "finegrained_fp8_0a1b2c3::fp8_act_quant"),
    "hub, overload": (lambda x: HUB.fp8_act_quant.default(x, 128), "finegrained_fp8_0a1b2c3::fp8_act_quant"),
}

REFUSED: dict[str, tuple[Quantise, Reason, str]] = {
    "aiter, transposed scales": (
        lambda x: VLLM.rocm_aiter_group_fp8_quant(x, 128, True), Reason.LAYOUT, "vllm::rocm_aiter_group_fp8_quant"),
    "vllm cuda, groups of 64": (
        lambda x: call_group_writer(x, size=64), Reason.GROUP_SIZE, "empty_like"),
    "vllm cuda, per tensor": (
        quant_ops.call_tensor_writer, Reason.PER_TENSOR, "_C::dynamic_scaled_fp8_quant"),
    "vllm cuda, static": (
        quant_ops.call_static_writer, Reason.STATIC_SCALE, "_C::static_scaled_fp8_quant"),
    "an unknown op": (torch.ops.somebody.secret_quant, Reason.SCALE_FORMULA, "somebody::secret_quant"),
}  # fmt: skip


def _run(quantise: Quantise, dynamic: bool = False, tokens: int = 3, **steps: Any) -> Outcome:
    with torch.no_grad():
        return run(site(UNQUANTISED, result=lambda c: quantise(c.rows), **steps), *make_inputs(tokens), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str, dynamic: bool) -> None:
    quantise, sink = FUSED[name]
    outcome = _run(quantise, dynamic)
    assert_fused(outcome)
    assert outcome.match.facts.sink == sink
    assert outcome.count(sink) == 0


@pytest.mark.parametrize("name", FUSED)
def test_zeros_come_out_as_the_op_has_them(name: str) -> None:
    outcome = _run(FUSED[name][0], gate=lambda c: c.z.float() * 0.0)
    assert_fused(outcome, keeps=())


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    quantise, reason, node = REFUSED[name]
    assert_missed(_run(quantise), reason, node)


@pytest.mark.parametrize("name", FUSED)
def test_one_token(name: str) -> None:
    assert_fused(_run(FUSED[name][0], tokens=1))


def test_the_pad_buffer_is_seen_elsewhere() -> None:
    def quantise(x: torch.Tensor) -> Any:
        padded = torch.zeros_like(x)
        padded[:] = x
        groups = padded.view(-1, HIDDEN // 128, 128)
        scales = groups.abs().float().amax(-1, keepdim=True).clamp(1e-4) / 448.0
        return (groups * (1.0 / scales)).to(torch.float8_e4m3fn), scales, padded

    outcome = _run(quantise)
    assert outcome.miss.reason is Reason.SHARED_INTERMEDIATE


def test_padding_that_adds_values_is_named() -> None:
    outcome = _run(lambda x: deepgemm_cast(x, size=384))
    assert outcome.miss.reason is Reason.LAYOUT, outcome.miss.render()


def test_results_written_to_a_tensor_of_the_user() -> None:
    def quantise(x: torch.Tensor) -> Any:
        codes = torch.empty_like(x, dtype=torch.float8_e4m3fn)
        seen = codes.view(torch.uint8)
        scales = torch.empty((x.shape[0], HIDDEN // 128))
        torch.ops._C.per_token_group_fp8_quant(x, codes, scales, 128, 1e-10, -448.0, 448.0, False)
        return codes, scales, seen

    assert_missed(_run(quantise), Reason.MUTATION, "empty_like")


def test_written_results_are_written_on() -> None:
    def quantise(x: torch.Tensor) -> Any:
        codes, scales = call_group_writer(x)
        scales.mul_(2.0)
        return codes, scales

    assert_fused(_run(quantise))


@pytest.mark.parametrize("name", ["vllm cuda", "hub", "deepgemm"])
def test_behind_the_sigmoid_family(name: str) -> None:
    assert_fused(_run(FUSED[name][0], **ONE_ROUNDING, activated=lambda c: torch.sigmoid(c.gate)))


@pytest.mark.parametrize("name", ACT_QUANT_SOURCES)
def test_a_triton_launch_in_the_graph(name: str) -> None:
    scale, codes, formula = ACT_QUANT_SOURCES[name]
    passes, fused, rows = run_launch(scale, codes)
    assert [match.facts.sink for match in passes.matches] == ["act_quant_kernel"], passes.misses
    assert "triton_kernel_wrapper" not in str(passes.graphs[0].graph)
    with torch.no_grad():
        assert all(map(same_bytes, fused(), formula(rows)))


def test_a_triton_launch_with_another_formula() -> None:
    passes, _, _ = run_launch("tl.max(tl.abs(x)) / 240.0", "x / s")
    assert [miss.reason for miss in passes.misses] == [Reason.SCALE_FORMULA]


@pytest.mark.parametrize(
    ("scale", "codes", "factor_floor", "scale_floor"),
    [
        ("tl.max(tl.abs(x)) / 448.0", "x / s", False, False),
        ("tl.max(tl.abs(x)) / 448.0", "(x / tl.maximum(s, 1e-12)).to(y_ptr.dtype.element_ty)", True, False),
        ("tl.maximum(tl.max(tl.abs(x)) / 448.0, 1e-12)", "(x / s).to(y_ptr.dtype.element_ty)", False, True),
    ],
)
def test_builds_of_act_quant_are_told_apart(scale: str, codes: str, factor_floor: bool, scale_floor: bool) -> None:
    quant = read_formula(FakeKernel(scale, codes).src)
    assert quant is not None
    assert (("max", 1e-12) in quant.factor_steps) is factor_floor
    assert (("max", 1e-12) in (quant.scale_steps or ())) is scale_floor


def test_an_unknown_build_of_act_quant() -> None:
    assert read_formula(FakeKernel("tl.max(tl.abs(x)) / 448.0", "x * s").src) is None
    assert read_formula("") is None


@pytest.mark.parametrize("namespace", ["finegrained_fp8", "_finegrained_fp8_cuda_0f1e2d3", "finegrained_fp8_ab12"])
def test_namespaces_of_the_hub(namespace: str) -> None:
    assert HUB_OP.fullmatch(f"{namespace}::fp8_act_quant")


def test_not_a_namespace_of_the_hub() -> None:
    assert not HUB_OP.fullmatch("my_finegrained_fp8::fp8_act_quant")
    assert not HUB_OP.fullmatch("finegrained_fp8_ab12::fp8_act_quant_2d")
