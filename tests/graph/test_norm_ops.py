"""Norms in one call, opaque norms, and the notes on gated norms that nobody quantises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gdn_backend.fusion.match import Reason
from gdn_backend.fusion.rules import find_sites
from gdn_backend.huggingface.block_fp8 import quantise_decomposed
from tests.graph.harness import assert_fused, assert_missed, capture, find_node, run
from tests.graph.sites import FP8, HEAD_DIM, HIDDEN, make_inputs, make_weight
from tests.graph.triton_launch import insert_launch

EPS = 1e-6

_STUBS = torch.library.Library("vllm", "FRAGMENT")
_OPAQUE = torch.library.Library("elsewhere", "FRAGMENT")


def _vllm_gated_norm(x, z, weight, eps, group_size=None, norm_before_gate=True, activation="silu"):  # type: ignore[no-untyped-def]
    """vLLM's ``RMSNormGated.forward_static``, as written in its kernel's comments: fp32, one rounding."""
    act = torch.sigmoid if activation == "sigmoid" else F.silu
    h, size = x.float(), group_size or x.shape[-1]
    if not norm_before_gate:
        h = h * act(z.float())
    groups = h.unflatten(-1, (-1, size))
    h = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2) * weight.float()
    if norm_before_gate:
        h = h * act(z.float())
    return h.to(x.dtype)


def _define(library: torch.library.Library, schema: str, implementation: Callable[..., Any]) -> None:
    library.define(schema)
    for key in ("CPU", "Meta"):
        library.impl(schema.partition("(")[0], implementation, key)


_define(_STUBS, "fla_rms_norm_gated(Tensor x, Tensor? z, Tensor weight, float eps, SymInt? group_size=None, "
        "bool norm_before_gate=True, str activation='silu') -> Tensor", _vllm_gated_norm)  # fmt: skip
_define(_STUBS, "rocm_aiter_rms_norm(Tensor x, Tensor weight, float variance_epsilon) -> Tensor",
        lambda x, weight, eps: torch.rms_norm(x, (x.shape[-1],), weight, eps).clone())  # fmt: skip
_define(_OPAQUE, "fused_norm_gate(Tensor x, Tensor z) -> Tensor", lambda x, z: (x * F.silu(z)).clone())
_define(_OPAQUE, "write_norm_gate(Tensor x, Tensor z, Tensor! y) -> ()", lambda x, z, y: None)


class Gated(nn.Module):
    """``norm(x, z)`` and a quantisation of the merged rows."""

    def __init__(
        self, norm: Callable[..., torch.Tensor], weight: torch.Tensor | None = None, quantised: bool = True
    ) -> None:
        super().__init__()
        self.norm, self.quantised = norm, quantised
        self.weight = nn.Parameter(make_weight() if weight is None else weight)

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        rows = self.norm(x, z, self.weight).reshape(-1, HIDDEN)
        return quantise_decomposed(rows, FP8) if self.quantised else rows


def _rms(x: torch.Tensor, weight: torch.Tensor | None, eps: float | None = EPS) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


VLLM = torch.ops.vllm.fla_rms_norm_gated

FUSED: dict[str, Callable[..., torch.Tensor]] = {
    "rms_norm, gate in fp32": lambda x, z, w: (_rms(x, w) * F.silu(z.float())).to(x.dtype),
    "rms_norm, gate in bf16": lambda x, z, w: _rms(x, w) * F.silu(z),
    "rms_norm in fp32": lambda x, z, w: (_rms(x.float(), w.float()) * torch.sigmoid(z.float())).to(x.dtype),
    "rms_norm without weight": lambda x, z, w: _rms(x, None) * F.silu(z),
    "rms_norm, weight outside": lambda x, z, w: (_rms(x, None) * w) * F.silu(z),
    "rms_norm, zero-centred weight outside": lambda x, z, w: (_rms(x.float(), None) * (1.0 + w.float())) * F.silu(z),
    "rms_norm, zero-centred weight": lambda x, z, w: _rms(x, 1 + w) * F.silu(z),
    "rms_norm behind the gate": lambda x, z, w: _rms(x * F.silu(z), w),
    "rms_norm without eps": lambda x, z, w: _rms(x, w, None) * F.silu(z),
    "vllm": lambda x, z, w: VLLM(x, z, w, EPS),
    "vllm, sigmoid": lambda x, z, w: VLLM(x, z, w, EPS, None, True, "sigmoid"),
    "vllm, gate first": lambda x, z, w: VLLM(x, z, w, EPS, norm_before_gate=False),
    "vllm, overload and swish": lambda x, z, w: VLLM.default(x, z, w, EPS, activation="swish"),
}

REFUSED: dict[str, tuple[Callable[..., torch.Tensor], Reason, str]] = {
    "rms_norm over two axes": (
        lambda x, z, w: F.rms_norm(x.view(-1, 4, HEAD_DIM), (4, HEAD_DIM), None, EPS) * F.silu(z).view(-1, 4, HEAD_DIM),
        Reason.NORM_AXIS, "rms_norm"),
    "aiter's norm": (
        lambda x, z, w: torch.ops.vllm.rocm_aiter_rms_norm(x, w, EPS) * F.silu(z), Reason.OPAQUE_NORM,
        "vllm::rocm_aiter_rms_norm"),
    "an opaque gated norm": (
        lambda x, z, w: torch.ops.elsewhere.fused_norm_gate(x, z), Reason.OPAQUE_NORM, "elsewhere::fused_norm_gate"),
    "vllm, another activation": (
        lambda x, z, w: VLLM(x, z, w, EPS, None, True, "gelu"), Reason.ACTIVATION, "vllm::fla_rms_norm_gated"),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", FUSED)
def test_fused(name: str, dtype: torch.dtype) -> None:
    with torch.no_grad():
        outcome = run(Gated(FUSED[name], make_weight(dtype=dtype)), *make_inputs(dtype=dtype))
    assert_fused(outcome)
    assert outcome.count("rms_norm") == outcome.count("vllm::fla_rms_norm_gated") == 0


@pytest.mark.parametrize("name", ["rms_norm, gate in bf16", "vllm"])
def test_fused_with_a_weight_of_another_dtype(name: str) -> None:
    with torch.no_grad():
        assert_fused(run(Gated(FUSED[name], make_weight(dtype=torch.float32)), *make_inputs()))


@pytest.mark.parametrize("name", ["rms_norm, gate in fp32", "vllm"])
def test_fused_dynamic(name: str) -> None:
    with torch.no_grad():
        outcome = run(Gated(FUSED[name]), *make_inputs(), dynamic=True, also=[make_inputs(5)])
    assert_fused(outcome, keeps=("silu",))  # a size is read off the rows, which nothing computes once it is compiled


def test_vllm_in_groups() -> None:
    def norm(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return VLLM(x.reshape(-1, HIDDEN), z.reshape(-1, HIDDEN), w, EPS, HEAD_DIM)

    with torch.no_grad():
        outcome = run(Gated(norm, make_weight(HIDDEN)), *make_inputs())
    assert_fused(outcome)
    assert outcome.match.spec.norm_size == HEAD_DIM


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    norm, reason, node = REFUSED[name]
    with torch.no_grad():
        assert_missed(run(Gated(norm), *make_inputs()), reason, node)


def _notes(model: nn.Module) -> tuple[list[str], int]:
    with torch.no_grad():
        found = find_sites(capture(model, *make_inputs()).graph, group_sizes=frozenset({128}))
    return found.notes, len(found.matches) + len(found.misses)


@pytest.mark.parametrize("name", ["rms_norm, gate in bf16", "rms_norm behind the gate", "vllm"])
def test_a_gated_norm_that_nobody_quantises_is_noted(name: str) -> None:
    notes, anchors = _notes(Gated(FUSED[name], quantised=False))
    assert anchors == 0
    assert len(notes) == 1 and "without an FP8 quantisation" in notes[0], notes


def test_a_gated_norm_that_is_quantised_is_not_noted() -> None:
    for norm in FUSED.values():
        assert _notes(Gated(norm)) == ([], 1)


@pytest.mark.field_case("F30")
def test_an_opaque_gated_norm_is_noted() -> None:
    notes, anchors = _notes(Gated(REFUSED["an opaque gated norm"][0], quantised=False))
    assert anchors == 0
    assert "opaque gated norms: " in notes[0] and "gdn_backend.rms_norm_gated" in notes[0]


class FlaKernel:
    """What the matcher sees of fla's Triton kernel: its name."""

    __name__ = "layer_norm_gated_fwd_kernel"


@pytest.mark.field_case("F30")
@pytest.mark.parametrize("quantised", [True, False])
def test_a_gated_norm_that_a_triton_kernel_computes_is_named(quantised: bool) -> None:
    def norm(x: torch.Tensor, z: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        torch.ops.elsewhere.write_norm_gate(x, z, y)
        return y

    with torch.no_grad():
        graph = capture(Gated(norm, quantised=quantised), *make_inputs()).graph
    operation = find_node(graph, "elsewhere::write_norm_gate")
    insert_launch(operation, FlaKernel(), dict(zip(("x", "g", "y"), operation.args, strict=True)))
    graph.erase_node(operation)
    found = find_sites(graph, group_sizes=frozenset({128}))
    assert not found.matches
    if quantised:
        (miss,) = found.misses
        assert miss.reason is Reason.OPAQUE_NORM
        assert "layer_norm_gated_fwd_kernel" in miss.render() and "gdn_backend.rms_norm_gated" in miss.render()
    else:
        assert any("opaque gated norms: triton_kernel_wrapper_mutation" in note for note in found.notes), found.notes


def test_a_swiglu_is_not_noted() -> None:
    assert _notes(Gated(lambda x, z, w: F.silu(z) * x, quantised=False)) == ([], 0)


class Float8Tensor(torch.Tensor):
    """What the matcher sees of torchao's weight: its name, and that it quantises what it is multiplied with."""

    act_quant_kwargs = "per row"


def test_a_linear_layer_that_quantises_inside_is_noted() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated = Gated(FUSED["vllm"], quantised=False)
            self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN).bfloat16())

        def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
            return F.linear(self.gated(x, z), self.weight)

    with torch.no_grad():
        graph = capture(Linear(), *make_inputs()).graph
    weight = find_node(graph, "linear").args[1]
    assert isinstance(weight, torch.fx.Node)
    weight.meta["example_value"] = torch.Tensor._make_subclass(Float8Tensor, torch.empty(HIDDEN, HIDDEN))
    notes = find_sites(graph, group_sizes=frozenset({128})).notes
    assert any("quantise a gated norm's result inside" in note and "linear" in note for note in notes), notes
