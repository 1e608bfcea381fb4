"""The reference: byte for byte what the models' own modules and quantisations give, whatever the values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gdn_backend import rms_norm_gated
from gdn_backend.kernels.reference import quantise, reference
from gdn_backend.ops.spec import FusedSpec, QuantSpec, ScaleLayout, dtype_name
from tests.kernels.naive import NORM_FORMS, QUANT_FORMS, NormForm, QuantForm, mamba2, qwen3_next

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FP8_DTYPES = [torch.float8_e4m3fn, torch.float8_e4m3fnuz]
TOKENS = [0, 1, 33]

norm_forms = pytest.mark.parametrize("form", NORM_FORMS, ids=lambda form: form.name)
quant_forms = pytest.mark.parametrize(
    ("form", "dtype"),
    [pytest.param(form, dtype, id=f"{form.name}-{dtype_name(dtype)}") for form in QUANT_FORMS for dtype in form.dtypes],
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
fp8_dtypes = pytest.mark.parametrize("fp8", FP8_DTYPES, ids=dtype_name)


def assert_same_bytes(ours: Tensor, theirs: Tensor) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    different = ours.contiguous().view(width) != theirs.contiguous().view(width)
    different &= ~(ours.float().isnan() & theirs.float().isnan())  # the sign of a NaN says nothing
    assert not different.any(), f"{int(different.sum())} of {different.numel()} differ"


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def special_rows(dtype: torch.dtype, width: int) -> Tensor:
    """Rows that each hold one difficulty in their first group."""
    tiny, most = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    rows = torch.randn(10, width).to(dtype)
    rows[0] = 0.0
    rows[1] = -0.0
    rows[2, 3] = float("nan")
    rows[3, 5] = float("inf")
    rows[4, :2] = torch.tensor([float("inf"), -float("inf")])
    rows[5] *= 1e-6
    rows[6] = tiny / 4  # subnormal
    rows[7, 7] = most
    rows[8] = -1e-9
    rows[9, ::2] = 447.9
    return rows


class TestNorm:
    @norm_forms
    @dtypes
    @pytest.mark.parametrize("num_tokens", TOKENS)
    def test_is_the_models_own(self, form: NormForm, dtype: torch.dtype, num_tokens: int) -> None:
        x, gate, weight = random(num_tokens, 4, 128, dtype=dtype), random(num_tokens, 4, 128, dtype=dtype), random(128)
        weight = weight.to(dtype)
        ours = rms_norm_gated(x, gate, weight, 1e-6, roundings=form.roundings(dtype), **form.arguments)
        assert_same_bytes(ours, form.function(x, gate, weight, 1e-6))

    @pytest.mark.parametrize("head_dim", [64, 96, 192, 256])
    def test_any_head_dim(self, head_dim: int) -> None:
        x, gate, weight = random(3, 5, head_dim).half(), random(3, 5, head_dim).half(), random(head_dim).half()
        roundings = NORM_FORMS[0].roundings(torch.float16)
        ours = rms_norm_gated(x, gate, weight, 1e-5, roundings=roundings)
        assert_same_bytes(ours, qwen3_next(x, gate, weight, 1e-5))

    def test_wide_weight_has_no_second_rounding(self) -> None:
        x, gate, weight = random(7, 4, 128).bfloat16(), random(7, 4, 128).bfloat16(), random(128)
        ours = rms_norm_gated(x, gate, weight, 1e-6, roundings=("norm:bfloat16", "output:bfloat16"))
        assert_same_bytes(ours, qwen3_next(x, gate, weight, 1e-6))

    def test_gate_of_another_dtype(self) -> None:
        x, gate, weight = random(7, 4, 128).half(), random(7, 4, 128).bfloat16(), random(128).half()
        roundings = NORM_FORMS[0].roundings(torch.float16)
        assert_same_bytes(rms_norm_gated(x, gate, weight, 1e-6, roundings=roundings), qwen3_next(x, gate, weight, 1e-6))

    @dtypes
    @pytest.mark.parametrize("shape", [(5, 1024), (2, 3, 1024)])
    def test_gate_first_over_groups_of_the_row(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        x, gate, weight = random(*shape, dtype=dtype), random(*shape, dtype=dtype), random(1024, dtype=dtype)
        roundings = () if dtype == torch.float32 else tuple(f"{p}:{dtype_name(dtype)}" for p in ("norm", "weight"))
        ours = rms_norm_gated(x, gate, weight, 1e-5, norm_before_gate=False, norm_size=256, roundings=roundings)
        assert ours.dtype == torch.float32
        assert_same_bytes(ours.to(dtype), mamba2(x, gate, weight, 1e-5))

    def test_gate_first_prefill_keeps_fp32(self) -> None:
        x, gate, weight = random(5, 1024), random(5, 1024).bfloat16(), random(1024).bfloat16()
        ours = rms_norm_gated(x, gate, weight, 1e-5, norm_before_gate=False, norm_size=256)
        assert_same_bytes(ours, mamba2(x, gate, weight, 1e-5))

    def test_norm_over_merged_heads(self) -> None:
        x, gate, weight = random(3, 6, 32), random(3, 6, 32), random(32)
        ours = rms_norm_gated(x, gate, weight, 1e-6, norm_size=96)
        merged = [t.reshape(3, 2, 96) for t in (x, gate)]
        assert_same_bytes(ours, rms_norm_gated(*merged, weight.repeat(3), 1e-6).reshape(3, 6, 32))

    def test_bias_and_no_weight(self) -> None:
        x, gate, bias = random(3, 4, 128), random(3, 4, 128), random(128)
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        expected = (h + bias) * torch.nn.functional.silu(gate)
        assert_same_bytes(rms_norm_gated(x, gate, None, 1e-6, bias=bias), expected)

    def test_bias_is_rounded_at_its_point(self) -> None:
        x, gate, weight, bias = (random(*s).bfloat16() for s in ((3, 4, 128), (3, 4, 128), (128,), (128,)))
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        expected = (weight * n.bfloat16() + bias) * torch.nn.functional.silu(gate)
        roundings = tuple(f"{p}:bfloat16" for p in ("norm", "weight", "bias", "activation", "output"))
        assert_same_bytes(rms_norm_gated(x, gate, weight, 1e-6, bias=bias, roundings=roundings), expected)

    def test_strided_gate(self) -> None:
        projection = random(6, 2, 6 * 128).bfloat16()
        gate = projection[..., 4 * 128 :].unflatten(-1, (2, 128)).reshape(6, 4, 128)
        packed = projection[..., 4 * 128 :].reshape(6, 2, 256)
        x, weight = random(6, 4, 128).bfloat16(), random(128).bfloat16()
        roundings = NORM_FORMS[0].roundings(torch.bfloat16)
        spec = FusedSpec(512, 128, 128, 128, roundings=roundings)
        strided = projection[..., 4 * 128 :]
        assert not strided.is_contiguous()
        ours = reference(x, strided, weight, None, 1e-6, spec)
        theirs = reference(x, gate.contiguous(), weight, None, 1e-6, spec)
        assert_same_bytes(ours[0], theirs[0])
        assert_same_bytes(ours[1], reference(x, packed, weight, None, 1e-6, spec)[1])

    @dtypes
    def test_special_values(self, dtype: torch.dtype) -> None:
        x, gate = special_rows(dtype, 512).view(10, 4, 128), special_rows(dtype, 512).flip(0).view(10, 4, 128)
        weight = random(128, dtype=dtype)
        for form in NORM_FORMS:
            ours = rms_norm_gated(x, gate, weight, 1e-6, roundings=form.roundings(dtype), **form.arguments)
            assert_same_bytes(ours, form.function(x, gate, weight, 1e-6))

    def test_is_differentiable(self) -> None:
        x, gate, weight = (t.requires_grad_() for t in (random(2, 3, 16), random(2, 3, 16), random(16)))
        rms_norm_gated(x, gate, weight, 1e-6).square().sum().backward()
        ours = [t.grad.clone() for t in (x, gate, weight)]
        for tensor in (x, gate, weight):
            tensor.grad = None
        qwen3_next(x, gate, weight, 1e-6).square().sum().backward()
        for grad, tensor in zip(ours, (x, gate, weight), strict=True):
            torch.testing.assert_close(grad, tensor.grad)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"gate": torch.zeros(2, 4, 64)}, "one shape"),
            ({"activation": "gelu"}, "expected 'silu' or 'sigmoid'"),
            ({"roundings": ("nowhere:bfloat16",)}, "expected 'point:dtype'"),
            ({"roundings": ("norm:bfloat17",)}, "not the name of a torch dtype"),
            ({"norm_size": 48}, "norm_size=48 divides neither"),
            ({"weight": torch.zeros(100)}, "weight of shape"),
            ({"bias": torch.zeros(4, 128)}, "bias of shape"),
        ],
        ids=["shape", "activation", "point", "dtype", "norm_size", "weight", "bias"],
    )
    def test_wrong_arguments(self, arguments: dict, message: str) -> None:
        good = {"x": torch.zeros(2, 4, 128), "gate": torch.zeros(2, 4, 128), "weight": torch.zeros(128), "eps": 1e-6}
        with pytest.raises(ValueError, match=message):
            rms_norm_gated(**{**good, **arguments})


class TestModulesOfTransformers:
    """The same against the modules themselves, where transformers is installed."""

    @dtypes
    @pytest.mark.parametrize(
        ("path", "name", "form"),
        [
            ("qwen3_next.modeling_qwen3_next", "Qwen3NextRMSNormGated", NORM_FORMS[0]),
            ("kimi_linear.modeling_kimi_linear", "KimiLinearRMSNormGated", NORM_FORMS[1]),
        ],
        ids=["qwen3_next", "kimi_linear"],
    )
    def test_norm_before_gate(self, path: str, name: str, form: NormForm, dtype: torch.dtype) -> None:
        module = getattr(pytest.importorskip(f"transformers.models.{path}"), name)(128, eps=1e-6).to(dtype)
        module.weight.data.copy_(random(128))
        x, gate = random(33, 128, dtype=dtype), random(33, 128, dtype=dtype)
        with torch.no_grad():
            ours = rms_norm_gated(x, gate, module.weight, 1e-6, roundings=form.roundings(dtype), **form.arguments)
            assert_same_bytes(ours, module(x, gate))

    def test_gate_before_norm(self) -> None:
        mamba = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
        module = mamba.MambaRMSNormGated(1024, group_size=256, eps=1e-5).bfloat16()
        module.weight.data.copy_(random(1024))
        x, gate = random(5, 3, 1024).bfloat16(), random(5, 3, 1024).bfloat16()
        with torch.no_grad():
            ours = rms_norm_gated(
                x,
                gate,
                module.weight,
                1e-5,
                norm_before_gate=False,
                norm_size=256,
                roundings=("norm:bfloat16", "weight:bfloat16", "output:bfloat16"),
            )
            assert_same_bytes(ours, module(x, gate))


class TestQuantise:
    @quant_forms
    @fp8_dtypes
    @pytest.mark.parametrize("num_tokens", TOKENS)
    def test_is_the_models_own(self, form: QuantForm, dtype: torch.dtype, fp8: torch.dtype, num_tokens: int) -> None:
        y = random(num_tokens, 512, dtype=dtype)
        codes, scales = quantise(y, 128, form.spec(torch.finfo(fp8).max), fp8)
        ref_codes, ref_scales = form.function(y, 128, fp8)
        assert_same_bytes(codes, ref_codes)
        assert_same_bytes(scales, ref_scales)
        assert codes.is_contiguous()
        assert scales.dtype == torch.float32

    @quant_forms
    @fp8_dtypes
    def test_special_values(self, form: QuantForm, dtype: torch.dtype, fp8: torch.dtype) -> None:
        y = special_rows(dtype, 256)
        codes, scales = quantise(y, 128, form.spec(torch.finfo(fp8).max), fp8)
        ref_codes, ref_scales = form.function(y, 128, fp8)
        assert_same_bytes(codes, ref_codes)
        assert_same_bytes(scales, ref_scales)
        assert codes[2].float().isnan().any(), "NaN has to come out as NaN"
        assert codes[0].float().isnan().all() == form.zeros_are_nan

    @pytest.mark.parametrize("group_size", [32, 64, 128, 256, 512])
    def test_group_sizes(self, group_size: int) -> None:
        y = random(5, 512).bfloat16()
        form = QUANT_FORMS[0]
        ours = quantise(y, group_size, QuantSpec(), torch.float8_e4m3fn)
        theirs = form.function(y, group_size, torch.float8_e4m3fn)
        assert_same_bytes(ours[0], theirs[0])
        assert_same_bytes(ours[1], theirs[1])

    def test_zero_group_has_the_floor_as_its_scale(self) -> None:
        codes, scales = quantise(torch.zeros(1, 128), 128, QuantSpec(), torch.float8_e4m3fn)
        assert scales.item() == torch.tensor(1.0 / (448.0 * 512.0)).item()
        assert not codes.view(torch.uint8).any()

    @pytest.mark.field_case("F28")
    def test_fnuz_has_no_negative_zero(self) -> None:
        y = torch.tensor([[-0.0, -1e-9, 1.0, -240.0]]).repeat(1, 32)
        codes, _ = quantise(y, 128, QuantSpec(), torch.float8_e4m3fnuz)
        assert codes.view(torch.uint8)[0, :2].tolist() == [0, 0], "0x80 is NaN in e4m3fnuz"
        assert not codes.float().isnan().any()

    @pytest.mark.parametrize("step", ["exp2_ceil_log2", "ceil_pow2_bits"])
    def test_ue8m0_scales_are_powers_of_two(self, step: str) -> None:
        y = random(64, 256) * torch.exp2(torch.randint(-20, 20, (64, 1)).float())
        quant = QuantSpec((("div", 448.0), (step,), ("max", 2.0**-120)))  # type: ignore[arg-type]
        _, scales = quantise(y, 128, quant, torch.float8_e4m3fn)
        assert (scales.log2() == scales.log2().round()).all()
        assert (scales >= y.view(64, 2, 128).abs().amax(-1) / 448.0).all()

    def test_ue8m0_kinds_differ_just_above_a_power_of_two(self) -> None:
        amax = torch.tensor(1.0).nextafter(torch.tensor(2.0)).item()
        y = torch.zeros(1, 128)
        y[0, 0] = amax
        by_bits = quantise(y, 128, QuantSpec((("ceil_pow2_bits",),)), torch.float8_e4m3fn)[1]
        by_log = quantise(y, 128, QuantSpec((("exp2_ceil_log2",),)), torch.float8_e4m3fn)[1]
        assert by_bits.item() == 2.0
        assert_same_bytes(by_log, torch.tensor([[amax]]).log2().ceil().exp2())

    @pytest.mark.parametrize(("value", "scale"), [(float("nan"), 2.0**127), (float("inf"), 2.0**127), (0.0, 2.0**-126)])
    def test_ue8m0_by_bits_is_held_to_what_the_format_has(self, value: float, scale: float) -> None:
        y = torch.full((1, 128), value)
        assert quantise(y, 128, QuantSpec((("ceil_pow2_bits",),)), torch.float8_e4m3fn)[1].item() == scale

    @pytest.mark.parametrize(("layout", "stride"), [("column", 6), ("column_tma", 8)])
    def test_column_major_scales(self, layout: ScaleLayout, stride: int) -> None:
        y = random(6, 512)
        codes, scales = quantise(y, 128, QuantSpec(scale_layout=layout), torch.float8_e4m3fn)
        row_codes, row_scales = quantise(y, 128, QuantSpec(), torch.float8_e4m3fn)
        assert scales.stride() == (1, stride)
        assert_same_bytes(scales, row_scales)
        assert_same_bytes(codes, row_codes)

    def test_wrong_step(self) -> None:
        with pytest.raises(ValueError, match="wrong arguments"):
            quantise(random(1, 128), 128, QuantSpec((("max", "bfloat16"),)), torch.float8_e4m3fn)


SHAPES = [
    pytest.param(4, 128, 128, id="one group a head"),
    pytest.param(4, 64, 128, id="groups of two heads"),
    pytest.param(4, 96, 128, id="groups that straddle heads"),
    pytest.param(2, 256, 128, id="two groups a head"),
    pytest.param(6, 192, 128, id="groups that straddle heads, wide"),
    pytest.param(4, 128, 512, id="one group a token"),
]


class TestReference:
    @pytest.mark.parametrize(("num_heads", "head_dim", "group_size"), SHAPES)
    @dtypes
    def test_joins_norm_and_quantisation(
        self, num_heads: int, head_dim: int, group_size: int, dtype: torch.dtype
    ) -> None:
        x, gate = (random(5, num_heads, head_dim, dtype=dtype) for _ in range(2))
        weight = random(head_dim, dtype=dtype)
        width = num_heads * head_dim
        spec = FusedSpec(width, head_dim, head_dim, group_size, roundings=NORM_FORMS[0].roundings(dtype))
        codes, scales = reference(x, gate, weight, None, 1e-6, spec)
        y = qwen3_next(x, gate, weight, 1e-6).reshape(5, width)
        ref_codes, ref_scales = QUANT_FORMS[0].function(y, group_size, torch.float8_e4m3fn)
        assert_same_bytes(codes, ref_codes)
        assert_same_bytes(scales, ref_scales)

    def test_writes_to_none_of_its_inputs(self) -> None:
        inputs = [random(5, 4, 128), random(5, 4, 128), random(128), random(128)]
        versions, copies = [t._version for t in inputs], [t.clone() for t in inputs]
        reference(*inputs, 1e-6, FusedSpec(512, 128, 128, 128))
        assert versions == [t._version for t in inputs]
        assert all(torch.equal(t, copy) for t, copy in zip(inputs, copies, strict=True))
