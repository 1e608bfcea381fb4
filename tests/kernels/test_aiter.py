"""The AITER adapter's contract: against a stub with the signature of AITER's function, and what it refuses.

No AMD hardware here: what AITER's kernel itself computes is not tested, only what it is asked for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from gdn_backend import environment
from gdn_backend.environment import AiterProbe, Availability
from gdn_backend.kernels import aiter
from gdn_backend.kernels.reference import reference
from gdn_backend.ops.call import encode_call
from gdn_backend.ops.dispatch import Operands
from gdn_backend.ops.gated_rmsnorm_quant import aiter_op
from gdn_backend.ops.spec import FusedSpec, QuantSpec, Step

SPEC = FusedSpec(512, 128, 128, 128)
FLOOR = 1.0 / (448.0 * 512.0)
UE8M0 = QuantSpec((("div", 448.0), ("exp2_ceil_log2",), ("max", FLOOR)), clamp=448.0)
BF16 = Operands(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16, torch.bfloat16, strided=())


def fused_rms_gated_fp8_group_quant(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor,
    eps: float,
    *,
    norm_before_gate: bool = True,
    use_ue8m0: bool = False,
    activation: str = "silu",
    out_dtype: torch.dtype | None = None,
    fp8_min: float | None = None,
    fp8_max: float | None = None,
    fp8_min_scaling_factor: float | None = None,
    group_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """AITER's function in plain PyTorch, with its signature, its assertions and its results."""
    assert x.is_contiguous()
    assert z.is_contiguous()
    assert x.shape == z.shape
    assert x.dim() == 2
    assert x.shape[0] > 0
    assert (fp8_min is None) == (fp8_max is None)
    num_columns = x.shape[1]
    assert weight.shape == (num_columns,)
    group_size = group_size or num_columns
    assert num_columns % group_size == 0
    act = {"silu": torch.nn.functional.silu, "sigmoid": torch.sigmoid}[activation](z.float())
    h = x.float() if norm_before_gate else x.float() * act
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()
    h = h if bias is None else h + bias.float()
    h = h * act if norm_before_gate else h
    groups = h.view(x.shape[0], -1, group_size)
    fp8_max = torch.finfo(out_dtype).max if fp8_max is None else fp8_max
    scales = groups.abs().amax(-1) / fp8_max
    scales = torch.exp2(torch.ceil(torch.log2(scales))) if use_ue8m0 else scales
    scales = scales.clamp(min=1.0 / (fp8_max * 512.0) if fp8_min_scaling_factor is None else fp8_min_scaling_factor)
    codes = (groups / scales[..., None]).clamp(fp8_min, fp8_max).to(out_dtype).view(x.shape)
    return codes, scales


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """AITER as it would be found on ROCm, its function the stub above; returns the calls it gets."""
    calls: list[dict[str, Any]] = []

    def recorder(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        calls.append({**dict(zip(("x", "weight", "bias", "z", "eps"), args, strict=False)), **kwargs})
        return fused_rms_gated_fp8_group_quant(*args, **kwargs)

    found = Availability(True, "aiter stub")
    monkeypatch.setattr(environment, "aiter_probe", lambda: AiterProbe(found, found, recorder))
    return calls


def make_inputs(num_tokens: int, num_heads: int = 4, head_dim: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(num_tokens, num_heads, head_dim).bfloat16()
    gate = torch.randn(num_tokens, num_heads, 2 * head_dim).bfloat16()[..., head_dim:]
    return x, gate, torch.randn(head_dim).bfloat16()


EXPRESSIBLE = {
    "qwen in fp32": SPEC,
    "sigmoid": dataclasses.replace(SPEC, activation="sigmoid"),
    "gate first": dataclasses.replace(SPEC, norm_before_gate=False),
    "two groups a head": FusedSpec(512, 256, 256, 128),
    "one group a norm over the row": FusedSpec(512, 128, 512, 512, granularity="token"),
    "ue8m0": dataclasses.replace(SPEC, quant=UE8M0),
    "floor on the magnitude": dataclasses.replace(SPEC, quant=QuantSpec((("max", 1e-4), ("div", 448.0)))),
    "fnuz": dataclasses.replace(SPEC, fp8_dtype="float8_e4m3fnuz"),
    "fnuz up to 224": dataclasses.replace(
        SPEC, fp8_dtype="float8_e4m3fnuz", quant=QuantSpec((("div", 224.0), ("max", 1e-6)), clamp=224.0)
    ),
}


@pytest.mark.parametrize("spec", EXPRESSIBLE.values(), ids=EXPRESSIBLE)
@pytest.mark.parametrize("num_tokens", [0, 1, 33])
@pytest.mark.parametrize("with_bias", [False, True])
def test_asks_for_what_the_spec_says(
    stub: list[dict[str, Any]], spec: FusedSpec, num_tokens: int, with_bias: bool
) -> None:
    assert aiter.supports(spec, BF16, exact=False) is None
    x, gate, _ = make_inputs(num_tokens, spec.hidden_size // spec.head_dim, spec.head_dim)
    weight = torch.randn(spec.norm_size).bfloat16()
    bias = torch.randn(spec.norm_size).bfloat16() if with_bias else None
    codes, scales = aiter.launch(x, gate, weight, bias, 1e-6, spec)
    ref_codes, ref_scales = reference(x, gate, weight, bias, 1e-6, spec)
    assert len(stub) == (num_tokens > 0)
    assert codes.dtype == ref_codes.dtype
    assert codes.shape == ref_codes.shape
    assert codes.is_contiguous()
    assert scales.is_contiguous()
    torch.testing.assert_close(scales, ref_scales, rtol=1e-6, atol=0.0)
    assert (codes.view(torch.uint8) != ref_codes.view(torch.uint8)).sum() <= 2


def test_copies_only_what_is_not_contiguous(stub: list[dict[str, Any]]) -> None:
    x, gate, weight = make_inputs(3)
    aiter.launch(x, gate, weight, None, 1e-6, SPEC)
    assert stub[0]["x"].data_ptr() == x.data_ptr()
    assert stub[0]["z"].data_ptr() != gate.data_ptr()
    assert "copies gate, which is not contiguous" in aiter.remark(SPEC, dataclasses.replace(BF16, strided=("gate",)))
    assert "copies" not in aiter.remark(SPEC, BF16)
    assert "copies x and gate where" in aiter.remark(SPEC, dataclasses.replace(BF16, strided=None))


def quant(*steps: Step, **fields: Any) -> dict[str, Any]:
    return {"quant": QuantSpec(scale_steps=steps, **fields)}


INEXPRESSIBLE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no weight": ({}, {"weight": None}, "it needs a weight"),
    "offset": ({"weight_offset": 1.0}, {}, "no offset"),
    "wide weight": ({}, {"weight_size": 512}, "its weight is as wide as the norm"),
    "wide bias": ({}, {"bias": torch.float32, "bias_size": 512}, "its bias is as wide as the norm"),
    "group over heads": ({"group_size": 256}, {}, r"its groups divide the norm \(256 / 128\)"),
    "column-major": ({"quant": QuantSpec(scale_layout="column")}, {}, "row-major"),
    "no floor": (quant(("div", 448.0)), {}, "no such scale formula"),
    "floor of zero": (quant(("div", 448.0), ("max", 0.0)), {}, "no such scale formula"),
    "constant factor": (quant(("mul", 1 / 448.0), ("max", 1e-9)), {}, "no such scale formula"),
    "bits": (quant(("div", 448.0), ("ceil_pow2_bits",), ("max", 1e-9)), {}, "no such scale formula"),
    "scale as a factor": (quant(("div", 448.0), ("max", 1e-9), operation="multiply"), {}, "no such scale formula"),
    "other clamp": (quant(("div", 448.0), ("max", 1e-9), clamp=240.0), {}, "it clamps to what it divides by"),
    "too wide": (
        {"hidden_size": 32768, "norm_size": 32768, "group_size": 32768},
        {"x": torch.float32},
        "at most 65536 bytes",
    ),
}


@pytest.mark.parametrize(("spec", "operands", "reason"), INEXPRESSIBLE.values(), ids=INEXPRESSIBLE)
def test_refuses_what_it_cannot_express(spec: dict[str, Any], operands: dict[str, Any], reason: str) -> None:
    refusal = aiter.supports(dataclasses.replace(SPEC, **spec), dataclasses.replace(BF16, **operands), exact=False)
    assert refusal is not None
    assert re.search(reason, refusal), refusal


INEXACT: dict[str, tuple[dict[str, Any], str]] = {
    "roundings": (
        {"quant": UE8M0, "roundings": ("norm:bfloat16", "output:bfloat16")},
        r"the graph rounds \(norm:bfloat16, output:bfloat16\)",
    ),
    "quotient": ({"quant": dataclasses.replace(UE8M0, quotient="bfloat16")}, "rounds the quotient to bfloat16"),
    "multiply": (
        {"quant": dataclasses.replace(UE8M0, factor_steps=(("reciprocal",),), operation="multiply")},
        "multiplies by its reciprocal",
    ),
    "fp32 scale": ({}, "it divides by the FP8 maximum, eager multiplies by its reciprocal"),
}


@pytest.mark.parametrize(("change", "reason"), INEXACT.values(), ids=INEXACT)
def test_exact_refuses_what_it_does_not_reproduce(change: dict[str, Any], reason: str) -> None:
    spec = dataclasses.replace(SPEC, **change)
    assert aiter.supports(spec, BF16, exact=False) is None
    refusal = aiter.supports(spec, BF16, exact=True)
    assert refusal is not None
    assert re.search(reason, refusal), refusal
    assert f"not exact: {refusal}" in aiter.remark(spec, BF16)


def test_exact_takes_what_it_reproduces() -> None:
    spec = dataclasses.replace(SPEC, quant=UE8M0)
    assert aiter.supports(spec, BF16, exact=True) is None
    assert aiter.remark(spec, BF16) == ""


class TestOpaqueOp:
    def test_opcheck(self, stub: list[dict[str, Any]]) -> None:
        x, gate, weight = make_inputs(3)
        torch.library.opcheck(aiter_op._opoverload, (x, gate, weight, None, 1e-6, encode_call(SPEC, "aiter")))

    def test_stays_one_call_in_a_compiled_graph(self, stub: list[dict[str, Any]]) -> None:
        call = encode_call(SPEC, "aiter")
        graphs: list[torch.fx.Graph] = []

        def backend(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
            from torch._dynamo.backends.common import aot_autograd

            def forward(inner: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., Any]:
                graphs.append(inner.graph)
                return inner.forward

            return aot_autograd(fw_compiler=forward)(gm, inputs)

        run = torch.compile(lambda x, z, w: aiter_op(x, z, w, None, 1e-6, call), fullgraph=True, backend=backend)
        x, gate, weight = make_inputs(3)
        run(x, gate, weight)
        names = [str(node.target) for node in graphs[0].nodes if node.op == "call_function"]
        assert "gdn_backend.aiter_gated_rmsnorm_fp8_quant.default" in names
        assert not [name for name in names if name.startswith("aten")]
        assert len(stub) == 1


def test_without_aiter_the_launch_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Availability(False, "the aiter package is not installed")
    monkeypatch.setattr(environment, "aiter_probe", lambda: AiterProbe(missing, missing))
    with pytest.raises(RuntimeError, match="AITER cannot run this call: the aiter package is not installed"):
        aiter.launch(*make_inputs(3), None, 1e-6, SPEC)
