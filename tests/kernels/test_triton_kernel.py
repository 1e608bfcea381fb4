"""The Triton kernel against the reference on the same GPU: eager's bytes, whatever spec, shape and values."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import triton
import triton.language as tl

from gdn_backend.kernels.configs import describe
from gdn_backend.kernels.eager_arithmetic import activation_of
from gdn_backend.kernels.gated_rmsnorm_quant import launch, plan, supports
from gdn_backend.kernels.gated_rmsnorm_quant_kernel import gated_rmsnorm_quant_kernel
from gdn_backend.kernels.reference import reference
from gdn_backend.ops.dispatch import Operands
from gdn_backend.ops.gated_rmsnorm_quant import allocate_outputs
from gdn_backend.ops.spec import FusedSpec
from tests.exactness import Distance, assert_exact
from tests.kernels.specs import BASE, ONE, QWEN, SPECS, change, dtype_before_quantisation, quant

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def poisoned(x: torch.Tensor, spec: FusedSpec) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = allocate_outputs(x, spec)
    codes.view(torch.uint8).fill_(0x55)
    scales.fill_(-777.0)
    return codes, scales


def run(
    spec: FusedSpec,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    outputs: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    codes, scales = outputs or poisoned(x, spec)
    programs, arguments = plan(x, gate, weight, bias, eps, spec, codes, scales, describe(x.device))
    gated_rmsnorm_quant_kernel[(programs,)](**arguments)
    return codes, scales


def check(
    spec: FusedSpec,
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> Distance:
    ours = run(spec, x, gate, weight, bias, eps)
    eager = reference(x, gate, weight, bias, eps, spec)
    return assert_exact(*ours, *eager, dtype_before_quantisation(spec), spec.quant.scale_format)


def inputs(
    spec: FusedSpec, num_tokens: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, gate ``[T, hidden]`` and a weight, random."""
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).to(dtype)

    width = spec.norm_size if spec.norm_before_gate else spec.hidden_size
    x, gate = normal(num_tokens, spec.hidden_size), normal(num_tokens, spec.hidden_size) * 2
    return x, gate, (1 + 0.2 * normal(width)).to(dtype) - spec.weight_offset


@pytest.mark.parametrize("name", SPECS)
def test_every_form_gives_eagers_bytes(name: str) -> None:
    spec = SPECS[name]
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    x, gate, weight = inputs(spec, 33, dtype)
    operands = Operands(x.device, x.dtype, gate.dtype, weight.dtype, None, weight.numel())
    assert supports(spec, operands) is None
    check(spec, x, gate, weight)


@pytest.mark.parametrize("name", ["qwen", "olmo", "olmo fp32 chain", "olmo per token"])
def test_norms_that_are_summed_in_eagers_order_are_byte_equal(name: str) -> None:
    for seed, num_tokens in enumerate((1, 33, 2051, 8192)):
        distance = check(SPECS[name], *inputs(SPECS[name], num_tokens, seed=seed))
        assert (distance.codes_off, distance.scales_off) == (0, 0)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 7, 16, 100, 2051])
@pytest.mark.parametrize("name", ["qwen", "heads of 96", "olmo", "zamba2", "mamba2", "three heads", "per token"])
def test_token_counts(name: str, num_tokens: int) -> None:
    check(SPECS[name], *inputs(SPECS[name], num_tokens, seed=num_tokens))


@pytest.mark.parametrize("num_tokens", [1, 7, 129, 1025, 2049])
def test_weights_by_head(num_tokens: int) -> None:
    """Every program has columns of the weight of its own, whichever token it begins with."""
    x, gate, _ = inputs(BASE, num_tokens)
    check(BASE, x, gate, torch.rand(BASE.hidden_size, device="cuda").bfloat16() + 0.5)


def test_one_compiled_kernel_serves_many_token_counts() -> None:
    gated_rmsnorm_quant_kernel.device_caches.clear()
    for num_tokens in (1, 2, 3, 15, 16, 17, 64, 100, 128, 512, 1000, 2048, 4099, 8192, 65536):
        x = torch.zeros(num_tokens, 4096, dtype=torch.bfloat16, device="cuda")
        run(BASE, x, x, x[0, :128])
    device = torch.cuda.current_device()
    assert 1 <= len(gated_rmsnorm_quant_kernel.device_caches[device][0]) <= 4


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("gate_dtype", DTYPES)
def test_dtypes_of_x_and_gate(x_dtype: torch.dtype, gate_dtype: torch.dtype) -> None:
    x, gate, weight = inputs(BASE, 65, torch.float32)
    check(change(roundings=ONE), x.to(x_dtype), gate.to(gate_dtype), weight)
    check(BASE, x.to(x_dtype), gate.to(gate_dtype), weight.bfloat16())


@pytest.mark.parametrize("weight_dtype", DTYPES)
def test_dtypes_of_weight_and_bias(weight_dtype: torch.dtype) -> None:
    x, gate, weight = inputs(BASE, 65)
    weight = weight.to(weight_dtype)
    check(BASE, x, gate, weight)
    check(change(roundings=("bias:bfloat16", *QWEN)), x, gate, weight, bias=weight.flip(0))
    check(change(roundings=ONE), x, gate, weight, bias=weight.flip(0) * 0.3)
    check(change(roundings=(), weight_offset=1.0), x, gate, None)


def gate_as_hf_lays_it_out(spec: FusedSpec, num_tokens: int) -> torch.Tensor:
    """``[T, 16, 256]``, the last columns of a projection ``[T, 16 * 768]``."""
    projection = torch.randn(num_tokens, 16, 768, device="cuda").to(torch.bfloat16)
    return projection[..., 512:]


def views(spec: FusedSpec) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Ways to lay out a random ``[6, hidden]``; each gives a tensor of as many values."""
    hidden, heads = spec.hidden_size, spec.hidden_size // 128

    def like(t: torch.Tensor, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=t.device).to(t.dtype)

    return {
        "rows of a wider tensor": lambda t: like(t, 6, 3 * hidden)[:, hidden : 2 * hidden],
        "every second row": lambda t: like(t, 12, hidden)[::2],
        "heads apart": lambda t: like(t, 6, heads, 512)[..., 128:256],
        "heads apart, flat": lambda t: like(t, 6, heads, 512).reshape(-1, 512)[:, :128],
        "a slice of the sequence": lambda t: like(t, 2, 5, hidden)[:, 1:4],
        "heads before tokens": lambda t: like(t, 2, heads, 3, 128).transpose(1, 2),
        "split as HF does": lambda t: like(t, 2, 3, 16, 768)[..., 512:],
        "columns before rows": lambda t: like(t, hidden, 6).t(),
        "expanded": lambda t: like(t, 1, hidden).expand(6, hidden),
        "off by one element": lambda t: like(t, 6 * hidden + 1)[1:].view(6, hidden),
    }


@pytest.mark.parametrize("layout", sorted(views(BASE)))
def test_strided_inputs_are_read_where_they_are(layout: str) -> None:
    x, gate, weight = inputs(BASE, 6)
    strided = views(BASE)[layout](x)
    check(BASE, x, strided, weight)
    check(BASE, strided, gate, weight)


def special_values(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """``x`` ``[T, hidden]`` with something odd in it."""

    def filled(value: float, where: slice | int = 5) -> torch.Tensor:
        changed = x.clone()
        changed[1, where] = value
        return changed

    alternating = torch.where(torch.arange(x.shape[1], device=x.device) % 2 == 0, 0.0, -0.0).to(x.dtype)
    return {
        "zero token": filled(0.0, slice(None)),
        "negative zeros": filled(-0.0, slice(None)),
        "zeros of both signs": torch.cat([x[:1], alternating[None], x[2:]]),
        "zero group": filled(0.0, slice(128, 256)),
        "NaN": filled(float("nan")),
        "infinity": filled(float("inf")),
        "negative infinity": filled(float("-inf")),
        "two infinities": filled(float("inf"), slice(5, 9)),
        "large": filled(3e38 if x.dtype != torch.float16 else 6e4, slice(100)),
        "large negative": filled(-1e4, slice(128)),
        "gates of which exp overflows": filled(-88.5, slice(300)),
        "tiny": x * 1e-6,
        "subnormal": x * 1e-39 if x.dtype != torch.float16 else x * 1e-7,
    }


SPECIAL = (
    "qwen",
    "fp32 chain",
    "kimi",
    "no floor",
    "hf",
    "hub",
    "capped",
    "ue8m0",
    "ue8m0 bits",
    "fnuz",
    "olmo",
    "mamba2",
)


@pytest.mark.parametrize("name", [*SPECIAL, "per token", "inverse"])
def test_special_values(name: str) -> None:
    spec = SPECS[name]
    x, gate, weight = inputs(spec, 3)
    for label, odd in special_values(x).items():
        try:
            check(spec, odd, gate, weight)
            check(spec, x, odd, weight)
        except AssertionError as error:
            raise AssertionError(f"{label}: {error}") from error


def test_values_past_the_fp8_maximum_are_nan_without_a_clamp() -> None:
    spec = quant(("min", 1.0), ("div", 448.0), ("max", 1e-8))
    x, gate, weight = inputs(spec, 5)
    codes, _ = run(spec, x, gate, weight)
    assert codes.float().isnan().any()
    check(spec, x, gate, weight)


@pytest.mark.field_case("F28")
def test_negative_zero_has_no_code_in_fnuz() -> None:
    x, gate, weight = inputs(SPECS["fnuz"], 3)
    codes, _ = run(SPECS["fnuz"], x * -0.0, gate, weight)
    assert int(codes.view(torch.uint8).max()) == 0


@pytest.mark.parametrize("eps", [0.0, 1e-12, 1e-5, 1.0])
def test_eps(eps: float) -> None:
    check(BASE, *inputs(BASE, 9), eps=eps)


def test_scales_with_padded_columns() -> None:
    x, gate, weight = inputs(BASE, 5)
    storage = torch.full((32, 8), -777.0, device="cuda")
    codes, _ = poisoned(x, BASE)
    run(BASE, x, gate, weight, outputs=(codes, storage.t()[:5]))
    eager = reference(x, gate, weight, None, 1e-6, BASE)
    assert_exact(codes, storage.t()[:5], *eager, torch.bfloat16)
    assert bool((storage[:, 5:] == -777.0).all())


def test_nothing_beside_the_outputs_is_written() -> None:
    spec = SPECS["three heads"]
    x, gate, weight = inputs(spec, 7)
    guard = torch.full((9, 384), 0x55, dtype=torch.uint8, device="cuda")
    scales = torch.full((9, 3), -777.0, device="cuda")
    run(spec, x, gate, weight, outputs=(guard[1:8].view(torch.float8_e4m3fn), scales[1:8]))
    assert bool((guard[[0, 8]] == 0x55).all())
    assert bool((scales[[0, 8]] == -777.0).all())


@pytest.mark.field_case("F26")
def test_more_than_2_to_the_31_elements() -> None:
    num_tokens = 2**31 // 4096 + 3
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(64, 4096, device="cuda", generator=generator).to(torch.bfloat16)
    gate = torch.empty(num_tokens, 4096, dtype=torch.bfloat16, device="cuda")
    gate[-64:] = x.flip(0)
    many = torch.empty_like(gate)
    many[-64:] = x
    weight = x[0, :128].clone()
    codes, scales = run(BASE, many, gate, weight)
    eager = reference(x, x.flip(0), weight, None, 1e-6, BASE)
    assert_exact(codes[-64:], scales[-64:], *eager, torch.bfloat16)


@triton.jit
def _activation_kernel(gate_ptr, out_ptr, ACTIVATION: tl.constexpr, DIVISION: tl.constexpr, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + offsets).to(tl.float32)
    tl.store(out_ptr + offsets, activation_of(gate, ACTIVATION, DIVISION))


@pytest.mark.parametrize(
    ("division", "dtype"),
    [
        *itertools.product(("approximate", "scaled", "ieee"), (torch.bfloat16, torch.float16)),
        ("scaled bfloat16", torch.bfloat16),
    ],
)
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_activation_of_every_gate(dtype: torch.dtype, activation: str, division: str) -> None:
    if division != "ieee" and not describe(torch.device("cuda")).ptx:
        pytest.skip("PTX only")
    gate = torch.arange(2**16, device="cuda").to(torch.int16).view(dtype)
    ours = torch.empty(2**16, device="cuda")
    _activation_kernel[(64,)](gate, ours, activation, division, 1024)
    act = torch.nn.functional.silu if activation == "silu" else torch.sigmoid
    eager = act(gate.float())
    different = (ours.view(torch.int32) != eager.view(torch.int32)) & ~(ours.isnan() & eager.isnan())
    if division == "approximate":
        # Below 2^-118 they come out as zeros, which the scale's floor makes of them anyway; the sign has to be right.
        negligible = (gate < -80) & (ours == 0) & (ours.signbit() == eager.signbit())
        different &= ~negligible
    assert not bool(different.any()), (gate[different][:10], ours[different][:10], eager[different][:10])


def test_as_a_graph_op() -> None:
    """Through ``launch`` and ``wrap_triton``, eagerly."""

    @torch.library.triton_op("gdn_backend_test::kernel", mutates_args=())
    def op(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
        return launch(x, gate, weight, None, eps, BASE)

    x, gate, weight = inputs(BASE, 33)
    assert_exact(*op(x, gate, weight, 1e-6), *reference(x, gate, weight, None, 1e-6, BASE), torch.bfloat16)
    compiled = torch.compile(op, dynamic=True)
    for num_tokens in (2, 33, 1, 0, 2051):
        x, gate, weight = inputs(BASE, num_tokens)
        eager = reference(x, gate, weight, None, 1e-6, BASE)
        assert_exact(*compiled(x, gate, weight, 1e-6), *eager, torch.bfloat16)
