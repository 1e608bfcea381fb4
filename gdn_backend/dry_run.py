"""``gdn_backend.explain``: what the backend would do to a model, found without compiling or computing anything.

Parameters, buffers, inputs and caches are copied to fake tensors, which have shapes, dtypes and devices but no values.
Dynamo traces the copies as ``torch.compile`` would, graph breaks included, and what it captures is matched and dropped.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gdn_backend.backend import report_graph
from gdn_backend.options import resolve_settings
from gdn_backend.report.model import FusionReport


def explain(model: Callable[..., Any], *args: Any, **kwargs: Any) -> list[FusionReport]:
    """Traces ``model(*args, **kwargs)`` and matches each graph; a report for each, in the order they were captured.

    Settings come from ``GDN_*`` variables, grad mode from where it is called. The model, its inputs and Dynamo's memory
    of the model stay as they are; nothing is added to :func:`gdn_backend.reports`. ``model`` may be compiled already or
    a function: what that reads from its closure and its module is copied, but the functions that it calls read the
    originals. Where the call needs a value that a fake tensor does not have, the trace ends there and the last report's
    notes say so.
    """
    if not callable(model):
        raise TypeError(f"explain needs a module or a function, got {type(model).__name__}")
    settings = resolve_settings()
    reports: list[FusionReport] = []

    def collect(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        reports.append(report_graph(gm, settings, graph_id=len(reports)))
        return gm.forward

    try:
        fake_mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
        fake_model, fake_args, fake_kwargs = _fake_copies(fake_mode, model, args, kwargs)
        with _unnoticed_by_dynamo(collect), fake_mode:
            _compile_apart(fake_model, collect)(*fake_args, **fake_kwargs)
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        note = f"the trace on fake tensors ended early, and what comes behind is not explained: {reason}"
        last = reports.pop() if reports else FusionReport(graph_id=0, num_nodes=0)
        reports.append(replace(last, notes=(*last.notes, note)))
    return reports


def _fake_copies(
    fake_mode: FakeTensorMode, model: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Copies made with one memo, so that what model and inputs share is shared by the copies too."""
    model = getattr(model, "_torchdynamo_orig_callable", getattr(model, "_orig_mod", model))
    memo: dict[int, Any] = {}
    with FakeCopyMode(fake_mode):
        fake_args, fake_kwargs = copy.deepcopy((args, kwargs), memo)
        is_function = isinstance(model, types.FunctionType)
        fake_model = _copy_function(model, memo) if is_function else copy.deepcopy(model, memo)
    for value in list(memo.values()):
        if isinstance(value, torch.nn.Module):
            _undo_compilation(value)
    return fake_model, fake_args, fake_kwargs


def _copy_function(function: Any, memo: dict[int, Any]) -> types.FunctionType:
    """The function over copies of what its closure holds and of the globals that it names."""
    cells = tuple(types.CellType(_copy_state(cell.cell_contents, memo)) for cell in function.__closure__ or ())
    named = {name: function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__}
    copied = {name: _copy_state(value, memo) for name, value in named.items()}
    fake = types.FunctionType(
        function.__code__, {**function.__globals__, **copied}, function.__name__, function.__defaults__, cells
    )
    fake.__kwdefaults__ = function.__kwdefaults__
    return fake


def _copy_state(value: Any, memo: dict[int, Any]) -> Any:
    """A copy of what may hold tensors; code, and what cannot be copied, is kept."""
    if isinstance(value, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)):
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


def _names(code: types.CodeType) -> set[str]:
    """Global names in ``code`` and in the functions that it defines."""
    nested = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, nested))


def _undo_compilation(module: torch.nn.Module) -> None:
    """Puts the plain module where a child was compiled by itself: its backend is not to run."""
    for name, child in list(module.named_children()):
        if isinstance(child, torch._dynamo.OptimizedModule):
            setattr(module, name, child._orig_mod)


def _compile_apart(model: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.compile``; where torch can keep the graphs apart (2.13), they do not count towards the user's limits."""
    compile_model: Callable[..., Any] = torch.compile
    apart = {"isolate_recompiles": True} if "isolate_recompiles" in inspect.signature(torch.compile).parameters else {}
    return compile_model(model, backend=backend, **apart)


@contextmanager
def _unnoticed_by_dynamo(backend: Callable[..., Any]) -> Iterator[None]:
    """What Dynamo learns inside is forgotten: sizes seen, and graphs captured wherever nobody else has captured any.

    The original and its copy share their code, and Dynamo keeps all it knows with the code.
    """
    from torch._dynamo import config, convert_frame, pgo

    sizes_seen = pgo.get_code_state()
    sizes_before = copy.deepcopy(sizes_seen)
    traced: set[types.CodeType] = set()
    hook = convert_frame.register_bytecode_hook(lambda code, _: traced.add(code))
    try:
        with config.patch(recompile_limit=2**20, accumulated_recompile_limit=2**20, automatic_dynamic_local_pgo=False):
            yield
    finally:
        hook.remove()
        sizes_seen.clear()
        sizes_seen.update(sizes_before)
        for code in traced:
            _forget_graphs(code, backend)


def _forget_graphs(code: types.CodeType, backend: Callable[..., Any]) -> None:
    from torch._dynamo import eval_frame

    entries = eval_frame._debug_get_cache_entry_list(code)
    if all(getattr(entry.backend, "compiler_fn", None) is backend for entry in entries):
        torch._dynamo.reset_code(code)
