"""``python -m gdn_backend``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gdn_backend import cli, doctor
from gdn_backend.cli import main

MODEL = """
import torch
from tests.qwen_site import make_inputs, make_site

def as_tuple():
    return make_site(), make_inputs()

def as_dict():
    x, gate = make_inputs()
    return make_site(64), {"x": x, "gate": gate}

def nothing():
    return None
"""


@pytest.fixture
def model_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_model.py"
    path.write_text(MODEL)
    return path


def test_explain_prints_reports(model_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", f"{model_file}:as_tuple"]) == 0
    out, err = capsys.readouterr()
    assert "✓ norm" in out
    assert err == ""


@pytest.mark.parametrize(
    ("name", "arguments", "reason"), [("as_dict", [], "GROUP_SIZE"), ("as_tuple", ["--grad"], "REQUIRES_GRAD")]
)
def test_explain_prints_json(
    model_file: Path, capsys: pytest.CaptureFixture[str], name: str, arguments: list[str], reason: str
) -> None:
    assert main(["explain", f"{model_file}:{name}", "--json", *arguments]) == 0
    (report,) = json.loads(capsys.readouterr().out)
    assert [site["reason"] for site in report["sites"]] == [reason]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("my_model", "expected FILE.py:FUNCTION"),
        ("{file}:absent", "has no function 'absent'"),
        ("{file}:nothing", "must return"),
        ("{file}x.py:as_tuple", "no file"),
        ("no.such.module:f", "no module 'no'"),
    ],
)
def test_explain_says_what_is_wrong(
    model_file: Path, capsys: pytest.CaptureFixture[str], target: str, message: str
) -> None:
    assert main(["explain", target.format(file=model_file)]) == 2
    assert message in capsys.readouterr().err


def test_doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_REPORT", "full")
    monkeypatch.setenv("GDN_KERNAL", "triton")
    assert main(["doctor", "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)
    assert findings["options"]["gdn.report"] == "full"
    assert findings["unknown_variables"] == ["GDN_KERNAL"]
    assert findings["kernel"]["auto"] in ("aiter", "triton", "reference")
    assert isinstance(findings["aiter"]["usable"], bool)
    doctor.print_findings(findings)
    out = capsys.readouterr().out
    assert "GDN_KERNAL" in out
    assert findings["kernel"]["auto"] in out


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        ("import time; time.sleep(60)", "did not end within 2 s"),
        ("raise SystemExit('no compiler')", "status 1: no compiler"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "status -9: it printed nothing"),
    ],
)
def test_doctor_survives_the_probe(monkeypatch: pytest.MonkeyPatch, probe: str, message: str) -> None:
    """AITER's import may hang, end the process, or crash it."""
    monkeypatch.setattr(doctor, "_PROBE", probe)
    findings = doctor.examine(timeout=2)
    assert findings["aiter"]["usable"] is False
    assert message in findings["aiter"]["reason"]


def test_doctor_shows_a_wrong_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GDN_KERNEL", "cuda")
    monkeypatch.setattr(doctor, "_PROBE", "raise SystemExit")
    assert "GDN_KERNEL must be one of" in doctor.examine(timeout=30)["options"]["options"]


def test_demo_needs_transformers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    assert "gdn-backend[hf]" in capsys.readouterr().err


def test_bench_needs_a_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "gdn_backend" / "__init__.py"
    monkeypatch.setattr(cli.gdn_backend, "__file__", str(package))
    assert main(["bench"]) == 2
    assert "from a checkout" in capsys.readouterr().err
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "bench_kernel.py").write_text("import sys; print(sys.argv[1:])")
    assert main(["bench", "--tokens", "1"]) == 0
    assert capsys.readouterr().out == "['--tokens', '1']\n"


def test_unknown_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--tokens", "1"])
    assert "unrecognized arguments: --tokens 1" in capsys.readouterr().err
