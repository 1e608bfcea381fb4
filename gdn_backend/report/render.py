"""Reports for people: one block per compiled graph, on stderr.

Showing a report never raises, and of the processes of a distributed job only the first shows any.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TextIO

import torch
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gdn_backend.report import store
from gdn_backend.report.model import FusionReport, SiteReport

MAX_WIDTH = 120  # also where stderr is a file, for which rich assumes 80

_ASCII = str.maketrans({"✓": "+", "✗": "x", "×": "x", "·": "-", "…": "..."})
_logger = logging.getLogger(__name__)


def show(report: FusionReport, style: str) -> None:
    """Prints ``report`` to stderr as ``gdn.report`` asks: "off", "summary" or "full".

    A report that was shown before takes one line.
    """
    if style == "off" or not _is_first_process():
        return
    try:
        first, times = store.count_shown(report)
        if times > 1:
            line = f"gdn_rocm · graph {report.graph_id} · same as graph {first} (×{times})"
            _print(Text(line, style="dim"), sys.stderr)
        else:
            _print(_block(report, full=style == "full"), sys.stderr)
    except Exception:  # a broken pipe or a strange terminal must not cost the compilation
        _logger.debug("the report could not be shown", exc_info=True)


def print_reports(reports: Iterable[FusionReport], *, full: bool = True) -> None:
    """Prints ``reports`` to stdout, equal ones once and with their number."""
    alike: dict[str, list[FusionReport]] = {}
    for report in reports:
        alike.setdefault(report.fingerprint(), []).append(report)
    for group in alike.values():
        _print(_block(group[0], full=full, times=len(group)), sys.stdout)


def render(report: FusionReport, *, full: bool) -> Group:
    """The contents of one graph's block. In a summary, sites that differ only in where they are share one entry."""
    parts: list[RenderableType] = [Text(report.alert, style="bold yellow")] if report.alert else []
    parts += [Text(line, style="bold") for line in _headlines(report, full=full)]
    for site, count in _entries(report.sites, merge=not full):
        parts += [Text(), _site_title(site, count), _table(_site_rows(site))]
    notes = [note for note in report.notes if note != report.alert]
    if notes:
        parts += [Text(), _table(("note", note) for note in notes)]
    return Group(*parts)


def _block(report: FusionReport, *, full: bool, times: int = 1) -> Panel:
    title = f"gdn_rocm · graph {report.graph_id}" + (f" (×{times})" if times > 1 else "")
    return Panel(render(report, full=full), title=title, title_align="left")


def _headlines(report: FusionReport, *, full: bool) -> Iterator[str]:
    counts = [f"{report.num_fused} fused", f"{report.num_missed} missed"]
    if not report.sites and not report.alert:
        counts = ["0 sites: no FP8 quantisation behind a gated norm was found"]
    counts += [f"{_plural(report.folded_reshapes, 'reshape')} folded", _plural(report.num_nodes, "node")]
    timings = [f"{name} {milliseconds:.1f} ms" for name, milliseconds in report.timings_ms.items()]
    if full:
        yield " · ".join(counts)
        yield " · ".join(timings)
    else:
        yield " · ".join([*counts, *(timing.removeprefix("total ") for timing in timings if "total" in timing)])


def _entries(sites: Sequence[SiteReport], *, merge: bool) -> Iterator[tuple[SiteReport, int]]:
    """Sites with the number of those like them; a detail names nodes, so it is not compared."""
    alike: dict[object, list[SiteReport]] = {}
    for index, site in enumerate(sites):
        alike.setdefault(replace(site, module="", detail="") if merge else index, []).append(site)
    yield from ((group[0], len(group)) for group in alike.values())


def _site_title(site: SiteReport, count: int) -> Text:
    mark, style = ("✓", "green") if site.status == "fused" else ("✗", "red")
    where = " · ".join(part for part in (site.module, site.source) if part) or "unknown place"
    reason = (f" · {site.reason}", "red") if site.reason else ""
    more = f" and {count - 1} more like it" if count > 1 else ""
    return Text.assemble((f"{mark} ", style), (where, "bold"), reason, more)


def _site_rows(site: SiteReport) -> Iterator[tuple[str, str]]:
    if site.detail:
        yield "why", site.detail
    if site.head_dim is not None:
        yield "norm", _norm_text(site)
    if site.roundings:
        yield "rounded", _roundings_text(site.roundings)
    if site.sink:
        yield "quant", _quant_text(site)
    if site.kernel or site.kernel_reason:
        reason = f"({site.kernel_reason})" if site.kernel and site.kernel_reason else site.kernel_reason
        yield "kernel", " ".join(part for part in (site.kernel, reason) if part)


def _norm_text(site: SiteReport) -> str:
    size = f"{site.num_heads} × {site.head_dim}" if site.num_heads else f"… × {site.head_dim}"
    eps = "eps symbolic" if site.eps_symbolic else f"eps {site.eps:g}" if site.eps is not None else ""
    gate = f"{site.activation} gate" if site.activation else "gate"
    order = "" if site.norm_before_gate is None else f"before {gate}" if site.norm_before_gate else f"after {gate}"
    return ", ".join(part for part in (size, eps, order) if part)


def _roundings_text(roundings: Sequence[str]) -> str:
    points: dict[str, list[str]] = {}
    for entry in roundings:
        point, _, dtype = entry.partition(":")
        points.setdefault(dtype, []).append(point)
    return "; ".join(f"{', '.join(names)} to {dtype}" for dtype, names in points.items())


def _quant_text(site: SiteReport) -> str:
    groups = "one scale per token" if site.granularity == "token" else f"groups of {site.group_size}"
    parts = [site.sink, groups if site.group_size else site.granularity or ""]
    parts += [f"{site.scale_format} scales" if site.scale_format else "", site.fp8_dtype or ""]
    return ", ".join(part for part in parts if part)


def _table(rows: Iterable[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 1))
    table.add_column(style="cyan", min_width=9, no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in rows:
        table.add_row(f"  {label}", Text(text))
    return table


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _print(content: RenderableType, stream: TextIO) -> None:
    """Writes in one go, so that threads do not mix their blocks, and in ASCII where the stream takes nothing else."""
    console = Console(file=stream, highlight=False)
    console.width = min(console.width, MAX_WIDTH) if stream.isatty() else MAX_WIDTH
    with console.capture() as capture:
        console.print(content)
    text = capture.get()
    if not console.encoding.lower().startswith("utf"):
        text = text.translate(_ASCII).encode(console.encoding, "replace").decode(console.encoding)
    stream.write(text)
    stream.flush()


def _is_first_process() -> bool:
    """True but in the later processes of a distributed job, also before its process group is made."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"
