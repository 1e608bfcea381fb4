"""Finding every site of a graph in one pass: each anchor becomes a match or a miss that says why.

anchor: an FP8 quantisation (any sink) whose data path reaches a gated norm.  anchors == matches + misses, always.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from gdn_backend.fusion.checks import SiteChecker, check_row
from gdn_backend.fusion.gated_norm import find_gated_norm
from gdn_backend.fusion.match import Candidate, GatedNorm, Match, Miss, Quantisation, Reason, SiteFacts
from gdn_backend.fusion.sinks.act_quant import find_hub_op, find_triton_kernel
from gdn_backend.fusion.sinks.decomposed import find_decomposed
from gdn_backend.fusion.sinks.own_op import find_own_op
from gdn_backend.fusion.sinks.unknown_op import find_unknown_op
from gdn_backend.fusion.sinks.vllm_ops import find_vllm_op
from gdn_backend.fusion.unquantised import describe_unquantised
from gdn_backend.fusion.walk import peel
from gdn_backend.graph.canonical import CREATIONS, GraphView, overwritten_operand, reads_only_shape, spelled_name
from gdn_backend.graph.reshape import passed_shapes
from gdn_backend.graph.shapes import same_size, shape_of, static_int, tensor_of
from gdn_backend.ops.spec import FusedSpec

#: Every form of quantisation that is known, one file each; what no other sink takes for its own comes last.
SINKS: tuple[Callable[[GraphView, Node], Candidate | None], ...] = (
    find_decomposed,
    find_own_op,
    find_vllm_op,
    find_hub_op,
    find_triton_kernel,
    find_unknown_op,
)

#: What may stand between norm and quantisation so that the groups are not the norm's values in their order.
_REARRANGEMENTS = frozenset(
    (
        "permute",
        "slice",
        "pad",
        "constant_pad_nd",
        "expand",
        "expand_as",
        "repeat",
        "flip",
        "roll",
        "narrow",
        "index_select",
    )
)


@dataclass
class SearchResult:
    """What a search found, each list in program order."""

    matches: list[Match] = field(default_factory=list)
    misses: list[Miss] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_sites(graph: Graph, *, group_sizes: frozenset[int]) -> SearchResult:
    """All anchors of ``graph``; groups of a size outside ``group_sizes`` are misses (per-token ones are not groups)."""
    view = GraphView(graph)
    checker = SiteChecker(view)
    result = SearchResult()
    for node in view.nodes:
        found = _find_site(view, checker, node, group_sizes)
        if isinstance(found, Match):
            result.matches.append(found)
        elif found is not None:
            result.misses.append(found)
    facts = [*(match.facts for match in result.matches), *(miss.facts for miss in result.misses)]
    norms = {site.norm for site in facts if site is not None}
    result.notes += describe_unquantised(view, norms)
    return result


def _find_site(view: GraphView, checker: SiteChecker, node: Node, group_sizes: frozenset[int]) -> Match | Miss | None:
    candidates = (sink(view, node) for sink in SINKS)
    candidate = next((found for found in candidates if found is not None), None)
    if candidate is None:
        return None
    norms = (find_gated_norm(view, data) for data in candidate.data)
    norm = next((found for found in norms if found is not None), None)
    if norm is None:
        return _find_behind_rearrangement(view, candidate)
    quant = candidate.quant
    if isinstance(quant, Miss) and quant.node in norm.interior:  # what looked like a factor belongs to the norm
        advice = "the fused op computes its scales; use dynamic activation quantisation"
        expected = "a scale computed from the data"
        quant = Miss("quant", Reason.STATIC_SCALE, candidate.anchor, expected, "a cast without a scale", advice)
    if isinstance(quant, Miss):
        return dataclasses.replace(quant, facts=_describe(candidate, norm, None, None))
    members = norm.interior | quant.interior | quant.dependents | set(quant.results)
    quant = dataclasses.replace(quant, interior=quant.interior | set(_private_buffers(view, members)))
    hidden_size = _row_width(norm, quant)
    facts = _describe(candidate, norm, quant, hidden_size)
    miss = norm.problem or _check_mapping(norm, quant, hidden_size, facts, group_sizes) or checker.check(norm, quant)
    if miss is not None or hidden_size is None:
        assert miss is not None
        return dataclasses.replace(miss, facts=facts)
    nodes = norm.interior | quant.interior | quant.dependents | set(quant.results)
    replaced = tuple(sorted(nodes, key=view.position.__getitem__))
    spec = _spec(norm, quant, hidden_size, facts)
    return Match(norm, quant, spec, facts, replaced, _names(view, quant.codes), _names(view, quant.scales))


def _private_buffers(view: GraphView, members: Iterable[Node]) -> Iterator[Node]:
    """Fresh tensors that values of the site are written to (DeepGEMM pads so), and what filled them before.

    They are part of the site: that nobody else reads them is for the checks to find.
    """
    for node in members:
        target = overwritten_operand(node)
        family = view.family(target) if target is not None else ()
        if not family or view.op(family[0]).name not in CREATIONS:
            continue
        following = node
        for version in reversed(family[: family.index(node)]):
            yield version
            if any(
                reader is not following and not reads_only_shape(reader, version) for reader in view.readers(version)
            ):
                break  # seen outside, which is all that matters of what came before
            following = version


def _names(view: GraphView, node: Node | None) -> tuple[Node, ...]:
    """``node`` and the nodes whose tensor it overwrote in place: later readers may know it by any of these."""
    family = view.family(node) if node is not None else ()
    return family[: family.index(node) + 1] if node is not None else ()


def _find_behind_rearrangement(view: GraphView, candidate: Candidate) -> Miss | None:
    """A miss where a gated norm stands behind something that moves, drops or adds values on the way to the groups."""
    for data in candidate.data:
        rearrangement = node = peel(view, data).node
        while (source := _rearranged(view, node)) is not None:
            node = peel(view, source).node
        norm = find_gated_norm(view, node) if node is not rearrangement else None
        if norm is not None:
            expected = "the norm's values in row-major order, all of them, in the groups"
            actual = f"{view.op(rearrangement).name} between norm and quantisation"
            advice = "quantise along the heads as the norm leaves them, and rearrange codes and scales instead"
            facts = _describe(candidate, norm, None, None)
            return Miss("layout", Reason.LAYOUT, rearrangement, expected, actual, advice, facts)
    return None


def _rearranged(view: GraphView, node: Node) -> Node | None:
    """What ``node`` holds values of, in another order or beside others; None where it is no such thing."""
    op = view.op(node)
    if op.name in _REARRANGEMENTS:
        return op.get("input") if tensor_of(op.get("input")) is not None else None
    family = view.family(node)
    if view.op(family[0]).name not in CREATIONS:
        return None
    writes = (user for member in family for user in member.users if spelled_name(user) == "setitem")
    parts = (write.args[2] for write in writes if write.args[0] in family)
    return next((part for part in parts if isinstance(part, Node) and tensor_of(part) is not None), None)


def _row_width(norm: GatedNorm, quant: Quantisation) -> int | None:
    """The width of a row: the widest last axis between norm and groups that holds whole norms and whole groups.

    Norm and groups both run along the row-major order, so any such width computes the same; the widest is the one that
    the model merged its heads to. None where there is none.
    """
    unit = math.lcm(norm.norm_size, quant.group_size or 1)
    path = (*quant.path, *norm.path)
    shapes = [shape for node in path for shape in (shape_of(node), *passed_shapes(node))]
    fitting = [width for shape in shapes if shape and (width := static_int(shape[-1])) and width % unit == 0]
    if not fitting or (norm.norm_before_gate and max(fitting) <= norm.norm_size):
        # No axis merges the heads: they may stand beside each other, [T, H, D]. A symbolic count leaves one a row.
        pairs = [_last_two(node) for node in path if len(shape_of(node)) > 2]
        fitting += [width for width in (*pairs, unit) if width and width % unit == 0]
    whole = [width for width in fitting if any(_fills_rows(node, width) for node in (norm.x, *path))]
    return max(whole, default=None)


def _fills_rows(node: Node, width: int) -> bool:
    """True where the values of ``node`` are rows of ``width``, whatever its symbolic sizes."""
    sizes = [static_int(size) for size in shape_of(node)]
    known = math.prod(size for size in sizes if size is not None)
    if known % width == 0:
        return True
    tensor = tensor_of(node)
    return tensor is not None and None in sizes and same_size(tensor.numel() % width, 0)


def _last_two(node: Node) -> int | None:
    first, second = (static_int(size) for size in shape_of(node)[-2:])
    return first * second if first is not None and second is not None else None


def _granularity(norm: GatedNorm, quant: Quantisation, hidden_size: int | None) -> str:
    """``token`` where one scale covers a row of several heads, or the one norm of a gate-first row; else ``group``."""
    merged = hidden_size is not None and (hidden_size > norm.norm_size or not norm.norm_before_gate)
    return "token" if merged and quant.group_size == hidden_size else "group"


def _check_mapping(
    norm: GatedNorm, quant: Quantisation, hidden_size: int | None, facts: SiteFacts, group_sizes: frozenset[int]
) -> Miss | None:
    if hidden_size is None:
        expected = f"rows of whole norms of {norm.norm_size} and whole groups of {quant.group_size}"
        actual = f"shapes {', '.join(str(list(map(str, shape_of(node)))) for node in (*quant.path[:1], norm.output))}"
        advice = "merge the heads into rows before the quantisation, or choose groups that divide a row"
        return Miss("layout", Reason.LAYOUT, quant.path[0] if quant.path else quant.codes, expected, actual, advice)
    if facts.granularity == "group" and quant.group_size not in group_sizes:
        enabled = ", ".join(map(str, sorted(group_sizes)))
        wanted = sorted({*group_sizes, quant.group_size})
        advice = f'enable it with options={{"gdn.group_sizes": {wanted}}} or GDN_GROUP_SIZES'
        return Miss("quant", Reason.GROUP_SIZE, quant.codes, f"groups of {enabled}", f"{quant.group_size}", advice)
    return check_row(norm, hidden_size)


def _describe(candidate: Candidate, norm: GatedNorm, quant: Quantisation | None, hidden_size: int | None) -> SiteFacts:
    facts = SiteFacts(
        sink=candidate.sink,
        anchor=candidate.anchor,
        norm=norm.output,
        head_dim=norm.norm_size,
        eps=norm.eps if isinstance(norm.eps, float) else None,
        eps_symbolic=not isinstance(norm.eps, float),
        activation=norm.activation,
        norm_before_gate=norm.norm_before_gate,
        roundings=norm.roundings,
    )
    if quant is None:
        return facts
    return dataclasses.replace(
        facts,
        num_heads=hidden_size // norm.norm_size if hidden_size else None,
        group_size=quant.group_size,
        granularity=_granularity(norm, quant, hidden_size),
        scale_format=quant.quant.scale_format,
        fp8_dtype=quant.fp8_dtype,
    )


def _spec(norm: GatedNorm, quant: Quantisation, hidden_size: int, facts: SiteFacts) -> FusedSpec:
    return FusedSpec(
        hidden_size=hidden_size,
        head_dim=norm.norm_size,
        norm_size=norm.norm_size,
        group_size=quant.group_size,
        granularity="token" if facts.granularity == "token" else "group",
        activation=norm.activation,
        norm_before_gate=norm.norm_before_gate,
        weight_offset=norm.weight_offset,
        roundings=norm.roundings,
        quant=quant.quant,
        fp8_dtype=quant.fp8_dtype,
    )
