"""The string argument of the graph ops: what to compute, with which kernel, by which version of this code.

torch.compile caches compiled graphs on disk under a key made of the graph. An op's arguments are part of the graph, its
Python body is not: a body that changed would be served as it was. So every op carries the package version and a hash of
the files that decide what it computes.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from pathlib import Path

import torch

import gdn_backend
from gdn_backend.ops.spec import FP8_DTYPES, FusedSpec, QuantSpec, dtype_name

#: Kernels by name, in order of preference.
KERNELS = ("aiter", "triton", "reference")

#: ``group_size`` of ``gdn_backend::fp8_quant`` for one scale a token.
PER_TOKEN = -1


@functools.cache
def implementation_version() -> str:
    """``"0.1.0+1f0c…"``: the package version and a hash of all source files under ``ops/`` and ``kernels/``."""
    digest = hashlib.sha256()
    package = Path(gdn_backend.__file__).parent
    for path in sorted(path for folder in ("ops", "kernels") for path in (package / folder).rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return f"{gdn_backend.__version__}+{digest.hexdigest()[:16]}"


def encode_call(spec: FusedSpec, kernel: str) -> str:
    """The ``call`` argument of ``gdn_backend::gated_rmsnorm_fp8_quant``: equal calls give equal strings."""
    if kernel not in KERNELS:
        raise ValueError(f"kernel={kernel!r}: expected one of {', '.join(KERNELS)}")
    return json.dumps({"spec": spec.encode(), "kernel": kernel, "version": implementation_version()})


@functools.cache
def decode_call(call: str) -> tuple[FusedSpec, str]:
    """The spec and the kernel that :func:`encode_call` wrote."""
    fields = json.loads(call)
    return FusedSpec.decode(fields["spec"]), fields["kernel"]


def encode_quant(quant: QuantSpec, fp8_dtype: torch.dtype) -> str:
    """The ``spec`` argument of ``gdn_backend::fp8_quant``; the default formula is written out."""
    if dtype_name(fp8_dtype) not in FP8_DTYPES:
        raise ValueError(f"fp8_dtype={fp8_dtype}: expected one of {', '.join(FP8_DTYPES)}")
    fields = dataclasses.asdict(quant.resolve(fp8_dtype))
    return json.dumps({"quant": fields, "fp8_dtype": dtype_name(fp8_dtype), "version": implementation_version()})


@functools.cache
def decode_quant(spec: str) -> tuple[QuantSpec, torch.dtype]:
    """The formula and the FP8 dtype that :func:`encode_quant` wrote."""
    fields = json.loads(spec)
    return QuantSpec.from_fields(fields["quant"]), FP8_DTYPES[fields["fp8_dtype"]]
