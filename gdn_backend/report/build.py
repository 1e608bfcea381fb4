"""From what matching found to what the report says: texts, module paths and lines, no nodes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import Graph, Node

from gdn_backend.fusion.match import Match, Miss, SiteFacts
from gdn_backend.graph.shapes import tensor_of
from gdn_backend.report.model import SiteReport

if TYPE_CHECKING:
    from gdn_backend.ops.dispatch import Choice

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+)')
_MODULE_ROOT = re.compile(r"^[LG]\['[^']*'\]\.?")
_SUBMODULE = re.compile(r"__dict__\['_modules'\]\['([^']*)'\]")  # how Dynamo spells some attribute accesses
_TORCH = os.path.dirname(torch.__file__) + os.sep


def report_sites(
    graph: Graph, chosen: Iterable[tuple[Match, Choice]], missed: Iterable[tuple[Miss, str]]
) -> list[SiteReport]:
    """The entries of one graph's sites, in the order of the graph; a miss comes with what was decided of its kernel."""
    position = {node: index for index, node in enumerate(graph.nodes)}
    placed = [(position[match.facts.anchor], _fused(match, choice)) for match, choice in chosen]
    placed += [(position[_facts(miss).anchor], _missed(miss, kernel)) for miss, kernel in missed]
    return [site for _, site in sorted(placed, key=lambda item: item[0])]


def _fused(match: Match, choice: Choice) -> SiteReport:
    return SiteReport(
        status="fused",
        reason=None,
        detail="",
        kernel=choice.kernel,
        kernel_reason=choice.reason,
        **_fields(match.facts),
    )


def _missed(miss: Miss, kernel: str) -> SiteReport:
    return SiteReport(
        status="missed",
        reason=miss.reason.name,
        detail=miss.render(source_line(miss.node)),
        kernel_reason=kernel,
        **_fields(_facts(miss)),
    )


def _facts(miss: Miss) -> SiteFacts:
    assert miss.facts is not None, "a search describes the site of every miss"
    return miss.facts


def _fields(facts: SiteFacts) -> dict[str, Any]:
    """What both kinds of site say; the line is the norm's, or the quantisation's where the norm has none."""
    values = dict(vars(facts))
    anchor, norm = values.pop("anchor"), values.pop("norm")
    tensor = tensor_of(norm)
    values["module"] = module_path(norm, anchor)
    values["source"] = source_line(norm, anchor)
    values["device"] = tensor.device.type if tensor is not None else ""
    return values


def module_path(*nodes: Node | None) -> str:
    """The innermost module that the first node with one was called in: its path, or its class where it is the root."""
    for stack in (node.meta.get("nn_module_stack") for node in nodes if node is not None):
        if stack:
            path, module_class = list(stack.values())[-1]
            path = _SUBMODULE.sub(r"\1", _MODULE_ROOT.sub("", path))
            return path or getattr(module_class, "__name__", str(module_class))
    return ""


def source_line(*nodes: Node | None) -> str:
    """``"file.py:123"``: the innermost line outside torch that the first node with a stack trace stands for."""
    for node in nodes:
        frames = _FRAME.findall(node.meta.get("stack_trace") or "") if node is not None else []
        own = _innermost(frames, inside_torch=False) or _innermost(frames, inside_torch=True)
        if own:
            return f"{os.path.basename(own[0])}:{own[1]}"
    return ""


def _innermost(frames: Iterable[tuple[str, str]], *, inside_torch: bool) -> tuple[str, str] | None:
    return next((frame for frame in reversed(list(frames)) if frame[0].startswith(_TORCH) == inside_torch), None)
