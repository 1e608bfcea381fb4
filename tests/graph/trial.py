"""One generated program, tried: eager on one side, the rewritten graph interpreted on the other."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from gdn_backend.exactness import CODE_COUNT, SCALE_COUNT, SCALE_DISTANCE, grid_position
from gdn_backend.ops.spec import FP8_DTYPES
from tests.graph.harness import Passes, same_bytes, strides_of
from tests.graph.program import Program
from tests.graph.tracing import symbol_values, trace

DYNAMIC_TOKENS: dict[int, tuple[int, ...]] = {0: (0,), 1: (0,)}  # of x and z


@dataclass(frozen=True)
class Trial:
    """What came of a program. ``fault`` is empty where the result is eager's and an equivalent program has fused."""

    fused: int
    reasons: tuple[str, ...]
    fault: str
    valid: bool = True  # False: eager itself does not run the program


def try_program(program: Program, must_fuse: bool, seed: int = 0) -> Trial:
    """Runs ``program`` both ways."""
    inputs = program.make_inputs(seed)
    try:
        expected = _run(program, copy.deepcopy(inputs))
    except (RuntimeError, TypeError, IndexError, AttributeError, NotImplementedError):
        if must_fuse and program.tokens:  # with none, a size of -1 can be ambiguous
            raise
        return Trial(0, (), "", valid=False)
    dims = DYNAMIC_TOKENS if program.dynamic and program.tokens > 1 else {}
    gm = trace(program, inputs, dims)
    passes = Passes(frozenset({64, 128}))
    passes.backend(gm, [])
    arguments = copy.deepcopy(inputs)
    symbols = symbol_values(arguments, dims)
    actual = _run(lambda *tensors: gm(*symbols, *tensors), arguments)
    reasons = tuple(miss.reason.name for miss in passes.misses)
    fault = _difference(expected, actual, tolerant=program.rounds_otherwise)
    if not fault and must_fuse and (len(passes.matches) != 1 or passes.misses):
        fault = f"not fused: {[miss.render() for miss in passes.misses] or 'no anchor'}"
    return Trial(len(passes.matches), reasons, fault)


def compare_compiled(program: Program) -> str:
    """Compiles ``program`` with the backend, Inductor and all: how its results differ from eager's, or nothing."""
    options: dict[str, Any] = {"gdn.group_sizes": [64, 128]}
    compiled = torch.compile(program.__call__, backend="gdn_rocm", fullgraph=True, options=options)
    inputs = program.make_inputs()
    if program.dynamic and program.tokens > 1:
        for tensor in inputs[:2]:
            torch._dynamo.mark_dynamic(tensor, 0)
    expected = _run(program, copy.deepcopy(inputs))
    actual = _run(compiled, inputs)
    return _difference(expected, actual, tolerant=program.rounds_otherwise)


def _run(function: Any, inputs: list[torch.Tensor]) -> list[Any]:
    with torch.no_grad():
        results = function(*inputs)
    return pytree.tree_leaves((results, inputs))


def _close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Within what the last ulp of 1 / sqrt and the order of a sum along a strided axis can do.

    Codes: as :mod:`gdn_backend.exactness` has it. Other values: four ulp of float32, and one value that was rounded
    the other way on the way to bfloat16 or float16.
    """
    if not theirs.is_floating_point():
        return False
    left, right = ours.float(), theirs.float()
    if theirs.dtype in FP8_DTYPES.values():
        steps = (grid_position(ours) - grid_position(theirs)).abs()
        same_nan = torch.equal(left.isnan(), right.isnan())
        return same_nan and int(steps.max()) <= 1 and int(steps.sum()) <= CODE_COUNT
    far = ~torch.isclose(left, right, rtol=SCALE_DISTANCE[torch.float32], atol=0.0, equal_nan=True)
    near = torch.isclose(left, right, rtol=SCALE_DISTANCE[torch.bfloat16], atol=0.0, equal_nan=True)
    return bool(near.all()) and int(far.sum()) <= SCALE_COUNT


def _difference(expected: list[Any], actual: list[Any], tolerant: bool) -> str:
    for index, (theirs, ours) in enumerate(zip(expected, actual, strict=True)):
        if not isinstance(theirs, torch.Tensor):
            continue
        facts = [(tensor.shape, strides_of(tensor), tensor.dtype) for tensor in (ours, theirs)]
        if facts[0] != facts[1]:
            return f"result {index}: {facts[0]}, eager's is {facts[1]}"
        if not same_bytes(ours, theirs) and not (tolerant and _close(ours, theirs)):
            return f"result {index} ({theirs.dtype} {tuple(theirs.shape)}) differs"
    return ""
