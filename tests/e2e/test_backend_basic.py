"""The pipeline around the passes: found by name, settings passed on, failures survived, the user's things unchanged."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx import Graph, GraphModule

import gdn_backend
from gdn_backend import backend
from gdn_backend.environment import inductor_rounds_on_cpu
from gdn_backend.ops.dispatch import KernelUnavailableError
from tests.exactness import assert_exact
from tests.qwen_site import HEAD_DIM, HEADS, GatedNorm, Site, make_inputs, make_site, quantise

Result = tuple[torch.Tensor, torch.Tensor]

#: What a graph with a fused site on the CPU is compiled with beside the user's settings.
ON_CPU = {"emulate_precision_casts": True} if inductor_rounds_on_cpu() else {}


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


class FakeInductor:
    """Stands for ``compile_fx``: keeps what it was given, and runs the graph as it is."""

    def __init__(self, failures: int = 0) -> None:
        self.codes: list[str] = []
        self.patches: list[dict[str, Any]] = []
        self.failures = failures

    def __call__(self, gm: GraphModule, example_inputs: Sequence[Any], config_patches: dict[str, Any]) -> Any:
        self.codes.append(gm.code)
        self.patches.append(config_patches)
        if len(self.codes) <= self.failures:
            raise RuntimeError("no code for you")
        return gm.forward


@pytest.fixture
def inductor(monkeypatch: pytest.MonkeyPatch) -> FakeInductor:
    fake = FakeInductor()
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", fake)
    return fake


def eager_code(model: Callable[..., Any], *inputs: torch.Tensor) -> str:
    """The code of the graph that Dynamo captures, before any backend."""
    codes: list[str] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        codes.append(gm.code)
        return gm.forward

    torch.compile(model, backend=keep)(*inputs)
    torch._dynamo.reset()
    return codes[0]


def assert_equals_eager(result: Result, model: Callable[..., Result], *inputs: torch.Tensor) -> None:
    assert_exact(*result, *model(*inputs), input_dtype=torch.bfloat16)


def test_fuses_and_equals_eager() -> None:
    model, inputs = make_site(), make_inputs()
    result = torch.compile(model, backend="gdn_rocm")(*inputs)
    assert_equals_eager(result, model, *inputs)
    report = gdn_backend.last_report()
    assert report is not None
    assert (report.num_fused, report.num_missed) == (1, 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_dtypes_equal_eager(dtype: torch.dtype) -> None:
    """fp32 shows every order of summation, and has to be eager's all the same."""
    model, inputs = make_site(dtype=dtype), make_inputs(40, dtype)
    compiled = torch.compile(model, backend="gdn_rocm")
    assert_exact(*compiled(*inputs), *model(*inputs), input_dtype=dtype)
    report = gdn_backend.last_report()
    assert report is not None
    assert report.num_fused == 1


def test_where_inductor_cannot_round_the_op_stays_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 is on the CPU; with nothing asked of it, Inductor would skip roundings here too."""
    monkeypatch.setattr("gdn_backend.environment.inductor_rounds_on_cpu", lambda: False)
    monkeypatch.setattr(backend, "inductor_rounds_on_cpu", lambda: False)
    model, inputs = make_site(), make_inputs(64)
    result = torch.compile(model, backend="gdn_rocm")(*inputs)
    assert_equals_eager(result, model, *inputs)
    report = gdn_backend.last_report()
    assert report is not None
    assert report.num_fused == 1
    assert "skips roundings on the CPU" in report.sites[0].kernel_reason


def test_the_matched_arithmetic_is_gone(inductor: FakeInductor) -> None:
    torch.compile(make_site(), backend="gdn_rocm")(*make_inputs())
    code = re.sub("'.*'", "", inductor.codes[0])  # the op's own argument names what it computes
    assert code.count("torch.ops.gdn_backend.gated_rmsnorm_fp8_quant") == 1
    assert not any(name in code for name in ("rsqrt", "silu", "amax", "clamp", "float8"))


def is_installed() -> bool:
    return any(point.name == "gdn_rocm" for point in importlib.metadata.entry_points(group="torch_dynamo_backends"))


@pytest.mark.skipif(not is_installed(), reason="the package is on the path but not installed")
def test_found_by_name_and_light_to_load(tmp_path: Path) -> None:
    """A process that never imported us finds the name; loading it brings nothing heavy that torch had not brought."""
    code = """
import sys
import torch
from torch._dynamo.backends.registry import list_backends, lookup_backend
assert "gdn_rocm" in list_backends()
assert not any(name.startswith("gdn_backend") for name in sys.modules)
before = set(sys.modules)
lookup_backend("gdn_rocm")
new = set(sys.modules) - before
assert "gdn_backend.backend" in new
print(sorted(name for name in new if name.startswith(("transformers", "torch._inductor", "aiter", "triton", "rich"))))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


@pytest.mark.field_case("F16")
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead", "max-autotune-no-cudagraphs"])
def test_modes_reach_inductor(inductor: FakeInductor, mode: str | None) -> None:
    torch.compile(make_site(), backend="gdn_rocm", mode=mode)(*make_inputs())
    expected = torch._inductor.list_mode_options(mode) if mode else {}
    assert inductor.patches == [{**expected, **ON_CPU}]


def test_options_reach_inductor_without_our_own(inductor: FakeInductor) -> None:
    options = {"gdn.report": "off", "gdn.kernel": "reference", "max_autotune": True}
    torch.compile(make_site(), backend="gdn_rocm", options=options)(*make_inputs())
    assert inductor.patches == [{"max_autotune": True, **ON_CPU}]


def test_the_users_choice_of_precision_casts_holds(inductor: FakeInductor) -> None:
    torch.compile(make_site(), backend="gdn_rocm", options={"emulate_precision_casts": False})(*make_inputs())
    assert inductor.patches == [{"emulate_precision_casts": False}]


def test_a_graph_without_sites_is_compiled_as_inductor_does(inductor: FakeInductor) -> None:
    model, inputs = GatedNorm(HEAD_DIM), make_inputs()
    code = eager_code(model, *inputs)
    torch.compile(model, backend="gdn_rocm")(*inputs)
    assert inductor.codes == [code]
    assert inductor.patches == [{}]


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_compile_for_real(mode: str) -> None:
    model, inputs = make_site(), make_inputs(5)
    assert_equals_eager(torch.compile(model, backend="gdn_rocm", mode=mode)(*inputs), model, *inputs)


def test_fullgraph_and_dynamic_token_counts() -> None:
    """Every token count that eager takes, also none, from one graph more than ``backend="eager"`` needs: none."""
    model = make_site()
    graphs = {}
    for name in ("eager", "gdn_rocm"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        compiled = torch.compile(model, backend=name, dynamic=True, fullgraph=True)
        for num_tokens in (16, 7, 33, 1, 2, 0):
            inputs = make_inputs(num_tokens)
            assert_equals_eager(compiled(*inputs), model, *inputs)
        graphs[name] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert graphs["gdn_rocm"] == graphs["eager"]
    assert [report.num_fused for report in gdn_backend.reports()] == [1] * graphs["gdn_rocm"]


def fail_after_damage(graph: Graph, *_: Any) -> None:
    """A pass that has changed half of a graph when it fails."""
    graph.erase_node(next(node for node in reversed(graph.nodes) if node.op == "output"))
    raise RuntimeError("lost my way")


def leave_ill_formed(graph: Graph, *_: Any) -> None:
    """A pass that ends well but leaves a node that is used before it is computed."""
    first = next(node for node in graph.nodes if node.op != "placeholder")
    list(graph.nodes)[-2].append(first)


@pytest.mark.parametrize("name", ["fold_reshapes", "fuse_sites", "copy_graphs", "plan_sites"])
@pytest.mark.parametrize("damage", [fail_after_damage, leave_ill_formed])
def test_a_failing_pass_leaves_the_graph(
    inductor: FakeInductor, monkeypatch: pytest.MonkeyPatch, name: str, damage: Callable[..., None]
) -> None:
    model, inputs = make_site(), make_inputs()
    code = eager_code(model, *inputs)
    passes = {"copy_graphs": lambda gm: damage(gm.graph.__deepcopy__())}
    monkeypatch.setattr(backend, name, passes.get(name, damage))
    result = torch.compile(model, backend="gdn_rocm")(*inputs)
    assert inductor.codes == [code]
    assert inductor.patches == [{}]
    assert_equals_eager(result, model, *inputs)
    report = gdn_backend.last_report()
    assert report is not None
    assert report.num_fused == 0
    assert report.alert.startswith("a pass failed")
    assert report.alert == report.notes[0]


def test_a_failing_pass_raises_when_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "fuse_sites", fail_after_damage)
    compiled = torch.compile(make_site(), backend="gdn_rocm", options={"gdn.strict": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="lost my way"):
        compiled(*make_inputs())


def test_where_inductor_fails_on_the_fused_graph_it_gets_the_original(inductor: FakeInductor) -> None:
    model, inputs = make_site(), make_inputs()
    code = eager_code(model, *inputs)
    inductor.failures = 1
    result = torch.compile(model, backend="gdn_rocm")(*inputs)
    assert "gated_rmsnorm_fp8_quant" in inductor.codes[0]
    assert inductor.codes[1] == code
    assert inductor.patches[1] == {}
    assert_equals_eager(result, model, *inputs)
    report = gdn_backend.last_report()
    assert report is not None
    assert report.num_fused == 0
    assert "no code for you" in report.alert


def test_where_inductor_fails_on_its_own_the_error_is_its_own(inductor: FakeInductor) -> None:
    inductor.failures = 2
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="no code for you"):
        torch.compile(make_site(), backend="gdn_rocm")(*make_inputs())


def test_strict_raises_where_nothing_fused() -> None:
    compiled = torch.compile(make_site(64), backend="gdn_rocm", options={"gdn.strict": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"norm: .*64") as raised:
        compiled(*make_inputs())
    assert type(raised.value.inner_exception) is backend.NothingFusedError


@pytest.mark.parametrize("options", [{"gdn.strict": True, "gdn.enabled": False}, {"gdn.strict": True}])
def test_strict_does_not_raise_without_a_reason(inductor: FakeInductor, options: dict[str, Any]) -> None:
    """Fusion that was turned off, or nothing to fuse, is no failure."""
    model = make_site() if "gdn.enabled" in options else GatedNorm(HEAD_DIM)
    torch.compile(model, backend="gdn_rocm", options=options)(*make_inputs())
    assert len(inductor.codes) == 1


def test_disabled_is_plain_inductor_with_a_report(inductor: FakeInductor) -> None:
    model, inputs = make_site(), make_inputs()
    code = eager_code(model, *inputs)
    torch.compile(model, backend="gdn_rocm", options={"gdn.enabled": False})(*inputs)
    assert inductor.codes == [code]
    assert inductor.patches == [{}]
    report = gdn_backend.last_report()
    assert report is not None
    assert [(site.reason, site.kernel) for site in report.sites] == [("DISABLED", None)]
    assert "reference" in report.sites[0].kernel_reason
    assert report.folded_reshapes == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton can run here")
def test_a_forced_kernel_that_cannot_run_raises() -> None:
    compiled = torch.compile(make_site(), backend="gdn_rocm", options={"gdn.kernel": "triton"})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="kernels that can: reference") as raised:
        compiled(*make_inputs())
    assert isinstance(raised.value.inner_exception, KernelUnavailableError)


def test_side_effects_and_parameters_stay() -> None:
    class Stateful(Site):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.register_buffer("state", torch.zeros(2, HEADS, HEAD_DIM))

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> Result:
            self.calls.add_(1)
            self.state.copy_(x[-2:])
            return super().forward(x, gate)

    model, inputs = Stateful(), make_inputs(dtype=torch.float32)
    weight = model.norm.weight.clone()
    compiled = torch.compile(model, backend="gdn_rocm")
    compiled(*inputs)
    compiled(*inputs)
    report = gdn_backend.last_report()
    assert report is not None
    assert report.num_fused == 1
    assert model.calls.item() == 2
    assert torch.equal(model.state, inputs[0][-2:])
    assert torch.equal(model.norm.weight, weight)


def test_sites_in_the_body_of_a_checkpoint() -> None:
    model = make_site()

    def checkpointed(x: torch.Tensor, gate: torch.Tensor) -> Result:
        return torch.utils.checkpoint.checkpoint(model, x, gate, use_reentrant=False)

    inputs = make_inputs()
    result = torch.compile(checkpointed, backend="gdn_rocm")(*inputs)
    assert_equals_eager(result, model, *inputs)
    report = gdn_backend.last_report()
    assert report is not None
    assert report.num_fused == 1


def test_layer_by_layer_and_after_a_graph_break() -> None:
    layers = [make_site() for _ in range(3)]

    def model(x: torch.Tensor, gate: torch.Tensor) -> list[Result]:
        results = []
        for layer in layers:
            results.append(layer(x, gate))
            torch._dynamo.graph_break()
        return results

    inputs = make_inputs()
    for result, layer in zip(torch.compile(model, backend="gdn_rocm")(*inputs), layers, strict=True):
        assert_equals_eager(result, layer, *inputs)
    assert sum(report.num_fused for report in gdn_backend.reports()) >= 1
    assert all(report.num_missed == 0 for report in gdn_backend.reports())


def test_several_threads() -> None:
    num_threads = 4
    results: dict[int, tuple[Site, tuple[torch.Tensor, torch.Tensor], Result]] = {}

    def work(index: int) -> None:
        with torch.no_grad():
            model, inputs = make_site(), make_inputs(index + 2)
            compiled = torch.compile(model, backend="gdn_rocm", dynamic=False)
            results[index] = (model, inputs, compiled(*inputs))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == num_threads
    for model, inputs, result in results.values():
        assert_equals_eager(result, model, *inputs)
    reports = gdn_backend.reports()
    assert [report.num_fused for report in reports] == [1] * num_threads
    assert len({report.graph_id for report in reports}) == num_threads


def test_torchs_reset_calls_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(backend.gdn_rocm, "reset", lambda: calls.append("reset"))
    model, inputs = make_site(), make_inputs()
    for expected in (0, 1):
        assert len(calls) == expected
        assert_equals_eager(torch.compile(model, backend="gdn_rocm")(*inputs), model, *inputs)
        torch.compiler.reset()
    first, second = gdn_backend.reports()
    assert first.fingerprint() == second.fingerprint()


def test_quantise_alone_is_no_site() -> None:
    torch.compile(quantise, backend="gdn_rocm")(torch.randn(4, 512))
    report = gdn_backend.last_report()
    assert report is not None
    assert report.sites == ()
