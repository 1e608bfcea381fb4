"""Settings of the backend: from ``torch.compile(mode=..., options=...)`` and ``GDN_*`` environment variables.

Own keys start with ``gdn.``; each has an environment variable (``gdn.group_sizes`` is ``GDN_GROUP_SIZES``) that holds
where the option is not given. Every other key belongs to Inductor and is checked as ``backend="inductor"`` checks it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gdn_backend.ops.dispatch import KERNELS

PREFIX = "gdn."

NUMERICS = ("exact", "fast")
REPORT_STYLES = ("off", "summary", "full")


@dataclass(frozen=True)
class Settings:
    """What one compilation was asked for. ``inductor`` is ready for ``compile_fx(config_patches=...)``."""

    enabled: bool = True
    kernel: str = "auto"
    numerics: str = "exact"
    report: str = "summary"
    group_sizes: tuple[int, ...] = (128,)
    strict: bool = False
    inductor: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Option:
    """One own key: what it takes, in words, and how a value and a variable's text become it."""

    expects: str
    check: Callable[[Any], Any]  # raises TypeError or ValueError
    parse: Callable[[str], Any]  # raises ValueError


def _check_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _parse_bool(text: str) -> bool:
    words = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in words:
        raise ValueError
    return words[text.lower()]


def _check_group_sizes(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple, set, frozenset)) or any(type(size) is not int for size in value):
        raise TypeError
    if not value or any(size <= 0 for size in value):
        raise ValueError
    return tuple(sorted(set(value)))


def _parse_group_sizes(text: str) -> tuple[int, ...]:
    return _check_group_sizes([int(part) for part in text.split(",") if part.strip()])


def _choice(*names: str) -> _Option:
    def check(value: Any) -> str:
        if not isinstance(value, str):
            raise TypeError
        if value not in names:
            raise ValueError
        return value

    return _Option(f"one of {', '.join(names)}", check, lambda text: check(text.lower()))


_BOOL = _Option("True or False", _check_bool, _parse_bool)
_OPTIONS: Mapping[str, _Option] = {
    "enabled": _BOOL,
    "kernel": _choice("auto", *KERNELS),
    "numerics": _choice(*NUMERICS),
    "report": _choice(*REPORT_STYLES),
    "group_sizes": _Option("a list of positive ints, such as [128]", _check_group_sizes, _parse_group_sizes),
    "strict": _BOOL,
}


def resolve_settings(
    mode: str | None = None, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> Settings:
    """The settings for one call of the backend; an option wins over its environment variable.

    Raises ValueError for an unknown ``gdn.`` key (it lists the valid ones) and for a value out of range, TypeError for
    one of the wrong type, and what ``torch.compile(backend="inductor")`` raises for Inductor's keys and modes.
    """
    if mode and options:
        raise RuntimeError("either mode or options can be given, not both; own settings also read GDN_* variables")
    own, rest = _split(options or {})
    values = {name: _from_option(name, value) for name, value in own.items()}
    for name in _OPTIONS.keys() - own.keys():
        value = _from_environment(name, environ)
        if value is not None:
            values[name] = value
    return Settings(**values, inductor=_inductor_config(mode, rest))


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """``GDN_*`` variables that no option reads: most likely misspelt."""
    known = {variable_name(name) for name in _OPTIONS}
    return sorted(name for name in environ if name.startswith("GDN_") and name not in known)


def variable_name(name: str) -> str:
    """``"group_sizes"`` -> ``"GDN_GROUP_SIZES"``."""
    return f"GDN_{name.upper()}"


def describe(settings: Settings) -> dict[str, Any]:
    """The own settings by their option keys, as JSON-ready values."""
    values = {name: getattr(settings, name) for name in _OPTIONS}
    return {PREFIX + name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def _split(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Own options by bare name, and the rest; a dash in an own key reads as an underscore, as it does for Inductor."""
    own = {key.removeprefix(PREFIX).replace("-", "_"): value for key, value in options.items() if _is_own(key)}
    unknown = [PREFIX + name for name in own if name not in _OPTIONS]
    if unknown:
        valid = ", ".join(PREFIX + name for name in _OPTIONS)
        raise ValueError(f"unknown option {', '.join(map(repr, unknown))}; valid options are {valid}")
    return own, {key: value for key, value in options.items() if not _is_own(key)}


def _is_own(key: str) -> bool:
    return key.startswith(PREFIX)


def _from_option(name: str, value: Any) -> Any:
    option = _OPTIONS[name]
    message = f"option {PREFIX + name!r} must be {option.expects}, got {value!r}"
    try:
        return option.check(value)
    except TypeError:
        raise TypeError(f"{message} of type {type(value).__name__}") from None
    except ValueError:
        raise ValueError(message) from None


def _from_environment(name: str, environ: Mapping[str, str]) -> Any:
    """The value of the option's variable; None where it is unset or empty."""
    option = _OPTIONS[name]
    text = environ.get(variable_name(name), "").strip()
    if not text:
        return None
    try:
        return option.parse(text)
    except ValueError:
        raise ValueError(f"environment variable {variable_name(name)} must be {option.expects}, got {text!r}") from None


def _inductor_config(mode: str | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's config changes for ``mode`` or ``options``; torch's own wrapper expands and checks them.

    It is private to torch, but the only place that checks names and types, and using it keeps the errors those of
    ``backend="inductor"``. Inductor is not imported where there is nothing to check.
    """
    if not mode and not options:
        return {}
    import torch

    return dict(torch._TorchCompileInductorWrapper(mode, dict(options), None).config)
