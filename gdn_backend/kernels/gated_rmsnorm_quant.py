"""Launching the Triton kernel of the fused op: what it takes, how rows are addressed, how the formula is lowered."""

from __future__ import annotations

import math
import operator
import struct
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch.fx.experimental.symbolic_shapes import guard_or_false, statically_known_true

from gdn_backend.kernels.configs import Architecture, LaunchConfig, describe, launch_config
from gdn_backend.kernels.gated_rmsnorm_quant_kernel import gated_rmsnorm_quant_kernel
from gdn_backend.ops.dispatch import Operands
from gdn_backend.ops.outputs import allocate_storage, view_scales
from gdn_backend.ops.spec import DIVISION_STEPS, ROUNDING_POINTS, FusedSpec, Step, dtype_from_name, dtype_name

Size = int | torch.SymInt


SCALE_SLOTS, FACTOR_SLOTS = 5, 2
LARGEST_TILE = 16384
SMALLEST_PIECE = 16
#: Each part is code of its own; beyond, padding to a power of two costs less.
MOST_PARTS = 5
#: From here on divisions by a factor need no care for subnormal numbers, and magnitudes below 2^-118 give zero codes.
SMALLEST_FACTOR = 2.0**-90
#: Beyond these magnitudes the cast of eager gives NaN: the FP8 maximum and half a step.
OVERFLOWS = {"float8_e4m3fn": 464.0, "float8_e4m3fnuz": 247.99998}


@dataclass(frozen=True)
class _RowLayout:
    """Where the rows of a tensor lie: token ``t``, column ``c`` at

    ``(t // inner_tokens) * outer_stride + (t % inner_tokens) * token_stride + (c // run) * run_stride + c % run``
    with two levels, ``t * token_stride + …`` with one, and at ``t * hidden_size + c`` with none. Strides in elements.
    """

    run: int
    levels: int = 0
    run_stride: Size = 0
    token_stride: Size = 0
    outer_stride: Size = 0
    inner_tokens: Size = 1

    def arguments(self, name: str) -> dict[str, Any]:
        """The kernel's arguments for the tensor ``name``."""
        return {
            f"{name}_token_stride": self.token_stride,
            f"{name}_outer_stride": self.outer_stride,
            f"{name}_inner_tokens": self.inner_tokens,
            f"{name}_run_stride": self.run_stride,
            f"{name.upper()}_RUN": self.run,
            f"{name.upper()}_LEVELS": self.levels,
        }


def _merged_dimensions(tensor: torch.Tensor) -> list[tuple[Size, Size]]:
    """(size, stride) of the dimensions, innermost first; those that one stride can walk are one."""
    merged: list[tuple[Size, Size]] = []
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if statically_known_true(size == 1):
            continue
        if merged and statically_known_true(stride == merged[-1][0] * merged[-1][1]):
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged or [(1, 1)]


def _row_layout(tensor: torch.Tensor, hidden_size: int) -> _RowLayout | None:
    """How to address the rows of ``tensor`` in place; None where it takes a copy.

    Under ``torch.compile(dynamic=True)`` sizes inside a row may be symbolic too: a guard makes numbers of them.
    """
    row: list[tuple[int, Size]] = []
    tokens: list[tuple[Size, Size]] = []
    rest = hidden_size
    dimensions = _merged_dimensions(tensor)
    if statically_known_true(tensor.numel() == 0):
        return _RowLayout(hidden_size)
    for place, (size, stride) in enumerate(dimensions, start=1):
        if rest == 1:
            tokens.append((size, stride))
        elif isinstance(size, int) and rest % size == 0:
            row.append((size, stride))
            rest //= size
        elif place == len(dimensions) or statically_known_true(size % rest == 0):
            row.append((rest, stride))
            tokens.append((size // rest, stride * rest))
            rest = 1
        elif isinstance(size, torch.SymInt) and guard_or_false(rest % size == 0):  # type: ignore[operator]
            row.append((operator.index(size), stride))
            rest //= operator.index(size)
        else:
            return None
    if rest != 1 or len(row) > 2 or len(tokens) > 2 or not statically_known_true(row[0][1] == 1):
        return None
    run = row[0][0]
    run_stride = row[1][1] if len(row) == 2 else 0
    if len(tokens) == 2:
        return _RowLayout(run, 2, run_stride, tokens[0][1], tokens[1][1], tokens[0][0])
    token_stride = tokens[0][1] if tokens else hidden_size
    if run == hidden_size and statically_known_true(token_stride == hidden_size):
        return _RowLayout(hidden_size)
    return _RowLayout(run, 1, run_stride, token_stride)


@dataclass(frozen=True)
class _Geometry:
    """How a row is cut; see the module's text."""

    unit: int
    piece: int
    parts: int  # of a unit
    pieces: int  # of a part, rounded up to a power of two
    run: int  # consecutive pieces of a part, a power of two
    norm_pieces: int
    group_pieces: int

    @staticmethod
    def of(spec: FusedSpec, weight_size: int, bias_size: int) -> _Geometry:
        unit = math.lcm(spec.norm_size, spec.group_size)
        common = math.gcd(spec.norm_size, spec.group_size, weight_size, bias_size)
        piece = common & -common
        count, of_a_norm = unit // piece, spec.norm_size // piece
        run = count & -count
        parts = count // run
        if parts > MOST_PARTS:
            parts, run = 1, triton.next_power_of_2(count)
        of_pairs = of_a_norm % 2 == 1 and spec.group_size == 2 * piece
        if 1 < _odd_factor(of_a_norm) <= MOST_PARTS and (spec.group_size == unit or of_pairs or spec.norm_size == 192):
            # Each norm is spread over all parts, so that its sum is one of numbers that a thread has, and those of 192
            # in eager's order.
            parts = _odd_factor(of_a_norm)
            run = of_a_norm // parts
        pieces = triton.next_power_of_2(count // parts)
        # A norm or group that is the whole unit takes the padding in: it is zero.
        norm_pieces, group_pieces = (
            parts * pieces if size == unit else size // piece for size in (spec.norm_size, spec.group_size)
        )
        return _Geometry(unit, piece, parts, pieces, run, norm_pieces, group_pieces)

    @property
    def sums_as_eager(self) -> bool:
        """Whether squares are added in the order of PyTorch's own kernel (``tile_reductions.py``)."""
        whole = (self.piece, self.norm_pieces) == (128, 1)
        return whole or (self.piece, self.norm_pieces, self.parts, self.run) == (64, 3, 3, 1)


def _odd_factor(count: int) -> int:
    return count // (count & -count)


@dataclass(frozen=True)
class _Formula:
    """``QuantSpec`` in the kernel's terms: the constexpr arguments of the same names in lower case."""

    steps: tuple[tuple[str, float | str], ...]
    factor_steps: tuple[tuple[str, float | str], ...]
    division: str
    quotient_rounding: str
    clamp: float
    overflow: float
    smallest_scale: float  # a lower bound; 0 where none is known

    def arguments(self) -> dict[str, Any]:
        """The kernel's constexpr arguments."""
        arguments: dict[str, Any] = {
            "DIVISION": self.division,
            "QUOTIENT_ROUNDING": self.quotient_rounding,
            "CLAMP": self.clamp,
            "OVERFLOW": self.overflow,
        }
        for prefix, steps, slots in (("", self.steps, SCALE_SLOTS), ("FACTOR_", self.factor_steps, FACTOR_SLOTS)):
            for slot, (step, operand) in enumerate((*steps, *[("", 0.0)] * (slots - len(steps)))):
                arguments |= {f"{prefix}STEP_{slot}": step, f"{prefix}OPERAND_{slot}": operand}
        return arguments


def supports(spec: FusedSpec, operands: Operands) -> str | None:
    """Why the kernel cannot serve a site, or None where it can."""
    weight_size = (operands.weight_size or spec.norm_size) if operands.weight is not None else 0
    bias_size = (operands.bias_size or spec.norm_size) if operands.bias is not None else 0
    geometry = _Geometry.of(spec, weight_size, bias_size)
    if geometry.piece < SMALLEST_PIECE:
        return (
            f"norms of {spec.norm_size}, groups of {spec.group_size} and the weight share no power of two of "
            f"{SMALLEST_PIECE} or more"
        )
    if geometry.parts * geometry.pieces * geometry.piece > LARGEST_TILE:
        return f"{geometry.unit} values have to be held at once; at most {LARGEST_TILE} fit"
    if spec.shows_summation_order and not geometry.sums_as_eager:
        return (
            f"norms of {spec.norm_size} with groups of {spec.group_size} are not summed in eager's order, and in fp32 "
            "no rounding hides that"
        )
    quant = spec.quant.resolve(spec.torch_fp8_dtype)
    for name, steps, slots in (
        ("scale", quant.scale_steps or (), SCALE_SLOTS),
        ("factor", quant.factor_steps, FACTOR_SLOTS),
    ):
        if len(steps) > slots:
            return f"the {name} takes {len(steps)} steps; at most {slots} are done"
        for step in steps:
            if len(step) == 2 and isinstance(step[1], float) and 0.0 < abs(step[1]) < 2.0**-126:
                return f"the {name} step {step} has a subnormal operand"
    return None


def launch(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    spec: FusedSpec,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; to be called inside a ``torch.library.triton_op``.

    Args:
        x, gate: rows of ``spec.hidden_size`` in logical row-major order, any strides; read in place where two strides
            for the tokens and two for the row can walk them, from a copy elsewhere.
        weight, bias: ``[W]``, repeating along the row, or None.

    Returns:
        codes and scales as :func:`~gdn_backend.ops.outputs.allocate_outputs` describes them.
    """
    codes, stored = allocate_storage(x, spec)
    scales = view_scales(stored, codes.shape[0], spec)
    programs, arguments = plan(x, gate, weight, bias, eps, spec, codes, scales, describe(x.device))
    torch.library.wrap_triton(gated_rmsnorm_quant_kernel)[(programs,)](**arguments | {"scales_ptr": stored})
    return codes, scales


def plan(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    spec: FusedSpec,
    codes: torch.Tensor,
    scales: torch.Tensor,
    machine: Architecture,
    config: LaunchConfig | None = None,
) -> tuple[Size, dict[str, Any]]:
    """How many programs :func:`launch` starts on ``machine``, and with which arguments; the tensors may be fake.

    Args:
        codes, scales: what is written, as :func:`~gdn_backend.ops.outputs.allocate_outputs` makes them.
        machine: what the kernel is compiled for.
        config: overrides the launch configuration.
    """
    geometry = _Geometry.of(spec, 0 if weight is None else weight.numel(), 0 if bias is None else bias.numel())
    x, x_layout = _readable(x, spec.hidden_size, geometry.piece)
    gate, gate_layout = _readable(gate, spec.hidden_size, geometry.piece)
    units_per_token = spec.hidden_size // geometry.unit
    num_units = codes.shape[0] * units_per_token
    config = config or launch_config(
        machine, geometry.parts, geometry.piece, geometry.pieces, units_per_token, num_units
    )
    hardware_cast = spec.fp8_dtype in machine.hardware_fp8
    formula = _formula(spec, saturates=hardware_cast and machine.cast_saturates)
    tensors = {
        "x_ptr": x,
        "gate_ptr": gate,
        "weight_ptr": x if weight is None else weight.contiguous(),
        "bias_ptr": x if bias is None else bias.contiguous(),
        "codes_ptr": codes if hardware_cast else codes.view(torch.uint8),
        "scales_ptr": scales,
    }
    arguments = {
        "eps": eps,
        "num_units": num_units,
        "scale_token_stride": scales.stride(0),
        "scale_group_stride": scales.stride(1),
        "SCALES_FLAT": scales.is_contiguous(),
        "PTX": machine.ptx,
        "ACTIVATION_DIVISION": _activation_division(spec, gate.dtype, formula, machine),
        "CAST": "hardware" if hardware_cast else f"{spec.fp8_dtype} by bits",
    }
    programs = triton.cdiv(num_units, config.units)
    return programs, (
        tensors
        | arguments
        | x_layout.arguments("x")
        | gate_layout.arguments("gate")
        | _constants(spec, geometry, weight, bias)
        | formula.arguments()
        | config.arguments(geometry.piece, geometry.pieces, machine.warp_size)
    )


def _activation_division(spec: FusedSpec, gate_dtype: torch.dtype, formula: _Formula, machine: Architecture) -> str:
    """How the activation divides; see ``activation_of`` in ``eager_arithmetic.py``."""
    if not machine.ptx or gate_dtype == torch.float32:
        return "ieee"
    if spec.norm_before_gate and formula.smallest_scale >= SMALLEST_FACTOR:
        return "approximate"
    return "scaled bfloat16" if gate_dtype == torch.bfloat16 else "scaled"


def _readable(tensor: torch.Tensor, hidden_size: int, piece: int) -> tuple[torch.Tensor, _RowLayout]:
    """``tensor`` and its layout; a contiguous copy where it cannot be read in place."""
    layout = _row_layout(tensor, hidden_size)
    if layout is not None and layout.run % piece == 0:
        return tensor, layout
    return tensor.contiguous(), _RowLayout(hidden_size)


def _constants(
    spec: FusedSpec, geometry: _Geometry, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> dict[str, Any]:
    """The constexpr arguments that follow from the spec but for the quantisation's."""
    return {f"{point.upper()}_ROUNDING": _rounding_name(spec.rounding(point)) for point in ROUNDING_POINTS} | {
        "HIDDEN": spec.hidden_size,
        "NORM": spec.norm_size,
        "GROUP": spec.group_size,
        "UNIT": geometry.unit,
        "PIECE": geometry.piece,
        "PIECES": geometry.pieces,
        "PARTS": geometry.parts,
        "PART_RUN": geometry.run,
        "SUMS_AS_EAGER": geometry.sums_as_eager,
        "NORM_PIECES": geometry.norm_pieces,
        "GROUP_PIECES": geometry.group_pieces,
        "WEIGHT_SIZE": 0 if weight is None else weight.numel(),
        "BIAS_SIZE": 0 if bias is None else bias.numel(),
        "WEIGHT_OFFSET": spec.weight_offset,
        "NORM_FIRST": spec.norm_before_gate,
        "ACTIVATION": spec.activation,
    }


def _rounding_name(dtype: torch.dtype | None) -> str:
    """A rounding's dtype as the kernel has it; what stays fp32 is no rounding."""
    return "" if dtype in (None, torch.float32) else dtype_name(dtype)


def _formula(spec: FusedSpec, saturates: bool) -> _Formula:
    """Lower the quantisation; ``saturates``: the cast clamps to the FP8 maximum and passes NaN on."""
    quant = spec.quant.resolve(spec.torch_fp8_dtype)
    steps, factor_steps = (
        tuple(_lowered(step) for step in steps) for steps in (quant.scale_steps or (), quant.factor_steps)
    )
    largest, smallest_factor = _bounds((*steps, *factor_steps), quant.operation)
    smallest_scale = _bounds(steps, "divide")[1]
    clamp = quant.clamp or 0.0
    if saturates and clamp == torch.finfo(spec.torch_fp8_dtype).max:
        clamp = 0.0
    overflow = 0.0 if quant.clamp is not None or largest < OVERFLOWS[spec.fp8_dtype] else OVERFLOWS[spec.fp8_dtype]
    if quant.operation == "multiply":
        division = "multiply"
    elif quant.operation == "divide_triton":
        division = "triton"
    elif quant.scale_format == "ue8m0" and smallest_factor >= 2.0**-126:
        division = "power of two"
    elif smallest_factor >= SMALLEST_FACTOR:
        division = "two parts"
    else:
        division = "ieee"
    return _Formula(
        steps,
        factor_steps,
        division,
        _rounding_name(dtype_from_name(quant.quotient)) if quant.quotient else "",
        clamp,
        overflow,
        smallest_scale,
    )


def _lowered(step: Step) -> tuple[str, float | str]:
    """A step as the kernel has it: eager's division by a number is, on a GPU, a product with its fp32 reciprocal."""
    if len(step) == 1:
        return step[0], 0.0
    name, operand = step
    if isinstance(operand, str):
        return name, operand.removeprefix("float32")
    if name == "div":
        return "mul", _float32(1.0 / _float32(operand))
    return name, _float32(operand)


def _float32(value: float) -> float:
    """The fp32 number next to ``value``."""
    return struct.unpack("f", struct.pack("f", value))[0]


def _bounds(steps: tuple[tuple[str, float | str], ...], operation: str) -> tuple[float, float]:
    """The largest magnitude before the cast that finite values can give, and a lower bound of the factor.

    Follows the steps with ``scale >= low * amax`` and ``scale >= floor``; infinity and zero where nothing is known.
    """
    low, floor = 1.0, 0.0
    for name, operand in steps:
        if name == "max" and isinstance(operand, float):
            floor = max(floor, operand)
        elif name == "mul" and isinstance(operand, float) and operand > 0.0:
            low, floor = low * operand, floor * operand
        elif name in DIVISION_STEPS and isinstance(operand, float) and operand > 0.0:
            low, floor = low / operand * (1 - 2.0**-20), floor / operand * (1 - 2.0**-20)
        elif name == "round":
            low, floor = low * (1 - 2.0**-7), floor * (1 - 2.0**-7)
        elif name in ("exp2_ceil_log2", "ceil_pow2_bits"):
            low, floor = (
                low * (1 - 2.0**-20),
                max(floor, 2.0**-126 if name == "ceil_pow2_bits" else 0.0) * (1 - 2.0**-20),
            )
        elif name != "add" or not isinstance(operand, float) or operand < 0.0:
            return math.inf, 0.0
    if operation == "multiply" or floor < 2.0**-100:
        return math.inf, floor
    return 1.0 / low, floor
