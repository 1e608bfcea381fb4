"""``explain``: the same findings as the backend's, and nothing of the user's touched."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

import gdn_backend
from tests.qwen_site import Site, make_inputs, make_site

SHARED_CACHE: list[torch.Tensor] = []
SHARED_MODEL = make_site()


@pytest.fixture(autouse=True)
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> Any:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("explain compiled something")

    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)
    with torch.no_grad():
        yield


def statuses(model: Callable[..., Any], *args: Any, **kwargs: Any) -> list[list[str]]:
    return [[site.status for site in report.sites] for report in gdn_backend.explain(model, *args, **kwargs)]


def counting_backend(counts: list[int]) -> Callable[..., Any]:
    def count(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        counts.append(len(gm.graph.nodes))
        return gm.forward

    return count


def test_finds_what_the_backend_finds() -> None:
    (report,) = gdn_backend.explain(make_site(), *make_inputs())
    (site,) = report.sites
    assert (site.status, site.module, site.kernel) == ("fused", "norm", "reference")
    assert gdn_backend.reports() == []


def test_keyword_arguments() -> None:
    x, gate = make_inputs()
    assert statuses(make_site(), x, gate=gate) == [["fused"]]


def test_parameters_buffers_inputs_and_caches_stay() -> None:
    class Stateful(Site):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(1))
            self.steps = 0

        def forward(self, x: torch.Tensor, gate: torch.Tensor, cache: list[torch.Tensor]) -> Any:
            self.calls.add_(1)
            self.steps += 1
            cache.append(x)
            cache[0].mul_(0)
            gate.mul_(2)
            return super().forward(x, gate)

    model, (x, gate), cache = Stateful(), make_inputs(dtype=torch.float32), [torch.ones(3)]
    before = {name: (value, value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    gate_before = gate.clone()
    assert statuses(model, x, gate, cache)[-1] == ["fused"]
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is value and torch.equal(value, copy) for name, (value, copy) in before.items())
    assert model.steps == 0
    assert torch.equal(gate, gate_before)
    assert len(cache) == 1
    assert torch.equal(cache[0], torch.ones(3))


def test_what_a_function_holds_stays() -> None:
    model, held = make_site(), []

    def step(x: torch.Tensor, gate: torch.Tensor) -> Any:
        held.append(x * 2)
        SHARED_CACHE.append(gate * 2)
        return model(x, gate), SHARED_MODEL(x, gate)

    assert statuses(step, *make_inputs())[-1] == ["fused", "fused"]
    assert held == []
    assert SHARED_CACHE == []


def test_what_model_and_inputs_share_the_copies_share() -> None:
    x, _ = make_inputs()
    seen: list[bool] = []

    def compare(first: torch.Tensor, second: torch.Tensor, remember: Callable[[bool], None]) -> None:
        torch._dynamo.graph_break()
        remember(first is second)

    gdn_backend.explain(compare, x, x, seen.append)  # a bound method of a list is not copied
    gdn_backend.explain(compare, x, x.clone(), seen.append)
    assert seen == [True, False]


def test_graph_breaks() -> None:
    first, second = make_site(), make_site(64)

    def model(x: torch.Tensor, gate: torch.Tensor) -> Any:
        one = first(x, gate)
        torch._dynamo.graph_break()
        return one, second(x, gate)

    assert statuses(model, *make_inputs()) == [["fused"], ["missed"]]


def test_what_cannot_run_on_fakes_is_a_note() -> None:
    site = make_site()

    def model(x: torch.Tensor, gate: torch.Tensor) -> Any:
        result = site(x, gate)
        if x.sum().item() > 0:
            return site(gate, x)
        return result

    reports = gdn_backend.explain(model, *make_inputs())
    assert [site.status for site in reports[0].sites] == ["fused"]
    assert any("the trace on fake tensors ended early" in note for note in reports[-1].notes)


def test_an_error_of_the_model_is_a_note() -> None:
    (report,) = gdn_backend.explain(make_site(), torch.ones(3), torch.ones(5))
    assert any("ended early" in note for note in report.notes)


def test_gradients_follow_the_caller() -> None:
    with torch.enable_grad():
        (report,) = gdn_backend.explain(make_site(), *make_inputs())
    assert [site.reason for site in report.sites] == ["REQUIRES_GRAD"]


def test_the_users_compiled_model_is_not_recompiled() -> None:
    """Neither its graphs nor the sizes that Dynamo has seen are lost or added to."""
    counts: list[int] = []
    model = make_site()
    compiled = torch.compile(model, backend=counting_backend(counts))
    inputs = make_inputs(16)
    compiled(*inputs)
    for num_tokens in range(2, 14):  # more sizes than Dynamo would recompile for
        assert len(statuses(compiled, *make_inputs(num_tokens))) == 1
    compiled(*inputs)
    assert len(counts) == 1


def test_the_first_size_a_compiled_model_sees_is_its_own() -> None:
    """A size met in ``explain`` must not make the user's first graph a dynamic one."""
    sizes: list[Any] = []

    def keep(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        sizes.extend(size for value in example_inputs if isinstance(value, torch.Tensor) for size in value.shape)
        return gm.forward

    model = make_site()
    gdn_backend.explain(model, *make_inputs(16))
    torch.compile(model, backend=keep)(*make_inputs(8))
    assert sizes
    assert all(isinstance(size, int) for size in sizes)


def test_parts_that_are_compiled_do_not_run_their_backends() -> None:
    counts: list[int] = []

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList([make_site(), make_site(64)])
            self.layers[0] = torch.compile(self.layers[0], backend=counting_backend(counts))
            self.layers[1].compile(backend=counting_backend(counts))

        def forward(self, x: torch.Tensor, gate: torch.Tensor) -> Any:
            results = []
            for layer in self.layers:
                torch._dynamo.graph_break()
                results.append(layer(x, gate))
            return results

    assert statuses(Stack(), *make_inputs()) == [["fused"], ["missed"]]
    assert counts == []


def test_only_what_can_be_called_can_be_explained() -> None:
    with pytest.raises(TypeError, match="needs a module or a function, got int"):
        gdn_backend.explain(3)
