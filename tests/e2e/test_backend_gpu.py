"""The backend on a GPU: our Triton kernel in Inductor's graph, under CUDA graphs, with token counts it has not seen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gdn_backend
from tests.exactness import assert_exact
from tests.qwen_site import HEAD_DIM, HEADS, make_inputs, make_site

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


def assert_fused_by(kernel: str) -> None:
    report = gdn_backend.last_report()
    assert report is not None
    assert [(site.status, site.kernel, site.device) for site in report.sites] == [("fused", kernel, "cuda")]


@pytest.mark.field_case("F32")
@pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_every_mode_and_token_count(mode: str | None, dynamic: bool | None) -> None:
    model = make_site().cuda()
    compiled = torch.compile(model, backend="gdn_rocm", mode=mode, dynamic=dynamic)
    for num_tokens in (16, 7, 7, 7, 513, 513, 513, 1):  # a CUDA graph is recorded at the second call of a size
        inputs = make_inputs(num_tokens, device="cuda")
        codes, scales = (tensor.clone() for tensor in compiled(*inputs))
        assert_exact(codes, scales, *model(*inputs), input_dtype=torch.bfloat16)
    assert_fused_by("triton")


@pytest.mark.parametrize("kernel", ["triton", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_kernel_asked_for_by_name(kernel: str, dtype: torch.dtype) -> None:
    model, inputs = make_site(dtype=dtype).cuda(), make_inputs(33, dtype, "cuda")
    compiled = torch.compile(model, backend="gdn_rocm", options={"gdn.kernel": kernel})
    assert_exact(*compiled(*inputs), *model(*inputs), input_dtype=dtype)
    assert_fused_by(kernel)


def test_precision_casts_are_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graph-wide and slow on a GPU, where each site rounds by itself."""
    patches: list[dict[str, Any]] = []

    def keep(gm: torch.fx.GraphModule, inputs: Any, config_patches: dict[str, Any]) -> Any:
        patches.append(config_patches)
        return gm.forward

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", keep)
    torch.compile(make_site().cuda(), backend="gdn_rocm")(*make_inputs(device="cuda"))
    assert patches == [{}]


def test_explain_takes_a_model_on_the_gpu() -> None:
    (report,) = gdn_backend.explain(make_site().cuda(), *make_inputs(device="cuda"))
    assert [(site.status, site.kernel) for site in report.sites] == [("fused", "triton")]


@pytest.mark.parametrize("num_tokens", [1, 33, 2048])
def test_a_triton_quantisation_in_the_graph(num_tokens: int) -> None:
    """The sites' own division: Triton's ``/`` rounds otherwise than eager's."""
    from tests.e2e.act_quant_kernel import act_quant

    norm = make_site().norm.cuda()

    def model(x: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return act_quant(norm(x.view(-1, HEAD_DIM), gate.view(-1, HEAD_DIM)).view(-1, HEADS * HEAD_DIM))

    inputs = make_inputs(num_tokens, device="cuda")
    compiled = torch.compile(model, backend="gdn_rocm", fullgraph=True)
    assert_exact(*compiled(*inputs), *model(*inputs), input_dtype=torch.bfloat16)
    assert_fused_by("triton")
