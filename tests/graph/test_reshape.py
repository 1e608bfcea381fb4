"""Reshape folding as a pass of its own: what is folded, what is not, and that nobody can tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gdn_backend.graph.reshape import fold_reshapes
from tests.graph.harness import Outcome, assert_equals_eager, run

Program = Callable[[torch.Tensor], Any]


def fold(program: Program, *inputs: torch.Tensor, dynamic: bool = False, also: Any = ()) -> Outcome:
    """``program`` folded and run, equal to eager (and nothing but reshapes in it, so nothing but folding is done)."""
    outcome = run(program, *(inputs or (torch.randn(6, 4, 8),)), dynamic=dynamic, also=also)
    assert_equals_eager(outcome)
    return outcome


def calls(outcome: Outcome) -> list[str]:
    return [str(node.target) for node in outcome.nodes() if node.op in ("call_method", "call_function")]


CHAINS: dict[str, tuple[Program, int, list[str]]] = {
    "two views": (lambda x: x.view(24, 8).view(6, 32), 1, ["reshape"]),
    "flatten, unflatten": (lambda x: x.flatten(1).unflatten(1, (2, -1)), 1, ["reshape"]),
    "squeeze, unsqueeze": (lambda x: x.unsqueeze(1).squeeze(1).unsqueeze(0).view(-1, 8), 2, ["reshape"]),
    "functions": (lambda x: torch.reshape(torch.flatten(x, 0, 1), (6, 32)), 1, ["reshape"]),
    "aten": (lambda x: torch.ops.aten.view(torch.ops.aten.view.default(x, [24, 8]), [6, 32]), 1, ["reshape"]),
    "view_as": (lambda x: x.view(24, 8).view_as(torch.empty(6, 32)), 1, ["reshape"]),
    "sizes that are read": (lambda x: x.view(24, 8).view(x.size(0), x.shape[1] * x.shape[2]), 1, ["reshape"]),
    "there and back": (lambda x: x.view(24, 8).view(6, 4, 8) + 1, 1, ["<built-in function add>"]),
    "to its own shape": (lambda x: x.view(6, 4, 8) * 2, 1, ["<built-in function mul>"]),
    "ten in a row": (lambda x: [x := x.view(24, 8).view(6, 4, 8).view(6, 32) for _ in range(3)][-1], 0, []),
    "one alone": (lambda x: x.view(24, 8), 0, ["view"]),
}


@pytest.mark.parametrize("name", CHAINS)
def test_chain(name: str) -> None:
    program, folded, left = CHAINS[name]
    outcome = fold(program)
    if left:
        assert outcome.passes.folded == folded
        assert [call for call in calls(outcome) if "empty" not in call] == left
    else:
        assert len(calls(outcome)) < 9


def scales_of(x: torch.Tensor) -> torch.Tensor:
    return x.amax(-1, keepdim=True)


BROADCASTS: dict[str, tuple[Program, bool]] = {
    "expand_as": (lambda x: x * scales_of(x).expand_as(x), True),
    "expand": (lambda x: x / scales_of(x).expand(-1, -1, 8), True),
    "broadcast_to, in place": (lambda x: x.add(1).div_(torch.broadcast_to(scales_of(x), (6, 4, 8))), True),
    "a vector": (lambda x: x[0, 0].expand_as(x) + x, True),
    "to its own shape": (lambda x: x - (x + 1).expand(6, 4, 8), True),
    "of both operands": (lambda x: scales_of(x).expand_as(x) * scales_of(x + 1).expand_as(x), False),
    "of a number, which promotes": (lambda x: x.bfloat16() * x.sum().expand(6, 4, 8), False),
    "beyond the other operand": (lambda x: x[:1] * scales_of(x[:1]).expand(6, 4, 8), False),
    "into a tensor": (lambda x: torch.mul(x[:1], scales_of(x[:1]).expand(6, 4, 8), out=torch.empty_like(x)), False),
    "written to": (lambda x: (x + 1).view(6, 4, 8).mul_(scales_of(x).expand_as(x)), True),
}  # fmt: skip


@pytest.mark.parametrize("name", BROADCASTS)
def test_broadcast(name: str) -> None:
    program, folds = BROADCASTS[name]
    outcome = fold(program)
    assert (not any("expand" in call or "broadcast" in call for call in calls(outcome))) == folds


def test_a_broadcast_does_not_order_the_strides_anew() -> None:
    """An axis of size one that expand() adds has a stride of its own, by which a result can be laid out."""
    for shape in ((1, 5, 1, 8), (5, 1, 1, 8), (1, 1, 1, 8)):
        x = torch.randn(shape).transpose(0, 1)
        fold(lambda x, w: (x * w.expand_as(x), w.expand_as(x) + x), x, torch.randn(8))


def test_axes_of_one_keep_their_strides() -> None:
    fold(lambda x: (x.reshape(-1, 1).t().t().view(-1, 1) * 1, x.view(192, 1).t().contiguous().t()))
    fold(lambda x: x.view(1, 192).t().t()[None].transpose(0, 1).squeeze(1))


def test_a_value_in_the_middle_that_is_read_stays() -> None:
    outcome = fold(lambda x: ((merged := x.view(24, 8)) + 1, merged.view(6, 32)))
    assert sorted(calls(outcome)) == ["<built-in function add>", "reshape", "view"]


def test_folding_twice_changes_nothing() -> None:
    outcome = fold(lambda x: x.view(24, 8).view(6, 32).view(3, 64))
    (gm,) = outcome.passes.graphs
    before = str(gm.graph)
    assert fold_reshapes(gm.graph) == 0
    assert str(gm.graph) == before


WRITES: dict[str, Program] = {
    "the base, behind a copy": lambda x: ((r := x.transpose(0, 1).reshape(-1)), x.add_(1), r.reshape(4, -1))[2],
    "the copy": lambda x: ((r := x.transpose(0, 1).reshape(-1)), r.add_(1), r.reshape(4, -1))[2],
    "a view": lambda x: ((r := x.view(-1)), r[:5].zero_(), r.view(6, 32))[2],
    "the last one": lambda x: ((r := x.view(24, 8).view(6, 32)), r.mul_(2), x + 0)[2],
    "a view of the same shape": lambda x: ((r := x.view(6, 4, 8)), r.mul_(2), x + r)[2],
    "the shape": lambda x: ((r := x.view(6, 4, 8)), r.unsqueeze_(0), r.view(-1), x + 0)[3],
    "the base by another name": lambda x: ((r := x.view(24, 8)), x.detach().neg_(), r.view(-1) * 1)[2],
}


@pytest.mark.parametrize("name", WRITES)
def test_chains_under_a_write_are_left_alone(name: str) -> None:
    fold(WRITES[name])


ALIASES: dict[str, Program] = {
    "a view that is returned": lambda x: x.view(6, 4, 8),
    "of a view that is returned": lambda x: x.view(24, 8).view(6, 32),
    "a copy that is returned twice": lambda x: ((r := x.transpose(0, 1).reshape(24, 8)), r.view(6, 32)),
    "a strided base": lambda x: x[:, :2].reshape(12, 8).reshape(6, 16),
    "a base that need not be copied": lambda x: x[:, 0].reshape(6, 2, 4).reshape(6, 8),
    "an expanded base": lambda x: x[:1].expand(6, 4, 8).reshape(24, 8).reshape(6, 32),
}


@pytest.mark.parametrize("name", ALIASES)
def test_who_shares_memory_stays(name: str) -> None:
    program = ALIASES[name]
    outcome = fold(program)
    shared = []
    for results in (outcome.expected, outcome.actual):
        tensors = [result for result in results if isinstance(result, torch.Tensor)]
        keys = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        shared.append([[one == other for one in keys] for other in keys])
    assert shared[0] == shared[1]


SYMBOLIC: dict[str, Program] = {
    "-1": lambda x: x.view(-1, 8).view(-1, 32) + 1,
    "sizes": lambda x: x.view(x.shape[0] * x.size(1), 8).view(x.shape[0], -1) + 1,
    "flatten": lambda x: x.flatten(0, 1).unflatten(0, (-1, 4)).flatten(1) + 1,
    "split in two": lambda x: x.reshape(x.shape[0], 2, 2, 8).reshape(-1, 8).reshape(-1, 4, 8) + 1,
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes_install_no_guard(name: str) -> None:
    def batch(size: int) -> torch.Tensor:
        tensor = torch.randn(size, 4, 8)
        torch._dynamo.mark_dynamic(tensor, 0)
        return tensor

    outcome = run(SYMBOLIC[name], batch(6), dynamic=None, also=[(batch(size),) for size in (2, 7, 48)])
    assert_equals_eager(outcome)
    assert outcome.passes.folded > 0
    assert outcome.passes.captures == 1


def test_metadata_stays_true() -> None:
    (gm,) = fold(lambda x: x.view(24, 8).view(6, 32)).passes.graphs
    (node,) = [node for node in gm.graph.nodes if node.op == "call_method"]
    assert tuple(node.meta["example_value"].shape) == (6, 32)
    assert node.meta["stack_trace"]
