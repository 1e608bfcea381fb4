"""The graph ops and the users' functions on the CPU: contract, tracing, errors."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import gdn_backend
from gdn_backend import QuantSpec, fp8_quant, gated_rmsnorm_fp8_quant, rms_norm_gated
from gdn_backend.environment import inductor_rounds_on_cpu
from gdn_backend.kernels.reference import quantise, reference
from gdn_backend.ops.call import PER_TOKEN, decode_call, decode_quant, encode_call, encode_quant
from gdn_backend.ops.outputs import allocate_outputs
from gdn_backend.ops.spec import FusedSpec
from tests.exactness import assert_exact
from tests.kernels.naive import NORM_FORMS, quant_vllm, qwen3_next

QWEN = NORM_FORMS[0].roundings(torch.bfloat16)
SPEC = FusedSpec(512, 128, 128, 128, roundings=QWEN)
COLUMN = dataclasses.replace(SPEC, quant=QuantSpec(scale_layout="column"))
TMA = dataclasses.replace(SPEC, quant=QuantSpec(scale_layout="column_tma"))
TOKEN = dataclasses.replace(SPEC, group_size=512, granularity="token")
OLMO = FusedSpec(768, 192, 192, 128, roundings=QWEN)

OPS = torch.ops.gdn_backend
EXACT_ON_CPU = {"emulate_precision_casts": True}


def make_inputs(num_tokens: int, num_heads: int = 4, head_dim: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """x, gate ``[T, H, D]`` and a weight ``[D]`` in bf16; the gate is a strided half of a projection (T > 0)."""
    x = torch.randn(num_tokens, num_heads, head_dim).bfloat16()
    gate = torch.randn(num_tokens, num_heads, 2 * head_dim).bfloat16()[..., head_dim:]
    if num_tokens == 0:
        gate = x.clone()  # torch.library.opcheck cannot copy a strided view of nothing
    return x, gate, torch.randn(head_dim).bfloat16()


def assert_equal(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(ours[0].view(torch.uint8), theirs[0].view(torch.uint8))
    assert torch.equal(ours[1], theirs[1])


class TestGraphOp:
    @pytest.mark.parametrize("spec", [SPEC, COLUMN, TMA, TOKEN, OLMO], ids=["row", "column", "tma", "token", "olmo"])
    @pytest.mark.parametrize("num_tokens", [0, 1, 5, 8])
    def test_keeps_the_contract(self, spec: FusedSpec, num_tokens: int) -> None:
        x, gate, weight = make_inputs(num_tokens, 4, spec.head_dim)
        codes, scales = OPS.gated_rmsnorm_fp8_quant(x, gate, weight, None, 1e-6, encode_call(spec, "reference"))
        for ours, contract in zip((codes, scales), allocate_outputs(x, spec), strict=True):
            assert ours.shape == contract.shape
            assert ours.dtype == contract.dtype
            assert num_tokens == 0 or ours.stride() == contract.stride()

    @pytest.mark.parametrize(
        ("op", "spec", "num_tokens"),
        [
            ("gated_rmsnorm_fp8_quant", SPEC, 0),
            ("gated_rmsnorm_fp8_quant", SPEC, 1),
            ("gated_rmsnorm_fp8_quant", COLUMN, 5),
            ("gated_rmsnorm_fp8_quant", TMA, 5),
            ("gated_rmsnorm_fp8_quant", TOKEN, 5),
            ("reference_gated_rmsnorm_fp8_quant", COLUMN, 5),
        ],
        ids=["none", "one", "column", "tma", "token", "opaque"],
    )
    def test_opcheck(self, op: str, spec: FusedSpec, num_tokens: int) -> None:
        x, gate, weight = make_inputs(num_tokens)
        assert num_tokens == 0 or not gate.is_contiguous()
        torch.library.opcheck(getattr(OPS, op).default, (x, gate, weight, None, 1e-6, encode_call(spec, "reference")))

    def test_opcheck_with_bias_and_without_weight(self) -> None:
        x, gate, bias = make_inputs(3)
        call = encode_call(SPEC, "reference")
        torch.library.opcheck(OPS.gated_rmsnorm_fp8_quant.default, (x, gate, None, bias, 1e-6, call))

    @pytest.mark.parametrize("shape", [(20, 128), (1, 5, 4, 128), (5, 2, 256), (5, 512)])
    def test_takes_any_shape_of_the_same_rows(self, shape: tuple[int, ...]) -> None:
        x, gate, weight = make_inputs(5)
        call = encode_call(SPEC, "reference")
        ours = OPS.gated_rmsnorm_fp8_quant(x.reshape(shape), gate.reshape(shape), weight, None, 1e-6, call)
        assert_equal(ours, reference(x, gate, weight, None, 1e-6, SPEC))

    def test_is_the_reference_on_the_cpu_whatever_kernel_is_named(self) -> None:
        inputs = (*make_inputs(3), None, 1e-6)
        for kernel in ("triton", "aiter", "reference"):
            ours = OPS.gated_rmsnorm_fp8_quant(*inputs, encode_call(SPEC, kernel))
            assert_equal(ours, reference(*inputs, SPEC))

    def test_backward_says_that_there_is_none(self) -> None:
        x, gate, weight = make_inputs(2)
        _, scales = OPS.gated_rmsnorm_fp8_quant(
            x.requires_grad_(), gate, weight, None, 1e-6, encode_call(SPEC, "reference")
        )
        with pytest.raises(RuntimeError, match="no autograd formula"):
            scales.sum().backward()


def some_eps() -> tuple[float, ...]:
    """Four values that one graph serves: what an opaque op is given, PyTorch makes a constant of."""
    return (1e-6, 1e-3, 0.5, 1e-5) if inductor_rounds_on_cpu() else (1e-6,) * 4


class TestCompiled:
    @pytest.mark.parametrize("spec", [TMA, TOKEN, OLMO], ids=["tma", "token", "olmo"])
    def test_is_exact(self, spec: FusedSpec) -> None:
        call = encode_call(spec, "reference")

        @torch.compile(fullgraph=True, options=EXACT_ON_CPU)
        def run(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return OPS.gated_rmsnorm_fp8_quant(x, gate, weight, None, 1e-6, call)

        x, gate, weight = make_inputs(33, 4, spec.head_dim)
        y = qwen3_next(x, gate, weight, 1e-6).reshape(33, -1)
        codes, scales = run(x, gate, weight)
        assert_exact(codes, scales, *quant_vllm(y, spec.group_size, torch.float8_e4m3fn), torch.bfloat16)
        assert scales.stride() == allocate_outputs(x, spec)[1].stride()

    def test_one_graph_serves_all_token_counts_and_eps(self) -> None:
        counter = CompileCounterWithBackend("aot_eager")
        call = encode_call(SPEC, "reference")

        @torch.compile(fullgraph=True, dynamic=True, backend=counter)
        def run(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            x, gate = x.reshape(-1, 128), gate.reshape(-1, 128)
            return OPS.gated_rmsnorm_fp8_quant(x, gate, weight, None, eps, call)

        compiled = []
        for num_tokens, eps in zip((5, 7, 33, 128), some_eps(), strict=True):
            x, gate, weight = make_inputs(num_tokens)
            assert_equal(run(x, gate, weight, eps), reference(x, gate, weight, None, eps, SPEC))
            compiled.append(counter.frame_count)
        assert compiled[0] == compiled[-1], "recompiled"
        assert counter.frame_count == 1 or not inductor_rounds_on_cpu()  # else Dynamo starts again for the constant eps
        for num_tokens in (0, 1):  # sizes that Dynamo always compiles by themselves
            x, gate, weight = make_inputs(num_tokens)
            assert_equal(run(x, gate, weight, 1e-6), reference(x, gate, weight, None, 1e-6, SPEC))

    def test_unbacked_token_count(self) -> None:
        call = encode_call(SPEC, "reference")

        @torch.compile(fullgraph=True, backend="aot_eager")
        def run(x: Tensor, gate: Tensor, weight: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
            x, gate = x[keep], gate[keep]
            return OPS.gated_rmsnorm_fp8_quant(x, gate, weight, None, 1e-6, call)

        x, gate, weight = make_inputs(6)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            for kept in (0, 1, 4):
                keep = torch.arange(6) < kept
                assert_equal(run(x, gate, weight, keep), reference(x[keep], gate[keep], weight, None, 1e-6, SPEC))

    def test_users_function_needs_no_graph_break(self) -> None:
        counter = CompileCounterWithBackend("aot_eager")

        @torch.compile(fullgraph=True, dynamic=True, backend=counter)
        def run(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
            quant = QuantSpec(scale_steps=(("max", 1e-4), ("div", 448.0)), clamp=448.0)
            return gated_rmsnorm_fp8_quant(x, gate, weight, eps, roundings=QWEN, quant=quant)

        spec = dataclasses.replace(SPEC, quant=QuantSpec((("max", 1e-4), ("div", 448.0)), clamp=448.0))
        compiled = []
        for num_tokens, eps in zip((5, 7, 33, 128), some_eps(), strict=True):
            x, gate, weight = make_inputs(num_tokens)
            assert_equal(run(x, gate, weight, eps), reference(x, gate, weight, None, eps, spec))
            compiled.append(counter.frame_count)
        assert compiled[0] == compiled[-1], "recompiled"

    def test_rms_norm_gated_needs_no_graph_break(self) -> None:
        run = torch.compile(rms_norm_gated, fullgraph=True, backend="aot_eager")
        x, gate, weight = make_inputs(3)
        assert torch.equal(run(x, gate, weight, 1e-6, roundings=QWEN), qwen3_next(x, gate, weight, 1e-6))


class TestUsersFunction:
    @pytest.mark.parametrize("leading", [(), (3,), (2, 3)])
    @pytest.mark.parametrize("group_size", [128, 256, None])
    def test_shapes(self, leading: tuple[int, ...], group_size: int | None) -> None:
        x, gate = torch.randn(*leading, 4, 128), torch.randn(*leading, 4, 128)
        codes, scales = gated_rmsnorm_fp8_quant(x, gate, torch.ones(128), 1e-6, group_size=group_size)
        assert codes.shape == (*leading, 512)
        assert scales.shape == (*leading, 512 // (group_size or 512))
        assert codes.dtype == torch.float8_e4m3fn

    def test_is_norm_then_quantisation(self) -> None:
        x, gate, weight = make_inputs(5)
        ours = gated_rmsnorm_fp8_quant(x, gate, weight, 1e-6, roundings=QWEN)
        y = rms_norm_gated(x, gate, weight, 1e-6, roundings=QWEN).reshape(5, 512)
        assert_equal(ours, quantise(y, 128, QuantSpec(), torch.float8_e4m3fn))

    def test_every_argument_arrives(self) -> None:
        x, gate, _ = (t.float() for t in make_inputs(5))
        weight, bias = torch.randn(128), torch.randn(512)
        chain = {"activation": "sigmoid", "norm_before_gate": False, "norm_size": 256, "weight_offset": 1.0}
        quant = QuantSpec((("div", 240.0), ("max", 1e-3)), clamp=240.0, scale_layout="column")
        codes, scales = gated_rmsnorm_fp8_quant(
            x,
            gate,
            weight,
            1e-2,
            **chain,  # type: ignore[arg-type]
            group_size=64,
            bias=bias,
            roundings=("output:float16",),
            quant=quant,
            fp8_dtype=torch.float8_e4m3fnuz,
        )
        rows = (x.reshape(5, 512), gate.reshape(5, 512))
        y = rms_norm_gated(*rows, weight, 1e-2, **chain, bias=bias, roundings=("output:float16",))  # type: ignore[arg-type]
        assert_equal((codes, scales), quantise(y, 64, quant, torch.float8_e4m3fnuz))
        assert scales.stride() == (1, 5)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            ({"x": torch.zeros(512)}, ValueError, r"\[..., H, D\]"),
            ({"gate": torch.zeros(2, 4, 64)}, ValueError, r"of one shape: got \(2, 4, 128\), \(2, 4, 64\)"),
            ({"x": torch.zeros(2, 4, 128).double()}, TypeError, "x is float64"),
            ({"weight": torch.zeros(128, dtype=torch.int32)}, TypeError, "weight is int32"),
            ({"weight": torch.zeros(1, 128)}, ValueError, "one dimension"),
            ({"weight": torch.zeros(100)}, ValueError, "weight of 100 values does not repeat"),
            ({"gate": torch.zeros(2, 4, 128, device="meta")}, ValueError, "gate is on meta, x on cpu"),
            ({"group_size": 100}, ValueError, "group_size=100 does not divide the row of 512"),
            ({"norm_size": 100}, ValueError, "norm_size=100 does not divide"),
            ({"activation": "gelu"}, ValueError, "expected 'silu' or 'sigmoid'"),
            ({"fp8_dtype": torch.float8_e5m2}, ValueError, "expected one of float8_e4m3fn"),
            ({"weight": torch.zeros(128, requires_grad=True)}, RuntimeError, "weight requires one"),
        ],
    )
    def test_wrong_arguments(self, change: dict, error: type[Exception], message: str) -> None:
        good = {"x": torch.zeros(2, 4, 128), "gate": torch.zeros(2, 4, 128), "weight": torch.zeros(128), "eps": 1e-6}
        with pytest.raises(error, match=message):
            gated_rmsnorm_fp8_quant(**{**good, **change})

    def test_inputs_that_require_a_gradient_pass_where_none_is_recorded(self) -> None:
        x, gate, weight = make_inputs(2)
        with torch.no_grad():
            codes, _ = gated_rmsnorm_fp8_quant(x, gate, weight.requires_grad_(), 1e-6)
        assert not codes.requires_grad


class TestFp8Quant:
    @pytest.mark.parametrize(
        ("layout", "num_tokens", "group_size"), [("row", 0, 128), ("row", 3, PER_TOKEN), ("column", 3, 128)]
    )
    def test_opcheck(self, layout: str, num_tokens: int, group_size: int) -> None:
        spec = encode_quant(QuantSpec(scale_layout=layout), torch.float8_e4m3fn)  # type: ignore[arg-type]
        torch.library.opcheck(OPS.fp8_quant.default, (torch.randn(2, num_tokens, 512), group_size, spec))

    @pytest.mark.parametrize(("group_size", "num_groups"), [(128, 4), (32, 16), (None, 1)])
    def test_shapes_and_values(self, group_size: int | None, num_groups: int) -> None:
        x = torch.randn(2, 3, 512).bfloat16()
        codes, scales = fp8_quant(x, group_size)
        assert codes.shape == (2, 3, 512)
        assert scales.shape == (2, 3, num_groups)
        ref = quant_vllm(x.reshape(6, 512), group_size or 512, torch.float8_e4m3fn)
        assert_equal((codes.reshape(6, 512), scales.reshape(6, num_groups)), ref)

    def test_is_one_node_in_the_graph_that_dynamo_captures(self) -> None:
        targets: list[object] = []

        def backend(gm: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
            targets.extend(node.target for node in gm.graph.nodes if node.op == "call_function")
            return gm.forward

        torch.compile(fp8_quant, fullgraph=True, backend=backend)(torch.randn(3, 256))
        assert str(targets[0]) == "gdn_backend.fp8_quant"

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ((torch.zeros(3, 200),), ValueError, "group_size=128 does not divide"),
            ((torch.zeros(3, 128), 0), ValueError, "group_size=0"),
            ((torch.zeros(()),), ValueError, "no dimensions"),
            ((torch.zeros(3, 128).double(),), TypeError, "x is float64"),
            ((torch.zeros(3, 128), 128, QuantSpec(), torch.float8_e5m2), ValueError, "expected one of"),
            ((torch.zeros(3, 128, requires_grad=True),), RuntimeError, "no gradient"),
        ],
    )
    def test_wrong_arguments(self, arguments: tuple, error: type[Exception], message: str) -> None:
        with pytest.raises(error, match=message):
            fp8_quant(*arguments)


class TestStrings:
    def test_round_trip(self) -> None:
        quant = QuantSpec((("max", 1e-4), ("div", 448.0), ("ceil_pow2_bits",)), (("reciprocal",),), "multiply", 448.0)
        spec = dataclasses.replace(OLMO, quant=quant)
        assert decode_call(encode_call(spec, "triton")) == (spec, "triton")
        assert decode_quant(encode_quant(quant, torch.float8_e4m3fnuz)) == (quant, torch.float8_e4m3fnuz)

    def test_default_formula_is_written_out_with_the_maximum_of_the_dtype(self) -> None:
        quant, _ = decode_quant(encode_quant(QuantSpec(), torch.float8_e4m3fnuz))
        assert quant.scale_steps == (("div", 240.0), ("max", 1.0 / (240.0 * 512.0)))
        assert quant.clamp == 240.0

    def test_names_the_version(self) -> None:
        assert gdn_backend.__version__ + "+" in encode_call(SPEC, "triton")
        assert gdn_backend.__version__ + "+" in encode_quant(QuantSpec(), torch.float8_e4m3fn)

    def test_unknown_kernel(self) -> None:
        with pytest.raises(ValueError, match="kernel='cuda': expected one of aiter, triton, reference"):
            encode_call(SPEC, "cuda")


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys, gdn_backend; from gdn_backend import rms_norm_gated, QuantSpec; a = set(sys.modules);"
        "import torch._dynamo; b = set(sys.modules); import gdn_backend.backend; c = set(sys.modules) - b;"
        "heavy = ('triton', 'aiter', 'transformers', 'rich', 'torch._inductor', 'torch._dynamo');"
        "print([m for m in a | c if m.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"scale_steps": (("sqrt",),)}, "unknown scale step"),
        ({"operation": "divided"}, "operation='divided': expected one of divide, divide_triton, multiply"),
        ({"scale_layout": "diagonal"}, "scale_layout='diagonal': expected one of row, column, column_tma"),
    ],
)
def test_a_formula_that_does_not_exist(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        QuantSpec(**fields)
