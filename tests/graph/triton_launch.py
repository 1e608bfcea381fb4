"""A graph that launches ``act_quant_kernel``, made where Triton has no driver and Dynamo therefore traces no launch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.graph import quant_ops
from tests.graph.harness import Passes, capture, find_node
from tests.graph.quant_ops import call_group_writer
from tests.graph.sites import UNQUANTISED, make_inputs, site

ACT_QUANT_SOURCES = {
    "no floor": ("tl.max(tl.abs(x)) / 448.0", "x / s", quant_ops.act_quant),
    "a floor in the divisor": ("tl.max(tl.abs(x)) / 448.0", "(x / tl.maximum(s, 1e-12))", quant_ops.hub_act_quant),
}


class FakeKernel:
    """What the matcher sees of a Triton kernel: its name and its source."""

    __name__ = "act_quant_kernel"

    def __init__(self, scale: str, codes: str) -> None:
        self.src = (
            "def act_quant_kernel(x_ptr, y_ptr, s_ptr, BLOCK_SIZE: tl.constexpr):\n"
            "    x = tl.load(x_ptr + offs).to(tl.float32)\n"
            f"    s = {scale}  # the scale\n"
            f"    y = {codes}\n"
            "    y = y.to(y_ptr.dtype.element_ty)\n"
        )


def insert_launch(before: torch.fx.Node, kernel: Any, operands: dict[str, Any]) -> None:
    """Puts a launch of ``kernel`` into the graph, in front of ``before``."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table, triton_kernel_wrapper_mutation

    kernel_side_table.reset_table()
    with before.graph.inserting_before(before):
        before.graph.call_function(
            triton_kernel_wrapper_mutation,
            kwargs={
                "kernel_idx": kernel_side_table.add_kernel(kernel),
                "constant_args_idx": kernel_side_table.add_constant_args({"BLOCK_SIZE": 128}),
                "grid": [(12, 1, 1)],
                "tma_descriptor_metadata": {},
                "kwargs": operands,
            },
        )


def _launch_in_place_of_the_op(graph: torch.fx.Graph, kernel: FakeKernel) -> None:
    """Dynamo traces a launch only where Triton has a driver, so the launch is put where another op wrote."""
    operation = find_node(graph, "_C::per_token_group_fp8_quant")
    x, codes, scales = operation.args[:3]
    insert_launch(operation, kernel, {"x_ptr": x, "y_ptr": codes, "s_ptr": scales})
    graph.erase_node(operation)


def run_launch(scale: str, codes: str) -> tuple[Passes, Callable[[], Any], torch.Tensor]:
    """Fuses a graph with a launch of the kernel that has these formulas: the passes, the fused graph, eager's rows."""
    model = site(UNQUANTISED, result=lambda c: call_group_writer(c.rows))
    rows_model = site(UNQUANTISED, result=lambda c: c.rows)
    rows_model.weight = model.weight
    inputs = make_inputs()
    with torch.no_grad():
        gm = capture(model, *inputs)
        _launch_in_place_of_the_op(gm.graph, FakeKernel(scale, codes))
        passes = Passes()
        fused = passes.backend(gm, inputs)
        placeholders = {"L_x_": inputs[0], "L_z_": inputs[1]}
        arguments = [placeholders.get(str(node.target), model.weight) for node in gm.graph.find_nodes(op="placeholder")]
        return passes, lambda: fused(*arguments), rows_model(*inputs)
