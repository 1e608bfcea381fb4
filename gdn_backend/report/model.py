"""What a compiled graph's report holds: plain frozen data that pins no graph and pickles."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class SiteReport:
    """One gated norm in front of an FP8 quantisation. Fields that a missed site did not get to are None or empty."""

    status: Literal["fused", "missed"]
    reason: str | None  # the name of a Reason, None for a fused site
    detail: str  # what was expected and what was found; empty for a fused site
    module: str  # path of the norm's module, e.g. "model.layers.0.linear_attn.norm"
    source: str  # the user's line, "file.py:123"
    sink: str  # which form of quantisation was met
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
    device: str = ""
    kernel: str | None = None
    kernel_reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "roundings": list(self.roundings)}


@dataclass(frozen=True)
class FusionReport:
    """What the backend did to one graph, and why not more.

    ``timings_ms`` has the milliseconds of the passes "fold", "match" and "rewrite", and of all the backend's own work,
    "total". ``alert`` is the one note that matters before all others, and the first of ``notes``.
    """

    graph_id: int
    num_nodes: int
    folded_reshapes: int = 0
    timings_ms: Mapping[str, float] = field(default_factory=dict)
    sites: tuple[SiteReport, ...] = ()
    notes: tuple[str, ...] = ()
    alert: str = ""

    @property
    def num_fused(self) -> int:
        return sum(site.status == "fused" for site in self.sites)

    @property
    def num_missed(self) -> int:
        return len(self.sites) - self.num_fused

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON-ready values."""
        return {
            "graph_id": self.graph_id,
            "num_nodes": self.num_nodes,
            "folded_reshapes": self.folded_reshapes,
            "num_fused": self.num_fused,
            "num_missed": self.num_missed,
            "timings_ms": dict(self.timings_ms),
            "sites": [site.to_dict() for site in self.sites],
            "notes": list(self.notes),
            "alert": self.alert,
        }

    def fingerprint(self) -> str:
        """Equal for reports that differ in nothing but the graph's number and the time taken."""
        return json.dumps(dataclasses.replace(self, graph_id=0, timings_ms={}).to_dict(), sort_keys=True)
