"""What the machine is found to offer; AITER's import in all the ways in which it fails (field cases F23, F24)."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gdn_backend import environment
from gdn_backend.environment import Availability

# Pretends to be a ROCm build, probes, and prints what came of it and what changed.
PROBE = """
import json, logging, os, sys, torch, torch._dynamo.config as dynamo
torch.version.hip = "6.4"
from gdn_backend import environment
import gdn_backend.contained_import

def state():
    root, named = logging.getLogger(), logging.getLogger("theirs")
    own = getattr(logging.root.manager.loggerDict.get("aiter"), "handlers", [])
    return {
        "path": list(sys.path),
        "environment": dict(os.environ),
        "aiter": sorted(name for name in sys.modules if name.split(".")[0] in ("aiter", "stray_helper")),
        "handlers": [len(root.handlers), len(named.handlers)],
        "aiter handlers": len(own),
        "ignored": str(dynamo.ignore_logger_methods),
    }

before = state()
probe = environment.aiter_probe()
print(json.dumps({
    "quant": [probe.quant.ok, probe.quant.reason],
    "decode": [probe.decode.ok, probe.decode.reason],
    "public": environment.gdn_triton_kernels_status(),
    "changed": [key for key, value in state().items() if value != before[key]],
    "once": environment.aiter_probe() is probe,
}))
"""

# What AITER's own __init__ does before anything can fail.
MESS = """
import logging, os, sys, torch, torch._dynamo
logging.getLogger("aiter").addHandler(logging.StreamHandler())
logging.getLogger("theirs").addHandler(logging.StreamHandler())
torch._dynamo.config.ignore_logger_methods = (logging.Logger.info,)
sys.path.insert(0, os.path.join(os.path.dirname(__file__), "jit"))
os.environ["AITER_ASM_DIR"] = "/nowhere"
import stray_helper
__version__ = "0.0.stub"
"""
QUANT = "def fused_rms_gated_fp8_group_quant(*args, **kwargs): raise NotImplementedError\n"


def write_stub(folder: Path, files: dict[str, str]) -> None:
    """A package ``aiter`` of the given files; missing ``__init__.py`` files are empty."""
    defaults = {"__init__.py": MESS, "jit/stray_helper.py": "", "ops/__init__.py": "", "ops/triton/__init__.py": ""}
    for name, text in {**defaults, **files}.items():
        path = folder / "aiter" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))


def probe_in_process(folder: Path) -> dict[str, Any]:
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{PROBE}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


class TestAiterInItsOwnProcess:
    """The whole of it once with a working and once with a failing AITER, from a fresh Python."""

    def test_found(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"ops/triton/quant.py": QUANT, "ops/triton/gated_delta_net/__init__.py": ""})
        result = probe_in_process(tmp_path)
        assert result["quant"] == [True, "aiter 0.0.stub"]
        assert result["public"] == [True, "aiter 0.0.stub; aiter.ops.triton.gated_delta_net found"]
        assert result["once"]
        # It stays imported, with its own logger; the loggers and the Dynamo setting of others are theirs again.
        assert sorted(result["changed"]) == ["aiter", "aiter handlers", "environment", "path"]

    def test_import_raises(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"__init__.py": MESS + "raise RuntimeError('ROCm version file not found')"})
        result = probe_in_process(tmp_path)
        reason = "importing aiter.ops.triton.quant raised RuntimeError: ROCm version file not found"
        assert result["quant"] == result["decode"] == result["public"] == [False, reason]
        assert result["once"]
        assert result["changed"] == []


class TestAiter:
    @pytest.fixture(autouse=True)
    def as_if_rocm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        monkeypatch.setattr(environment, "is_rocm", lambda: True)
        monkeypatch.syspath_prepend(tmp_path)
        environment.aiter_probe.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "path", list(sys.path))
            yield
        environment.aiter_probe.cache_clear()
        for name in [name for name in sys.modules if name.split(".")[0] in ("aiter", "stray_helper")]:
            del sys.modules[name]
        os.environ.pop("AITER_ASM_DIR", None)
        logging.getLogger("aiter").handlers.clear()

    @pytest.mark.field_case("F24")
    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            ("raise RuntimeError('ROCm version file not found')", "RuntimeError: ROCm version file not found"),
            ("raise OSError('libamdhip64.so')", "OSError: libamdhip64.so"),
            ("raise SystemExit(1)", "SystemExit: 1"),
            ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere_to_be_found'"),
            ("raise ValueError", "raised ValueError()"),
            ("raise GeneratorExit('stop')", "GeneratorExit: stop"),
        ],
        ids=["RuntimeError", "OSError", "SystemExit", "missing dependency", "no text", "BaseException"],
    )
    def test_import_raises(self, tmp_path: Path, error: str, reason: str) -> None:
        theirs = logging.getLogger("theirs")
        path, environ, handlers = list(sys.path), dict(os.environ), [list(logging.root.handlers), list(theirs.handlers)]
        ignored = torch._dynamo.config.ignore_logger_methods
        write_stub(tmp_path, {"__init__.py": MESS + error})
        available, why = environment.gdn_triton_kernels_status()
        assert not available
        assert why.startswith("importing aiter.ops.triton.quant raised")
        assert reason in why
        assert sys.path == path
        assert dict(os.environ) == environ
        assert [list(logging.root.handlers), list(theirs.handlers)] == handlers
        assert torch._dynamo.config.ignore_logger_methods is ignored
        assert not [name for name in sys.modules if name.split(".")[0] in ("aiter", "stray_helper")]

    def test_packages_that_came_along_stay_with_their_paths(self, tmp_path: Path) -> None:
        """As setuptools does, which AITER imports: its own folder of bundled packages goes on the path."""
        (tmp_path / "bystander" / "bundled").mkdir(parents=True)
        (tmp_path / "bystander" / "__init__.py").write_text(
            "import os, sys; sys.path.append(os.path.join(os.path.dirname(__file__), 'bundled'))"
        )
        write_stub(tmp_path, {"__init__.py": MESS + "import bystander; raise RuntimeError"})
        assert not environment.are_gdn_triton_kernels_available()
        assert "bystander" in sys.modules
        assert str(tmp_path / "bystander" / "bundled") in sys.path
        assert str(tmp_path / "aiter" / "jit") not in sys.path
        del sys.modules["bystander"]

    @pytest.mark.field_case("F23")
    def test_function_is_missing(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"ops/triton/quant.py": ""})
        missing = "aiter 0.0.stub has no fused_rms_gated_fp8_group_quant in aiter.ops.triton.quant"
        assert environment.gdn_triton_kernels_status() == (False, missing)

    @pytest.mark.field_case("F23")
    def test_module_moved(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"ops/triton/quantisation.py": QUANT})
        available, reason = environment.gdn_triton_kernels_status()
        assert not available
        assert reason.startswith("aiter.ops.triton.quant is not there")

    def test_decode_kernels_are_missing(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"ops/triton/quant.py": QUANT})
        assert environment.aiter_probe().quant.ok, "the fused op can serve sites all the same"
        available, reason = environment.gdn_triton_kernels_status()
        assert not available
        assert "aiter.ops.triton.gated_delta_net is not there" in reason

    def test_keyboard_interrupt_passes(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"__init__.py": MESS + "raise KeyboardInterrupt"})
        with pytest.raises(KeyboardInterrupt):
            environment.aiter_probe()
        assert "aiter" not in sys.modules

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        assert environment.gdn_triton_kernels_status() == (False, "the aiter package is not installed")

    def test_is_never_imported_without_rocm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_stub(tmp_path, {"__init__.py": "raise SystemExit('imported')"})
        monkeypatch.setattr(environment, "is_rocm", lambda: False)
        assert not environment.are_gdn_triton_kernels_available()
        assert environment.gdn_triton_kernels_status() == (False, "not a ROCm build of torch")


class TestSubprocessProbe:
    """``doctor`` asks in a process of its own, which may hang or die."""

    @pytest.fixture(autouse=True)
    def as_if_rocm(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        # The child takes its sys.path from here; this makes it believe that it is a ROCm build.
        (tmp_path / "sitecustomize.py").write_text("import torch; torch.version.hip = '6.4'")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.setattr(environment, "is_rocm", lambda: True)

    def test_found(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"ops/triton/quant.py": QUANT, "ops/triton/gated_delta_net/__init__.py": ""})
        probe = environment.probe_aiter_in_subprocess()
        assert probe.quant == Availability(True, "aiter 0.0.stub")
        assert probe.decode.ok
        assert "aiter" not in sys.modules

    def test_dies(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"__init__.py": "import os; os._exit(9)"})
        probe = environment.probe_aiter_in_subprocess()
        assert not probe.quant.ok
        assert "ended Python with status 9" in probe.quant.reason

    def test_hangs(self, tmp_path: Path) -> None:
        write_stub(tmp_path, {"__init__.py": "import time; time.sleep(600)"})
        probe = environment.probe_aiter_in_subprocess(timeout=0.5)
        assert probe.quant == Availability(False, "importing aiter did not finish within 0.5 s")


class TestRealWheel:
    """AITER's wheel from the package index: older than the fused op, and not made for this machine."""

    pytestmark = pytest.mark.skipif(
        importlib.util.find_spec("aiter") is None, reason="amd-aiter is not installed (the aiter extra)"
    )

    @pytest.mark.field_case("F24")
    def test_import_fails_and_leaves_nothing(self, tmp_path: Path) -> None:
        if torch.version.hip is not None:
            pytest.skip("on ROCm it may import")
        result = probe_in_process(tmp_path)
        assert not result["quant"][0]
        assert "importing aiter.ops.triton.quant raised" in result["quant"][1]
        assert [key for key in result["changed"] if key != "path"] == []

    @pytest.mark.field_case("F23")
    def test_the_fused_op_is_truly_absent(self) -> None:
        code = """
            import importlib.util, pathlib, sys, types
            root = pathlib.Path(importlib.util.find_spec("aiter").origin).parent
            for name in ("aiter", "aiter.ops", "aiter.ops.triton"):
                package = types.ModuleType(name)
                package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
                sys.modules[name] = package
            import aiter.ops.triton.quant as quant
            print(hasattr(quant, "dynamic_per_token_quant_fp8_i8"), hasattr(quant, "fused_rms_gated_fp8_group_quant"))
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["True", "False"]


class TestTriton:
    def test_not_installed(self, tmp_path: Path) -> None:
        (tmp_path / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')")
        assert self._status(tmp_path) == [False, "the triton package is not installed"]

    def test_broken(self, tmp_path: Path) -> None:
        (tmp_path / "triton.py").write_text("raise OSError('libtriton.so: undefined symbol')")
        status = self._status(tmp_path)
        assert status == [False, "importing triton raised OSError: libtriton.so: undefined symbol"]

    def test_backend_works_without_it(self, tmp_path: Path) -> None:
        """On the CPU nothing needs Triton: torch without it fuses by the reference."""
        (tmp_path / "triton.py").write_text("raise ModuleNotFoundError(\"No module named 'triton'\", name='triton')")
        code = f"""
            import sys; sys.path.insert(0, {str(tmp_path)!r})
            import torch, gdn_backend
            from gdn_backend.backend import register
            register()
            def site(x, gate, weight):
                n = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
                y = (weight * n * torch.nn.functional.silu(gate)).reshape(3, 2, 128)
                s = (y.abs().amax(-1, keepdim=True) / 448.0).clamp(min=1e-12)
                return (y / s).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), s
            with torch.no_grad():
                torch.compile(site, backend="gdn_rocm")(torch.randn(6, 128), torch.randn(6, 128), torch.ones(128))
            [fused] = gdn_backend.last_report().to_dict()["sites"]
            print(fused["status"], fused["kernel"], "triton" in sys.modules)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split() == ["fused", "reference", "False"]

    @staticmethod
    def _status(folder: Path) -> list[Any]:
        code = (
            f"import sys; sys.path.insert(0, {str(folder)!r}); import json, torch;"
            "from gdn_backend.environment import triton_status as s; print(json.dumps([s().ok, s().reason]))"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        return json.loads(done.stdout)


class TestFp8Dtype:
    @pytest.mark.parametrize(
        ("architecture", "dtype"),
        [
            ("gfx940", torch.float8_e4m3fnuz),
            ("gfx942", torch.float8_e4m3fnuz),
            ("gfx950", torch.float8_e4m3fn),
            ("gfx1201", torch.float8_e4m3fn),
            ("sm90", torch.float8_e4m3fn),
            ("cpu", torch.float8_e4m3fn),
        ],
    )
    def test_follows_the_architecture(
        self, architecture: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(environment, "architecture", lambda device: architecture)
        assert environment.default_fp8_dtype() == dtype

    def test_gcn_features_are_no_part_of_the_architecture(self, monkeypatch: pytest.MonkeyPatch) -> None:
        properties = type("Properties", (), {"gcnArchName": "gfx942:sramecc+:xnack-", "major": 9, "minor": 4})
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        monkeypatch.setattr(environment, "is_rocm", lambda: True)
        assert environment.architecture(torch.device("cuda", 0)) == "gfx942"
        monkeypatch.setattr(environment, "is_rocm", lambda: False)
        assert environment.architecture(torch.device("cuda", 0)) == "sm94"
