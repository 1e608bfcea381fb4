"""What is to be done to one graph: the sites that will be fused, each with its kernel, and those that will not."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch.fx import Graph

from gdn_backend.fusion.match import Match, Miss, Reason
from gdn_backend.fusion.rules import find_sites
from gdn_backend.graph.shapes import static_int, tensor_of
from gdn_backend.ops.dispatch import Choice, Operands, choose_kernel
from gdn_backend.options import Settings


@dataclass
class Plan:
    """The sites of a graph; every anchor is in one of the two lists, each in program order."""

    chosen: list[tuple[Match, Choice]] = field(default_factory=list)
    missed: list[tuple[Miss, str]] = field(default_factory=list)  # with what was decided about its kernel, if anything
    notes: list[str] = field(default_factory=list)


def plan_sites(graph: Graph, settings: Settings) -> Plan:
    """Finds the sites of ``graph`` and a kernel for each; changes nothing."""
    found = find_sites(graph, group_sizes=frozenset(settings.group_sizes))
    plan = Plan(missed=[(miss, "") for miss in found.misses], notes=list(found.notes))
    for match in found.matches:
        answer = choose_kernel(match.spec, _operands(match), requested=settings.kernel, numerics=settings.numerics)
        if not isinstance(answer, Choice):
            advice = "gdn.kernel='reference' takes every site, slower than a kernel of its own"
            miss = _miss(match, Reason.KERNEL, "a kernel that takes the site", answer.reason, advice)
            plan.missed.append((miss, answer.reason))
        elif not settings.enabled:
            miss = _miss(match, Reason.DISABLED, "gdn.enabled=True", "False", "leave gdn.enabled and GDN_ENABLED unset")
            plan.missed.append((miss, f"would have been {answer.kernel}"))
        else:
            plan.chosen.append((match, answer))
    return plan


def _miss(match: Match, reason: Reason, expected: str, actual: str, advice: str) -> Miss:
    return Miss("kernel", reason, match.quant.codes, expected, actual, advice, match.facts)


def _operands(match: Match) -> Operands:
    norm = match.norm
    x, gate, weight, bias = (tensor_of(node) for node in (norm.x, norm.gate, norm.weight, norm.bias))
    assert x is not None and gate is not None, "a matched norm's operands are tensors"
    return Operands(
        device=x.device,
        x=x.dtype,
        gate=gate.dtype,
        weight=None if weight is None else weight.dtype,
        bias=None if bias is None else bias.dtype,
        weight_size=None if weight is None else static_int(weight.numel()),
        bias_size=None if bias is None else static_int(bias.numel()),
    )
