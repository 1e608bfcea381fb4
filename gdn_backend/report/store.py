"""The reports of this process, the last 256 of them. Safe to use from several threads."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

from gdn_backend.report.model import FusionReport

CAPACITY = 256

_lock = threading.Lock()
_reports: deque[FusionReport] = deque(maxlen=CAPACITY)
_shown: OrderedDict[str, tuple[int, int]] = OrderedDict()  # fingerprint -> number of the graph first shown, times shown
_next_graph_id = 0


def new_graph_id() -> int:
    """A number for the next graph: 0, 1, ... through the life of the process."""
    global _next_graph_id
    with _lock:
        graph_id = _next_graph_id
        _next_graph_id += 1
        return graph_id


def add_report(report: FusionReport) -> None:
    with _lock:
        _reports.append(report)


def last_report() -> FusionReport | None:
    """The report of the graph compiled last in this process, or None."""
    with _lock:
        return _reports[-1] if _reports else None


def reports() -> list[FusionReport]:
    """The last 256 reports, oldest first."""
    with _lock:
        return list(_reports)


def clear_reports() -> None:
    """Forgets every report, and that they were shown."""
    with _lock:
        _reports.clear()
        _shown.clear()


def count_shown(report: FusionReport) -> tuple[int, int]:
    """Notes that ``report`` is being shown: the first graph whose report looked the same, and how many have since.

    ``(report.graph_id, 1)`` for a report that is new.
    """
    fingerprint = report.fingerprint()
    with _lock:
        first, times = _shown.pop(fingerprint, (report.graph_id, 0))
        _shown[fingerprint] = (first, times + 1)
        if len(_shown) > CAPACITY:
            _shown.popitem(last=False)
        return first, times + 1
