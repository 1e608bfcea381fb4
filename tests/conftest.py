"""What every test starts from: the backend's name known, caches of its own, no settings or reports of other tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

# Before torch is imported: compiled code of an earlier run is not to be met again.
_CACHE = tempfile.mkdtemp(prefix="gdn-backend-tests-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _CACHE

import pytest  # noqa: E402
import torch  # noqa: E402

import gdn_backend  # noqa: E402
from gdn_backend.backend import register  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    register()  # where the package is on the path but not installed


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_CACHE, ignore_errors=True)


#: A test's property of this name is a line in the summary of the run, whichever process the test ran in.
SUMMARY_LINE = "summary line"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.getreports(outcome):
            for name, line in report.user_properties:
                if name == SUMMARY_LINE:
                    terminalreporter.write_line(f"{report.nodeid}: {line}")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="torch sees no GPU"))


@pytest.fixture(autouse=True)
def clean_slate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("GDN_")]:
        monkeypatch.delenv(name)
    torch.manual_seed(0)
    torch._dynamo.reset()
    gdn_backend.clear_reports()
    yield
    torch._dynamo.reset()
    gdn_backend.clear_reports()
