"""Whether a matched site may be replaced: one small check a question, each answering with a Miss or None.

They come after the structure is known and before a kernel is chosen, cheapest first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node

from gdn_backend.fusion.match import GatedNorm, Miss, Quantisation, Reason
from gdn_backend.graph.canonical import GraphView, overwritten_operand, reads_only_shape, spelled_name
from gdn_backend.graph.effects import Effects, written_operands
from gdn_backend.graph.shapes import is_contiguous, is_transformed, same_size, shape_of, static_int, tensor_of
from gdn_backend.ops.spec import DIVISION_STEPS, FP8_DTYPES, dtype_name

_OPERAND_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_ROLES = ("x", "gate", "weight", "bias")


class SiteChecker:
    """The checks of one graph; what they need of it is gathered once."""

    def __init__(self, view: GraphView) -> None:
        self._view = view
        self._effects = Effects(view)
        self._autocast = _autocast_regions(view)
        self._grad_modes = _GradModes(view)

    def check(self, norm: GatedNorm, quant: Quantisation) -> Miss | None:
        """The first reason why this site must stay as it is, or None."""
        return (
            check_grad(quant)
            or check_fp8_format(quant)
            or check_fake_quantisation(self._view, quant)
            or self.check_users(norm, quant)
            or check_operands(norm)
            or check_codes_layout(quant)
            or self.check_writes(norm, quant)
            or self.check_own_writes(norm, quant)
            or self.check_autocast(norm, quant)
            or self.check_grad_mode(norm, quant)
        )

    def check_users(self, norm: GatedNorm, quant: Quantisation) -> Miss | None:
        """Every value inside the site is read inside it, the exact casts and reshapes of operands aside.

        A cast or reshape of x, gate or weight that others read too simply stays: the fused op does not need it.
        """
        inside = norm.interior | quant.interior
        known = inside | quant.dependents | set(quant.results)
        for node in sorted(inside, key=self._view.position.__getitem__):
            if self._is_operand_preparation(node, norm):
                continue
            for user in self._view.readers(node):
                if user in known or self._needs_no_data(user, node):
                    continue
                actual = "the graph's output" if user.op == "output" else f"{user.name}"
                advice = "let its other reader use codes and scales, or compute the value for that reader once more"
                return Miss("safety", Reason.SHARED_INTERMEDIATE, node, "readers inside the site only", actual, advice)
        return None

    def _needs_no_data(self, user: Node, value: Node) -> bool:
        """True where only sizes are read, be it of the value or of a reshape of it (``y.reshape(B, S, -1).size()``)."""
        if reads_only_shape(user, value):
            return True
        readers = self._view.readers(user)
        return self._view.op(user).name == "reshape" and all(self._needs_no_data(reader, user) for reader in readers)

    def _is_operand_preparation(self, node: Node, norm: GatedNorm) -> bool:
        while node not in (norm.x, norm.gate, norm.weight, norm.bias):
            op = self._view.op(node)
            adds_number = op.name == "add" and isinstance(op.get("other"), int | float)
            passes = op.name in ("reshape", "identity", "cast") or adds_number
            if not passes or overwritten_operand(node) is not None:
                return False
            node = op.input
        return True

    def check_writes(self, norm: GatedNorm, quant: Quantisation) -> Miss | None:
        """Nobody writes to an operand, or to a value inside, between its read and the place of the fused op."""
        position = self._view.position
        members = norm.interior | quant.interior | quant.dependents | set(quant.results)
        place = min(position[node] for node in quant.sources)
        operands = set(_operands(norm))
        reads_of = self._reads_by(members)
        for node in sorted(members | operands, key=position.__getitem__):
            reads = reads_of.get(node, [])
            start = min(reads, default=place) if node in operands else position[node]
            end = max(place, *reads) if node in operands else max(reads, default=start)
            for writer in self._effects.writes_between(node, start, end):
                return _mutation(writer, f"{node.name} unchanged until the codes are made")
        return None

    def _reads_by(self, members: Iterable[Node]) -> dict[Node, list[int]]:
        """Where ``members`` read which values. (From their inputs: a tensor's users may be the whole graph.)"""
        reads: dict[Node, list[int]] = {}
        for member in members:
            for node in member.all_input_nodes:
                reads.setdefault(self._view.current(node, member), []).append(self._view.position[member])
        return reads

    def check_own_writes(self, norm: GatedNorm, quant: Quantisation) -> Miss | None:
        """What the site writes in place is its own: nobody outside sees the memory and would miss the write."""
        position = self._view.position
        members = norm.interior | quant.interior | quant.dependents | set(quant.results)
        for writer in sorted(members, key=position.__getitem__):
            for written in written_operands(writer):
                for node in self._effects.sharing(written):
                    if position[node] >= position[writer]:
                        break
                    if node not in members:
                        return _mutation(writer, f"{node.name}, which is seen outside the site, not written to")
        return None

    def check_autocast(self, norm: GatedNorm, quant: Quantisation) -> Miss | None:
        """No node of the site is inside a region of autocast, which would decide its dtypes."""
        for node in (*norm.interior, *quant.interior):
            region = self._autocast.get(node)
            if region is not None:
                advice = "leave autocast around the norm, or give the model its dtype with model.to(torch.bfloat16)"
                return Miss("safety", Reason.AUTOCAST, node, "no autocast", f"the region of {region.name}", advice)
        return None

    def check_grad_mode(self, norm: GatedNorm, quant: Quantisation) -> Miss | None:
        """Gradients that end because the norm was computed without them do not start at the fused op."""
        operands = (tensor_of(node) for node in _operands(norm))
        if not any(tensor is not None and tensor.requires_grad for tensor in operands):
            return None
        first = min(quant.sources, key=self._view.position.__getitem__)
        mode = self._grad_modes.mode(self._view.position[first])
        others = {self._grad_modes.mode(self._view.position[node]) for node in norm.interior | quant.interior}
        if mode is False or others == {mode}:
            return None
        advice = "call the quantisation under torch.no_grad() too"
        expected, actual = "norm and quantisation in one grad mode", "the norm alone under torch.no_grad()"
        return Miss("safety", Reason.REQUIRES_GRAD, first, expected, actual, advice)


class _GradModes:
    """Whether gradients are on at each place of a graph; None where the graph does not say."""

    def __init__(self, view: GraphView) -> None:
        switches = [node for node in view.nodes if getattr(node.target, "__name__", "") == "_set_grad_enabled"]
        self._positions = [view.position[node] for node in switches]
        self._modes = [bool(node.args[0]) for node in switches]
        # Regions nest: after an even number of switches the last one brings back the mode that the graph began with.
        self._at_start = self._modes[-1] if self._modes and len(self._modes) % 2 == 0 else None

    def mode(self, position: int) -> bool | None:
        index = bisect_left(self._positions, position)
        return self._modes[index - 1] if index else self._at_start


def _mutation(writer: Node, expected: str) -> Miss:
    advice = "write to it before the norm or behind the quantisation, or write to a clone"
    actual = f"a write by {spelled_name(writer) or writer.target}"
    return Miss("safety", Reason.MUTATION, writer, expected, actual, advice)


def _operands(norm: GatedNorm) -> Iterator[Node]:
    for role in _ROLES:
        node = getattr(norm, role)
        if node is not None:
            yield node


def _autocast_regions(view: GraphView) -> dict[Node, Node]:
    """The innermost enabled autocast entry around each node that has one."""
    regions: dict[Node, Node] = {}
    stack: list[tuple[Node, bool]] = []
    for node in view.nodes:
        name = getattr(node.target, "__name__", "")
        if name == "_enter_autocast":
            arguments = dict(enumerate(node.args))
            enabled = arguments.get(2, node.kwargs.get("enabled", True))
            stack.append((node, enabled is not False))
        elif name == "_exit_autocast" and stack:
            stack.pop()
        elif stack and stack[-1][1]:
            regions[node] = stack[-1][0]
    return regions


def check_fp8_format(quant: Quantisation) -> Miss | None:
    """The FP8 dtype is one the op writes, and codes stay within it."""
    if quant.fp8_dtype not in FP8_DTYPES:
        advice = "e4m3 is the format of activations"
        return Miss("quant", Reason.FP8_FORMAT, quant.codes, " or ".join(FP8_DTYPES), quant.fp8_dtype, advice)
    advice = "scale to torch.finfo of the FP8 dtype and clamp to the same number"
    largest = float(torch.finfo(FP8_DTYPES[quant.fp8_dtype]).max)
    steps = (*(quant.quant.scale_steps or ()), *quant.quant.factor_steps)
    divisors = [float(step[-1]) for step in steps if step[0] in DIVISION_STEPS]
    limits = [quant.quant.clamp, *divisors] if quant.quant.clamp is not None else divisors
    for limit in limits:
        if limit is not None and limit > largest:
            expected = f"a maximum of {largest:g} for {quant.fp8_dtype}"
            return Miss("quant", Reason.FP8_FORMAT, quant.codes, expected, f"{limit:g}", advice)
    if quant.quant.clamp is not None and divisors and quant.quant.clamp < divisors[0]:
        expected = f"a clamp at {divisors[0]:g}, the maximum the scale is made for"
        return Miss("quant", Reason.FP8_FORMAT, quant.codes, expected, f"a clamp at {quant.quant.clamp:g}", advice)
    return None


def check_fake_quantisation(view: GraphView, quant: Quantisation) -> Miss | None:
    """Codes that nobody reads but to widen them again were never meant to be codes."""
    frontier: list[Node] = [quant.codes]
    readers: list[Node] = []
    while frontier:
        value = frontier.pop()
        for user in view.readers(value):
            if reads_only_shape(user, value):
                continue
            (frontier if view.op(user).name == "reshape" else readers).append(user)
    widened = [user for user in readers if view.op(user).name == "cast" and _dtype(user) in _WIDE_DTYPES]
    if readers and len(widened) == len(readers):
        actual = f"codes widened to {dtype_name(_dtype(widened[0]) or torch.float32)} by {widened[0].name}"
        advice = "simulated quantisation computes in a wide dtype; use a linear layer that multiplies the codes"
        return Miss("quant", Reason.FAKE_QUANT, widened[0], "codes that a matmul reads", actual, advice)
    return None


def _dtype(node: Node) -> torch.dtype | None:
    tensor = tensor_of(node)
    return None if tensor is None else tensor.dtype


def check_operands(norm: GatedNorm) -> Miss | None:
    """Operands are plain tensors in bf16, fp16 or fp32, on one device; x and gate hold the same number of values."""
    device = None
    for role in _ROLES:
        node = getattr(norm, role)
        tensor = tensor_of(node)
        if node is None or tensor is None:
            continue
        if type(tensor) not in (FakeTensor, torch.Tensor, torch.nn.Parameter):
            advice = "unwrap it first, to_local() for a DTensor"
            return Miss("operand", Reason.SUBCLASS, node, f"a plain tensor as {role}", type(tensor).__name__, advice)
        if is_transformed(tensor):
            expected, actual = f"a plain tensor as {role}", "a tensor inside a transform"
            advice = "call the norm outside torch.vmap and torch.func transforms"
            return Miss("operand", Reason.SUBCLASS, node, expected, actual, advice)
        if tensor.dtype not in _OPERAND_DTYPES:
            expected = f"{role} in bfloat16, float16 or float32"
            advice = f"cast the {role} once, where the model is loaded"
            return Miss("operand", Reason.DTYPE, node, expected, dtype_name(tensor.dtype), advice)
        device = device or tensor.device
        if tensor.device != device:
            expected, advice = f"{role} on {device}, where x is", f"move the {role} there"
            return Miss("operand", Reason.LAYOUT, node, expected, f"{tensor.device}", advice)
    x, gate = tensor_of(norm.x), tensor_of(norm.gate)
    assert x is not None
    assert gate is not None
    if not same_size(x.numel(), gate.numel()):
        expected, advice = f"a gate of {x.numel()} values, as x has", "give every value a gate of its own"
        return Miss("operand", Reason.LAYOUT, norm.gate, expected, f"{gate.numel()}", advice)
    return None


def check_codes_layout(quant: Quantisation) -> Miss | None:
    """Eager's codes and scales are laid out as the fused op writes them: row-major, or as the spec has the scales."""
    for node in quant.results:
        tensor = tensor_of(node)
        if tensor is not None and node is quant.scales and quant.quant.scale_layout == "column" and tensor.dim() == 2:
            tensor = tensor.t()
        if tensor is not None and not is_contiguous(tensor):
            actual = f"strides {[str(stride) for stride in tensor.stride()]}"
            return Miss("layout", Reason.LAYOUT, node, f"a row-major {node.name}", actual, "add .contiguous()")
    return None


def check_grad(quant: Quantisation) -> Miss | None:
    """The op has no derivative: nobody may need one."""
    for node in quant.results:
        tensor = tensor_of(node)
        if tensor is not None and tensor.requires_grad:
            advice = "call the model under torch.no_grad() or torch.inference_mode()"
            return Miss("safety", Reason.REQUIRES_GRAD, node, "a result without gradient", "requires_grad=True", advice)
    return None


def check_row(norm: GatedNorm, hidden_size: int) -> Miss | None:
    """Weight, bias and norm repeat a whole number of times in a row."""
    for role in ("weight", "bias"):
        node = getattr(norm, role)
        size = static_int(tensor_of(node).numel()) if node is not None else 1  # type: ignore[union-attr]
        if not size or hidden_size % size:
            expected = f"a {role} whose size divides the row of {hidden_size}"
            return Miss("norm", Reason.WEIGHT_SHAPE, node, expected, f"{shape_of(node)}", "give every head one weight")
    return None
