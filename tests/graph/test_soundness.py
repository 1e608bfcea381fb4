"""What a fusion may not break: writes of every kind, the order of things, regions, subclasses, other readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint

from gdn_backend.backend import gdn_rocm
from gdn_backend.fusion.match import Reason
from gdn_backend.fusion.rules import find_sites
from tests.graph.harness import (
    Outcome,
    Passes,
    assert_equals_eager,
    assert_fused,
    assert_missed,
    capture,
    find_node,
    run,
)
from tests.graph.sites import BASE, FP8, Site, make_inputs, make_weight, site
from tests.graph.triton_launch import FakeKernel, insert_launch

GROUPS = frozenset({128})

_OPS = torch.library.Library("gdn_backend_soundness", "FRAGMENT")
_OPS.define("fill(Tensor! target, Tensor source) -> ()")
_OPS.define("read(Tensor source) -> Tensor")


def _fill(target: torch.Tensor, source: torch.Tensor) -> None:
    target.fill_(2)


for _key in ("CPU", "Meta"):
    _OPS.impl("fill", _fill, _key)
    _OPS.impl("read", torch.clone, _key)


@pytest.fixture(autouse=True)
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def behind(name: str, effect: Callable[[Any], Any]) -> dict[str, Any]:
    """The base with ``effect`` behind the step ``name``."""

    def step(c: Any) -> Any:
        value = BASE[name](c)
        setattr(c, name, value)
        effect(c)
        return value

    return {name: step}


class TestWrites:
    def test_by_an_op_whose_schema_says_so(self) -> None:
        effect = behind("activated", lambda c: torch.ops.gdn_backend_soundness.fill(c.z, c.x))
        assert_missed(run(site(effect), *make_inputs()), Reason.MUTATION, "gdn_backend_soundness::fill")

    def test_an_op_that_reads_is_no_write(self) -> None:
        effect = behind("activated", lambda c: setattr(c, "kept", torch.ops.gdn_backend_soundness.read(c.z)))
        model = site(effect, result=lambda c: (c.codes, c.scale, c.kept))
        assert_fused(run(model, *make_inputs()))

    @pytest.mark.parametrize(("target", "is_missed"), [("L_z_", True), ("L_more_0_", False)])
    def test_by_a_triton_kernel(self, target: str, is_missed: bool) -> None:
        """Nothing shows what it writes, so all its tensors count."""
        graph = capture(site(result=lambda c: (c.codes, c.scale, c.more[0] + 1)), *make_inputs(), torch.ones(3)).graph
        written = next(node for node in graph.find_nodes(op="placeholder") if str(node.target) == target)
        insert_launch(find_node(graph, "reshape"), FakeKernel("1", "2"), {"x_ptr": written})
        found = find_sites(graph, group_sizes=GROUPS)
        assert [miss.reason for miss in found.misses] == [Reason.MUTATION] * is_missed
        assert len(found.matches) == (not is_missed)

    def test_to_what_overlaps_in_memory(self) -> None:
        buffer = torch.randn(30, 128).bfloat16()
        x, z, other = buffer[:12], buffer[12:24], buffer[20:28]
        outcome = run(site(behind("activated", lambda c: c.more[0].zero_())), x, z, other)
        assert_missed(outcome, Reason.MUTATION, "zero_")

    def test_beside_it_in_the_same_memory_is_taken_for_one(self) -> None:
        """Only whole storages are told apart: a miss too many, and never one too few."""
        buffer = torch.randn(30, 128).bfloat16()
        outcome = run(site(behind("activated", lambda c: c.more[0].zero_())), buffer[:12], buffer[12:24], buffer[24:])
        assert_missed(outcome, Reason.MUTATION, "zero_")

    def test_before_the_first_read_and_behind_the_codes(self) -> None:
        model = site(
            behind("codes", lambda c: (c.x.zero_(), c.z.mul_(2), c.w.detach().add_(1))),
            h=lambda c: c.x.mul_(2).float(),
        )
        assert_fused(run(model, *make_inputs()))

    def test_of_the_results(self) -> None:
        effect = behind("codes", lambda c: (c.codes.view(torch.uint8).add_(1), c.scale.mul_(2)))
        outcome = run(site(effect), *make_inputs())
        assert_equals_eager(outcome)
        assert len(outcome.passes.matches) + len(outcome.passes.misses) == 1

    def test_inputs_that_are_returned_stay_the_same_tensor(self) -> None:
        model = site(result=lambda c: (c.codes, c.scale, c.z))
        compiled = torch.compile(model, backend="gdn_rocm", options={"gdn.report": "off"})
        x, z = make_inputs()
        assert compiled(x, z)[2] is z


class TestPlace:
    def test_scales_that_are_used_before_the_codes_are_made(self) -> None:
        steps = {
            "data": lambda c: (setattr(c, "early", c.scale.sum() * 2), c.groups.float())[1],
            "result": lambda c: (c.codes, c.scale, c.early),
        }
        assert_fused(run(site(steps), *make_inputs()))

    def test_operands_that_come_late(self) -> None:
        steps = {
            "weighted": lambda c: c.narrow * (c.more[0] * 2),  # a weight that is computed behind the norm
            "gate": lambda c: (c.more[1] @ c.more[2]).float(),
        }
        more = (make_weight(), torch.randn(12, 8).bfloat16(), torch.randn(8, 128).bfloat16())
        assert_fused(run(site(steps), *make_inputs(), *more))

    def test_two_sites_whose_nodes_alternate(self) -> None:
        def model(x: torch.Tensor, z: torch.Tensor) -> list[Any]:
            return [value for pair in zip(*(alternate(c) for c in (x, z)), strict=True) for value in pair]

        def alternate(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            h = x.float()
            y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * torch.sigmoid(h)).to(x.dtype)
            groups = y.view(-1, 4, 128).float()
            scale = (groups.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-10)
            return (groups / scale).to(FP8), scale

        assert_fused(run(model, *make_inputs()), count=2)


class TestOtherReaders:
    @pytest.mark.parametrize("again", ["rows", "y"])
    def test_one_norm_under_two_quantisations(self, again: str) -> None:
        """Each is found and refused by name: the norm would have to be computed twice."""

        def second(c: Any) -> tuple[torch.Tensor, torch.Tensor]:
            groups = getattr(c, again).reshape(-1, 4, 128).float()
            scale = (groups.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-10)
            return (groups / scale).to(FP8), scale

        outcome = run(site(result=lambda c: (c.codes, c.scale, *second(c))), *make_inputs())
        assert_equals_eager(outcome)
        assert [miss.reason for miss in outcome.passes.misses] == [Reason.SHARED_INTERMEDIATE] * 2
        assert all("codes and scales" in miss.advice for miss in outcome.passes.misses)

    def test_operands_that_others_read_stay(self) -> None:
        steps = {"result": lambda c: (c.codes, c.scale, c.h + 1, c.gate * 2, c.w + 1)}
        assert_fused(run(site(steps), *make_inputs()))

    def test_forty_eight_sites(self) -> None:
        layers = nn.ModuleList(site() for _ in range(48))

        def model(x: torch.Tensor, z: torch.Tensor) -> list[Any]:
            return [result for layer in layers for result in layer(x, z)]

        assert_fused(run(model, *make_inputs()), count=48)


class Region(nn.Module):
    """A site inside something that Dynamo makes a graph of its own of."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self.site, self.call = Site(BASE, make_weight()), call

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        return self.call(self.site, x, z)


def _in_a_checkpoint(function: Any, x: torch.Tensor, z: torch.Tensor) -> Any:
    return checkpoint(function, x, z, use_reentrant=False)


@torch.compiler.nested_compile_region
def _nested(function: Any, x: torch.Tensor, z: torch.Tensor) -> Any:
    return function(x, z)


def _in_a_nested_region(function: Any, x: torch.Tensor, z: torch.Tensor) -> Any:
    return _nested(function, x, z), _nested(function, z, x)  # one call alone is inlined


def _in_a_branch(function: Any, x: torch.Tensor, z: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, function, lambda x, z: function(z, x), (x, z))


class TestRegions:
    @pytest.mark.parametrize(
        ("call", "count"),
        [(_in_a_checkpoint, 1), (_in_a_nested_region, 1), (_in_a_branch, 2)],
        ids=["checkpoint", "invoke_subgraph", "cond"],
    )
    def test_bodies_of_higher_order_ops(self, call: Callable[..., Any], count: int) -> None:
        with torch.set_grad_enabled(call is _in_a_checkpoint):
            model = Region(call).requires_grad_(False)
            outcome = run(model, *make_inputs(), grad=torch.is_grad_enabled())
        assert len(outcome.passes.graphs) == 1 + count
        assert_fused(outcome, count=count)

    def test_autocast_that_is_off(self) -> None:
        def step(c: Any) -> Any:
            with torch.autocast("cpu", enabled=False):
                return torch.rsqrt(c.variance)

        assert_fused(run(site(root=step), *make_inputs()))

    def test_a_region_that_ended(self) -> None:
        def step(c: Any) -> Any:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                c.other = c.z @ c.z.t()
            return c.x.float()

        assert_fused(run(site(h=step, result=lambda c: (c.codes, c.scale, c.other)), *make_inputs()))

    def test_inference_mode(self) -> None:
        with torch.inference_mode():
            compiled = torch.compile(site(), backend="gdn_rocm", options={"gdn.report": "off"})
            assert [tuple(result.shape) for result in compiled(*make_inputs())] == [(3, 512), (3, 4)]


class TestSubclasses:
    def test_a_distributed_tensor(self, tmp_path: Any) -> None:
        distributed = pytest.importorskip("torch.distributed")
        if not distributed.is_available() or not distributed.is_gloo_available():
            pytest.skip("this torch has no gloo")
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, distribute_tensor

        distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,))
            x, z, w = (distribute_tensor(t, mesh, [Replicate()]) for t in (*make_inputs(), make_weight()))

            def model(x: Any, z: Any, w: Any) -> Any:
                h = x.float()
                y = (w * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)) * torch.sigmoid(z.float())).to(
                    x.dtype
                )
                scale = (y.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-6)
                return (y.float() / scale).to(FP8).view(torch.uint8), scale

            passes = Passes()
            torch.compile(model, backend=passes.backend, fullgraph=True)(x, z, w)
        finally:
            distributed.destroy_process_group()
        assert [miss.reason for miss in passes.misses] == [Reason.SUBCLASS]
        assert passes.misses[0].actual == "DTensor"


class TestGuards:
    """As many graphs as with a backend that does nothing, whatever changes between two calls."""

    @pytest.mark.parametrize("dynamic", [None, True])
    def test_eps_token_counts_and_dtypes(self, dynamic: bool | None) -> None:
        nothing, ours = CompileCounter(), CompileCounter()
        for backend in (nothing, _counting(ours)):
            torch._dynamo.reset()
            model = WithEps()
            compiled = torch.compile(model, backend=backend, dynamic=dynamic)
            for eps, tokens, dtype in STEPS:
                model.eps = eps
                compiled(*make_inputs(tokens, dtype))
        assert ours.frame_count == nothing.frame_count


STEPS = (
    (1e-6, 3, torch.bfloat16), (1e-6, 4, torch.bfloat16), (1e-6, 5, torch.bfloat16), (1e-5, 5, torch.bfloat16),
    (1e-4, 7, torch.bfloat16), (1e-4, 7, torch.float16), (1e-4, 1, torch.float16), (1e-6, 0, torch.float16),
)  # fmt: skip


class WithEps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.eps = 1e-6

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> Any:
        h = x.float()
        y = (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps) * torch.sigmoid(z.float())).to(x.dtype)
        scale = (y.abs().amax(-1, keepdim=True).float() / 448.0).clamp(min=1e-6)
        return (y.float() / scale).to(FP8), scale


def _counting(counter: CompileCounter) -> Callable[..., Any]:
    """The whole backend, Inductor included, counting the graphs that reach it."""

    def backend(gm: torch.fx.GraphModule, example_inputs: Any) -> Any:
        counter.frame_count += 1
        return gdn_rocm(gm, example_inputs, options={"gdn.report": "off"})

    return backend


def test_nothing_else_is_changed() -> None:
    """The rest of the graph is what it was, node for node."""
    outcome: Outcome = run(
        site(result=lambda c: (c.codes, c.scale, torch.sin(c.more[0]) + 1)), *make_inputs(), torch.ones(3)
    )
    assert_fused(outcome)
    kept = [line for line in outcome.passes.before[0].splitlines() if "sin" in line or "more" in line]
    after = str(outcome.passes.graphs[0].graph)
    assert len(kept) >= 2
    assert all(line in after for line in kept)
