"""The string argument of the graph ops: what to compute, with which kernel, by which version of this code.

torch.compile caches compiled graphs on disk under a key made of the graph, and an op's arguments are part of the graph
while its Python body is not: a body that changed would be served as it was. So every op carries the package version and
a hash of the files that decide what it computes.
"""

from __future__ import annotations

import functools
import hashlib
import json
from pathlib import Path

import gdn_backend
from gdn_backend.ops.spec import FusedSpec

KERNELS = ("aiter", "triton", "reference")


@functools.cache
def implementation_version() -> str:
    """``"0.1.0+1f0c…"``: the package version and a hash of all source files under ``ops/`` and ``kernels/``."""
    digest = hashlib.sha256()
    package = Path(gdn_backend.__file__).parent
    for path in sorted(p for folder in ("ops", "kernels") for p in (package / folder).rglob("*.py")):
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
