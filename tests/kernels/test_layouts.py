"""How the kernel is told to read x and gate in place; no GPU needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

pytest.importorskip("triton")

from gdn_backend.kernels.configs import NVIDIA
from gdn_backend.kernels.gated_rmsnorm_quant import plan
from gdn_backend.ops.outputs import allocate_outputs
from gdn_backend.ops.spec import FusedSpec

SPEC = FusedSpec(hidden_size=4096, head_dim=128, norm_size=128, group_size=128)


def planned(x: torch.Tensor, gate: torch.Tensor) -> dict[str, Any]:
    """What the launch is told; the same tensor where nothing had to be copied."""
    arguments = plan(x, gate, None, None, 1e-6, SPEC, *allocate_outputs(x, SPEC), NVIDIA)[1]
    assert arguments["x_ptr"] is x and arguments["gate_ptr"] is gate
    return arguments


def test_the_gate_of_a_projection_is_read_in_place() -> None:
    x = torch.empty(7, 16, 256, dtype=torch.bfloat16, device="meta")
    gate = torch.empty(7, 16, 768, dtype=torch.bfloat16, device="meta")[..., 512:]
    arguments = planned(x, gate)
    assert (arguments["X_RUN"], arguments["X_LEVELS"]) == (4096, 0)
    assert (arguments["GATE_RUN"], arguments["GATE_LEVELS"]) == (256, 1)
    assert (arguments["gate_run_stride"], arguments["gate_token_stride"]) == (768, 16 * 768)


def test_rows_of_symbolic_sizes_are_read_in_place() -> None:
    """As under dynamic=True, where each size is its own symbol until something needs to know it."""
    seen: dict[str, Any] = {}

    def site(x: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        seen.update(planned(x, projected[..., 512:]))
        return x

    shapes = (7, 16, 256), (7, 16, 768)
    make_fx(site, tracing_mode="symbolic")(*(torch.empty(shape, dtype=torch.bfloat16) for shape in shapes))
    assert (seen["X_RUN"], seen["X_LEVELS"]) == (4096, 0)
    assert (seen["GATE_RUN"], seen["GATE_LEVELS"]) == (256, 1)
    assert all(type(seen[name]) is int for name in ("X_RUN", "GATE_RUN"))
    assert (int(seen["gate_run_stride"]), int(seen["gate_token_stride"])) == (768, 16 * 768)
