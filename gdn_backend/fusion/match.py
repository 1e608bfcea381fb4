"""The vocabulary of matching: what a rule found, and why it did not.

A failed match is a value, not an exception and not ``None``: :class:`Miss` names the stage, the reason, the node, what
was expected there and what was found. ``None`` from a rule means "this node is not an anchor", nothing else.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from torch.fx import Node

from gdn_backend.ops.spec import Activation, FusedSpec, QuantSpec


class Reason(enum.Enum):
    """Why a gated norm in front of an FP8 quantisation was not fused. The value says it in general terms."""

    GROUP_SIZE = "the quantisation group size is not enabled"
    GROUP_SHAPE = "the groups are 2-D blocks or do not run along the last axis"
    PER_TENSOR = "one scale for the whole tensor needs every token before the first code"
    STATIC_SCALE = "the scale is an input, not computed from the data"
    FAKE_QUANT = "the codes are turned back into a wide dtype: a simulated quantisation"
    NORM_ORDER = "norm, weight and gate are combined in an order that the fused op cannot express"
    NORM_AXIS = "the norm does not run along the last axis"
    WEIGHT_SHAPE = "the weight does not repeat along the row"
    EPS = "eps is not a number"
    ACTIVATION = "the gate's activation is neither silu nor sigmoid"
    ROUNDING = "a rounding that the fused op cannot repeat"
    SCALE_FORMULA = "the scale is computed in a way that the fused op cannot repeat"
    FP8_FORMAT = "FP8 dtype, maximum and clamp do not fit together"
    DTYPE = "a dtype that the fused op does not take"
    LAYOUT = "the values are not in row-major order between norm and quantisation"
    SHARED_INTERMEDIATE = "a value inside the site is used elsewhere"
    MUTATION = "a tensor is written between its first read and the quantisation"
    REQUIRES_GRAD = "the result would need a gradient"
    AUTOCAST = "the site is inside an autocast region"
    SUBCLASS = "an input is a tensor subclass"
    OPAQUE_NORM = "the norm is an opaque call"
    KERNEL = "no kernel takes this site"
    DISABLED = "fusion is turned off"


@dataclass(frozen=True)
class Miss:
    """Why a site is not fused. Text is formatted only when somebody reads it."""

    stage: str  # "quant", "norm", "layout", "safety", "kernel", ...
    reason: Reason
    node: Node | None
    expected: str
    actual: str
    advice: str = ""  # what the user can change
    facts: SiteFacts | None = None  # what was known of the site by then; every miss that a search returns has them

    def render(self, source: str = "") -> str:
        """One line: ``expected 128, got 64 at view_3 (model.py:88)`` and the advice; ``source`` is the node's line."""
        where = f" at {self.node.name}" if self.node is not None else ""
        where += f" ({source})" if source else ""
        advice = f"; {self.advice}" if self.advice else ""
        return f"expected {self.expected}, got {self.actual}{where}{advice}"


@dataclass(frozen=True)
class Quantisation:
    """A dynamic FP8 quantisation, as a sink found it."""

    sink: str  # which form was met, e.g. "decomposed", "gdn_backend::fp8_quant"
    data: Node  # the value that is quantised, before any exact cast or reshape of the quantisation's own
    codes: Node
    scales: Node | None  # the stored scale: the one that is used outside, or else the divisor; None: nobody has it
    group_size: int
    quant: QuantSpec
    fp8_dtype: str
    path: tuple[Node, ...] = ()  # the data's way to the groups; their shapes show the width of a row
    interior: frozenset[Node] = field(repr=False, default_factory=frozenset)  # lost with the site
    dependents: frozenset[Node] = field(repr=False, default_factory=frozenset)  # follow from the scales: may stay
    writer: Node | None = None  # the op that fills codes and scales, where those are tensors made before it

    @property
    def sources(self) -> tuple[Node, ...]:
        """The nodes from which on codes and scales have their values."""
        return self.results if self.writer is None else (self.writer,)

    @property
    def results(self) -> tuple[Node, ...]:
        """Codes and scales: the nodes whose values the fused op gives."""
        return (self.codes,) if self.scales is None else (self.codes, self.scales)


@dataclass(frozen=True)
class Candidate:
    """An anchor if one of ``data`` reaches a gated norm: what the sink made of it, and where the data may come from."""

    anchor: Node
    sink: str
    data: tuple[Node, ...]
    quant: Quantisation | Miss


@dataclass(frozen=True)
class GatedNorm:
    """A gated RMSNorm: its inputs, its parameters and the nodes between."""

    x: Node
    gate: Node
    weight: Node | None
    bias: Node | None
    eps: float | Node
    output: Node  # the last arithmetic of the norm
    norm_size: int
    activation: Activation
    norm_before_gate: bool
    weight_offset: float
    roundings: tuple[str, ...]
    path: tuple[Node, ...] = ()  # from the quantised value to ``output``
    interior: frozenset[Node] = field(repr=False, default_factory=frozenset)
    problem: Miss | None = None  # a gated norm for sure, but one that the fused op cannot express


@dataclass(frozen=True)
class Match:
    """A site that can be fused: the op's operands and spec, and the nodes it takes the place of."""

    norm: GatedNorm
    quant: Quantisation
    spec: FusedSpec
    facts: SiteFacts
    replaced: tuple[
        Node, ...
    ]  # all nodes of the site in program order: its interior, what follows from it, its results
    codes_names: tuple[Node, ...]  # the codes, and the nodes whose tensor they overwrote in place
    scales_names: tuple[Node, ...]  # the same of the scales; empty where nobody has any


@dataclass(frozen=True)
class SiteFacts:
    """What the report says of a site, fused or not; unknown fields stay None."""

    sink: str
    anchor: Node
    norm: Node  # the last arithmetic of the norm: its metadata name the module
    num_heads: int | None = None
    head_dim: int | None = None
    group_size: int | None = None
    granularity: str | None = None
    eps: float | None = None
    eps_symbolic: bool = False
    activation: str | None = None
    norm_before_gate: bool | None = None
    roundings: tuple[str, ...] = ()
    scale_format: str | None = None
    fp8_dtype: str | None = None
