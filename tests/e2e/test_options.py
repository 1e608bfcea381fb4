"""Settings: own keys, Inductor's keys, modes, environment variables, and what is said of a wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gdn_backend.options import Settings, describe, resolve_settings, unknown_variables
from tests.qwen_site import make_inputs, make_site


def test_defaults() -> None:
    assert resolve_settings(environ={}) == Settings(
        enabled=True, kernel="auto", numerics="exact", report="summary", group_sizes=(128,), strict=False, inductor={}
    )


@pytest.mark.parametrize(
    ("key", "value", "variable", "text", "expected"),
    [
        ("enabled", False, "GDN_ENABLED", "0", False),
        ("kernel", "reference", "GDN_KERNEL", "reference", "reference"),
        ("numerics", "fast", "GDN_NUMERICS", "FAST", "fast"),
        ("report", "full", "GDN_REPORT", "full", "full"),
        ("group_sizes", [128, 64], "GDN_GROUP_SIZES", "128, 64", (64, 128)),
        ("strict", True, "GDN_STRICT", "true", True),
    ],
)
def test_each_setting_by_option_and_by_variable(key: str, value: Any, variable: str, text: str, expected: Any) -> None:
    assert getattr(resolve_settings(options={f"gdn.{key}": value}, environ={}), key) == expected
    assert getattr(resolve_settings(environ={variable: text}), key) == expected


def test_an_option_wins_over_its_variable() -> None:
    settings = resolve_settings(options={"gdn.report": "full"}, environ={"GDN_REPORT": "off", "GDN_STRICT": "1"})
    assert (settings.report, settings.strict) == ("full", True)


def test_an_empty_variable_is_an_unset_one() -> None:
    assert resolve_settings(environ={"GDN_KERNEL": " "}) == Settings()


def test_an_unknown_own_key_lists_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"'gdn\.kernal'.*gdn\.enabled.*gdn\.kernel.*gdn\.strict"):
        resolve_settings(options={"gdn.kernal": "triton"}, environ={})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"gdn.enabled": 1}, TypeError, r"'gdn\.enabled' must be True or False, got 1 of type int"),
        (
            {"gdn.kernel": "cuda"},
            ValueError,
            r"'gdn\.kernel' must be one of auto, aiter, triton, reference, got 'cuda'",
        ),
        ({"gdn.report": None}, TypeError, r"'gdn\.report' must be one of off, summary, full"),
        ({"gdn.group_sizes": 128}, TypeError, r"'gdn\.group_sizes' must be a list of positive ints"),
        ({"gdn.group_sizes": [True]}, TypeError, r"'gdn\.group_sizes' must be a list of positive ints"),
        ({"gdn.group_sizes": [0]}, ValueError, r"'gdn\.group_sizes' must be a list of positive ints"),
        ({"gdn.group_sizes": []}, ValueError, r"'gdn\.group_sizes' must be a list of positive ints"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_expected(options: dict[str, Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        resolve_settings(options=options, environ={})


@pytest.mark.parametrize(
    ("variable", "text"),
    [("GDN_ENABLED", "maybe"), ("GDN_KERNEL", "cuda"), ("GDN_GROUP_SIZES", "128;64"), ("GDN_GROUP_SIZES", ",")],
)
def test_a_wrong_variable_is_named(variable: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"environment variable {variable} must be"):
        resolve_settings(environ={variable: text})


def test_variables_that_nothing_reads() -> None:
    assert unknown_variables({"GDN_KERNAL": "triton", "GDN_KERNEL": "triton", "HOME": "/"}) == ["GDN_KERNAL"]


def test_settings_for_people() -> None:
    assert describe(Settings())["gdn.group_sizes"] == [128]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_a_mode_is_what_inductor_makes_of_it(mode: str) -> None:
    assert resolve_settings(mode, environ={}).inductor == torch._inductor.list_mode_options(mode)


def test_options_are_split() -> None:
    options = {"gdn.report": "off", "epilogue_fusion": True, "triton.cudagraphs": False, "max-autotune": True}
    settings = resolve_settings(options=options, environ={})
    assert settings.report == "off"
    assert settings.inductor == {"epilogue_fusion": True, "triton.cudagraphs": False, "max_autotune": True}


@pytest.mark.parametrize(
    ("mode", "options"), [("fastest", None), (None, {"max_autotone": True}), (None, {"max_autotune": 1})]
)
def test_inductors_own_errors(mode: str | None, options: dict[str, Any] | None) -> None:
    """A wrong mode, key or type raises what ``backend="inductor"`` raises."""
    with pytest.raises(RuntimeError) as expected:
        torch.compile(lambda x: x, backend="inductor", mode=mode, options=options)
    with pytest.raises(RuntimeError) as raised:
        resolve_settings(mode, options, environ={})
    assert str(raised.value) == str(expected.value)


def test_mode_and_options_together_are_refused() -> None:
    with pytest.raises(RuntimeError, match="not both"):
        resolve_settings("reduce-overhead", {"gdn.report": "off"}, environ={})


@pytest.mark.field_case("F16")
@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"gdn.kernal": "triton"}, ValueError),
        ({"gdn.strict": "yes"}, TypeError),
        ({"max_autotone": True}, RuntimeError),
    ],
)
def test_torch_compile_raises_with_the_cause(options: dict[str, Any], cause: type[Exception]) -> None:
    compiled = torch.compile(make_site(), backend="gdn_rocm", options=options)
    with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
        compiled(*make_inputs())
    assert type(raised.value.inner_exception) is cause
    assert next(iter(options)) in str(raised.value)
