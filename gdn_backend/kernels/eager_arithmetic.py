"""Eager's arithmetic on a GPU, for Triton kernels: roundings, activations, scales and codes, byte for byte.

fp32 between roundings, libdevice's exp, IEEE divisions, NaN passed on by maxima and clamps. A product that is added to
something is written as ``fma(a, b, -0.0)``, with the -0.0 made at run time, which keeps compilers from contracting the
two (``enable_fp_fusion`` cannot be set through ``wrap_triton``).
"""

# mypy: disable-error-code="no-untyped-def, no-redef, assignment"
# ruff: noqa: RET505, SIM108  (Triton compiles only the branch taken where the two are constexpr, and an if / else shows it)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

from gdn_backend.kernels.tile_reductions import to_lines

# The interpreter cannot call libdevice.
USE_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def rounded(value, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """``value`` rounded to a dtype and back to fp32; an empty name leaves it.

    On NVIDIA two values at a time: the conversion of a single one runs at a quarter of the rate.
    """
    if DTYPE == "bfloat16" and PTX:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 pair;
            cvt.rn.bf16x2.f32 pair, $3, $2;
            shl.b32 $0, pair, 16;
            and.b32 $1, pair, 0xffff0000;
            }""",
            "=r,=r,r,r",
            [value],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    elif DTYPE == "bfloat16":
        return value.to(tl.bfloat16).to(tl.float32)
    elif DTYPE == "float16":
        return value.to(tl.float16).to(tl.float32)
    else:
        return value


@triton.jit
def rounded_times_bfloat16(value, weight):
    """fp32 rounded to bf16, times a bf16 weight, rounded to bf16; in fp32. The product of two bf16 is exact in fp32."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 pair;
        cvt.rn.bf16x2.f32 pair, $3, $2;
        mul.rn.bf16x2 pair, pair, $4;
        shl.b32 $0, pair, 16;
        and.b32 $1, pair, 0xffff0000;
        }""",
        "=r,=r,r,r,r",
        [value, weight],
        dtype=tl.float32,
        is_pure=True,
        pack=2,
    )


@triton.jit
def _exp(value):
    if USE_LIBDEVICE:
        return libdevice.exp(value)
    else:
        return tl.exp(value)


@triton.jit
def _log2(value):
    if USE_LIBDEVICE:
        return libdevice.log2(value)
    else:
        return tl.log2(value)


@triton.jit
def _exp2(value):
    if USE_LIBDEVICE:
        return libdevice.exp2(value)
    else:
        return tl.exp2(value)


@triton.jit
def _one_plus_exp(value, QUARTER: tl.constexpr):
    """1 + exp(value), fp32, or a quarter of it, by PTX: CUDA's expf, its last product and the sum in one fma.

    That product is exact (by a power of two) where the sum can tell, so the fma changes nothing. A quarter takes two
    from the power, by 1/2 - 2/252 for 1/2 in the first line. Of values over 127 / log2(e), which CUDA's caps the power
    of, the last bit can differ then; of those that bfloat16 has none does.
    """
    if QUARTER:
        HALF: tl.constexpr = "0f3EFBEFBF"
        SHIFT: tl.constexpr = "0fCB40007D"
        ONE: tl.constexpr = "0f3E800000"
    else:
        HALF: tl.constexpr = "0f3F000000"
        SHIFT: tl.constexpr = "0fCB40007F"
        ONE: tl.constexpr = "0f3F800000"
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t, j, u;
        .reg .b32 power;
        fma.rn.ftz.sat.f32 t, $1, 0f3BBB989D, """
        + HALF
        + """;
        fma.rm.ftz.f32 j, t, 0f437C0000, 0f4B400001;
        add.rn.f32 t, j, """
        + SHIFT
        + """;
        neg.f32 t, t;
        fma.rn.f32 u, $1, 0f3FB8AA3B, t;
        fma.rn.f32 u, $1, 0f32A57060, u;
        ex2.approx.ftz.f32 u, u;
        mov.b32 power, j;
        shl.b32 power, power, 23;
        mov.b32 j, power;
        fma.rn.f32 $0, u, j, """
        + ONE
        + """;
        }""",
        "=f,f",
        [value],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _approximate_reciprocal(value):
    """1 / value within an ulp, by PTX; zero where it would be subnormal."""
    return tl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=tl.float32, is_pure=True, pack=1
    )


@triton.jit
def activation_of(gate, ACTIVATION: tl.constexpr, DIVISION: tl.constexpr):
    """silu or sigmoid as eager computes them, one IEEE division by 1 + exp(-gate).

    On NVIDIA, for gates of 16 bits, ``DIVISION`` "scaled" builds the division from the hardware's reciprocal and one
    remainder step (Markstein), on a quarter of numerator and denominator, which keeps the reciprocal normal. The
    remainder is taken negative so that a zero keeps its sign, and held below a bound that only NaN passes: there the
    estimate is right already (x / inf, inf / 1). Every bf16 and fp16 gate gives the division's own bytes, by test.
    "scaled bfloat16" saves three instructions by an exp of its own, for bf16 gates only. "approximate" saves another:
    magnitudes below 2^-118 (gates below -87) come out as zeros.
    """
    if ACTIVATION == "silu":
        numerator = gate
    else:
        numerator = tl.full(gate.shape, 1.0, tl.float32)
    if DIVISION == "ieee":
        return tl.div_rn(numerator, 1.0 + _exp(gate * -1.0))
    else:
        if DIVISION != "approximate":
            numerator *= 0.25
        if DIVISION == "scaled":
            denominator = tl.fma(_exp(gate * -1.0), 0.25, 0.25)
        else:
            denominator = _one_plus_exp(gate * -1.0, DIVISION == "scaled bfloat16")
        reciprocal = _approximate_reciprocal(denominator)
        estimate = numerator * reciprocal
        remainder = tl.minimum(tl.fma(estimate, denominator, numerator * -1.0), 1e37)
        return tl.fma(remainder, reciprocal * -1.0, estimate)


@triton.jit
def scale_step(value, negative_zero, STEP: tl.constexpr, OPERAND: tl.constexpr):
    """One step of ``QuantSpec.scale_steps`` or ``factor_steps``."""
    if STEP == "max":
        return tl.maximum(value, OPERAND, propagate_nan=tl.PropagateNan.ALL)
    elif STEP == "min":
        return tl.minimum(value, OPERAND, propagate_nan=tl.PropagateNan.ALL)
    elif STEP == "add":
        return value + OPERAND
    elif STEP == "mul":
        return tl.fma(value, OPERAND, negative_zero)
    elif STEP == "div_rn":
        return tl.div_rn(value, tl.full(value.shape, OPERAND, tl.float32))
    elif STEP == "div_triton":
        return value / OPERAND
    elif STEP == "reciprocal":
        return tl.div_rn(tl.full(value.shape, 1.0, tl.float32), value)
    elif STEP == "round":
        return rounded(value, OPERAND, False)
    elif STEP == "exp2_ceil_log2":
        return _exp2(tl.ceil(_log2(value)))
    elif STEP == "ceil_pow2_bits":
        bits = value.to(tl.int32, bitcast=True)
        exponent = ((bits >> 23) & 0xFF) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        return (tl.minimum(tl.maximum(exponent, 1), 254) << 23).to(tl.float32, bitcast=True)
    else:
        tl.static_assert(STEP == "")
        return value


@triton.jit
def scaled_to_codes(
    y,
    factor,
    PTX: tl.constexpr,
    DIVISION: tl.constexpr,
    QUOTIENT: tl.constexpr,
    CLAMP: tl.constexpr,
    OVERFLOW: tl.constexpr,
):
    """The values that are cast to FP8, ``[ROWS, CHUNKS, WIDTH]``; ``factor`` is ``[ROWS]``."""
    if DIVISION == "two parts":
        # 1 / factor to twice the precision, the second part not negative so that zeros keep their sign. With it
        # y / factor is correctly rounded but where it is within 2^-46 of the middle between two fp32 numbers.
        if PTX:
            first = _approximate_reciprocal(factor)
        else:
            first = tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor)
        # Two ulp down it is surely not above 1 / factor. (Not below zero, which an infinite factor gives.)
        first = tl.maximum(first.to(tl.int32, bitcast=True) - 2, 0).to(tl.float32, bitcast=True)
        second = tl.maximum(tl.fma(first, factor * -1.0, 1.0) * first, 0.0)  # NaN, of an infinite factor, becomes 0
        scaled = tl.fma(y, to_lines(first, y.shape[0]), y * to_lines(second, y.shape[0]))
    elif DIVISION == "power of two":
        scaled = y * to_lines(tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor), y.shape[0])
    elif DIVISION == "ieee":
        scaled = tl.div_rn(y, tl.broadcast_to(to_lines(factor, y.shape[0]), y.shape))
    elif DIVISION == "triton":
        scaled = y / to_lines(factor, y.shape[0])
    else:
        scaled = y * to_lines(factor, y.shape[0])
    scaled = rounded(scaled, QUOTIENT, False)
    if CLAMP > 0.0:
        scaled = tl.maximum(scaled, -CLAMP, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.minimum(scaled, CLAMP, propagate_nan=tl.PropagateNan.ALL)
    if OVERFLOW > 0.0:
        scaled = tl.where(tl.abs(scaled) > OVERFLOW, float("nan"), scaled)
    return scaled


@triton.jit
def fp8_bytes(value, FNUZ: tl.constexpr):
    """fp32 to FP8 by bits, as eager casts: nearest even, NaN beyond the maximum, no negative zero in e4m3fnuz."""
    if FNUZ:
        BIAS: tl.constexpr = 8
        BEYOND: tl.constexpr = 0x43780000  # 248
        NAN: tl.constexpr = 0x80
    else:
        BIAS: tl.constexpr = 7
        BEYOND: tl.constexpr = 0x43E80001  # the next after 464
        NAN: tl.constexpr = 0x7F
    raw = value.to(tl.int32, bitcast=True)
    bits = raw & 0x7FFFFFFF
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((127 - BIAS) << 3)
    # Added to a power of two whose last bit is the smallest code, a magnitude is rounded to a multiple of it.
    magnitude = bits.to(tl.float32, bitcast=True)
    subnormal = (magnitude + 2.0 ** (21 - BIAS)).to(tl.int32, bitcast=True) & 0xF
    code = tl.where(bits < ((128 - BIAS) << 23), subnormal, normal)
    if FNUZ:
        code = tl.where((raw < 0) & (code > 0), code | 0x80, code)
    else:
        code = tl.where(raw < 0, code | 0x80, code)
    return tl.where(bits < BEYOND, code, NAN).to(tl.uint8)
