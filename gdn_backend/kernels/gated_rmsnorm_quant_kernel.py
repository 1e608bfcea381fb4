"""The Triton kernel of the fused op; ``gated_rmsnorm_quant.py`` launches it.

**Tiles.** The row of a token is cut into *units*, the shortest stretches that hold whole norms and whole groups
(``lcm(norm_size, group_size)`` values), and a unit into *pieces* of a power of two that divides norm, group, weight and
the contiguous runs of x and gate. Tensors have sizes of powers of two, so a unit of, say, six pieces is held as three
*parts* of two. A program takes, of each part, a tile ``[ROWS, CHUNKS, WIDTH]``: ROWS pieces of ``CHUNKS * WIDTH``
values, where a thread holds all chunks of its columns, so that most of a reduction needs no other thread. Sums and
maxima of pieces are then combined to those of norms and groups (:func:`_combined`).

**Bytes.** Everything is eager's, in eager's order: fp32 between roundings, libdevice's exp, IEEE divisions, NaN passed
on by maxima and clamps. A product that is added to something is written as ``fma(a, b, -0.0)``, with the -0.0 made at
run time, which keeps compilers from contracting the two (``enable_fp_fusion`` cannot be set through ``wrap_triton``).
The sum of squares runs in the order of PyTorch's own reduction kernel for norms of 128.
"""

# mypy: disable-error-code="no-untyped-def, no-redef, assignment"
# ruff: noqa: RET505, SIM108  (Triton compiles only the branch taken where the two are constexpr, and an if / else shows it)

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import libdevice

# The interpreter cannot call libdevice.
USE_LIBDEVICE = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def _rounded(value, DTYPE: tl.constexpr, PTX: tl.constexpr):
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
def _rounded_times_bfloat16(value, weight):
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
def _once_loads_are_issued(tile, PTX: tl.constexpr):
    """(16, 0xffff0000), by which pairs of bf16 are widened on NVIDIA, but not before all loads so far are issued.

    ptxas moves loads down to where their values are used, to save registers, and then the memory's latency is paid
    again and again. It moves none past a barrier, and no use ahead of a number that the barrier gives: here of how many
    threads the tile is negative.
    """
    if PTX:
        none = tl.inline_asm_elementwise(
            """{
            .reg .pred negative;
            setp.lt.s32 negative, $1, 0;
            bar.red.popc.u32 $0, 0, negative;
            }""",
            "=r,r",
            [tile],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return none + 16, none - 65536
    else:
        return tile, tile


@triton.jit
def _widened(value, shift, mask, PTX: tl.constexpr):
    """A loaded tile in fp32; bf16 two at a time on NVIDIA, where that saves an instruction."""
    if PTX and value.dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, $3; and.b32 $1, $2, $5;",
            "=r,=r,r,r,r,r,r",
            [value, shift, mask],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        return value.to(tl.float32)


@triton.jit
def _load(pointer, mask, MASKED: tl.constexpr, PADDED: tl.constexpr):
    """A tile; the padding of units is zero, which is neutral in their sums and maxima."""
    if PADDED:
        return tl.load(pointer, mask=mask, other=0.0)
    elif MASKED:
        return tl.load(pointer, mask=mask)
    else:
        return tl.load(pointer)


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
def _one_plus_exp(value):
    """1 + exp(value), fp32, by PTX: CUDA's expf, instruction by instruction, its last product and the sum in one fma.

    That product is exact (by a power of two) where the sum can tell, so the fma changes nothing.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .f32 t, j, u;
        .reg .b32 power;
        fma.rn.ftz.sat.f32 t, $1, 0f3BBB989D, 0f3F000000;
        fma.rm.ftz.f32 j, t, 0f437C0000, 0f4B400001;
        add.rn.f32 t, j, 0fCB40007F;
        neg.f32 t, t;
        fma.rn.f32 u, $1, 0f3FB8AA3B, t;
        fma.rn.f32 u, $1, 0f32A57060, u;
        ex2.approx.ftz.f32 u, u;
        mov.b32 power, j;
        shl.b32 power, power, 23;
        mov.b32 j, power;
        fma.rn.f32 $0, u, j, 0f3F800000;
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
def _activated(gate, ACTIVATION: tl.constexpr, DIVISION: tl.constexpr):
    """silu or sigmoid as eager computes them, one IEEE division by 1 + exp(-gate).

    On NVIDIA, for gates of 16 bits, ``DIVISION`` "scaled" builds the division from the hardware's reciprocal and one
    remainder step (Markstein), on a quarter of numerator and denominator, which keeps the reciprocal normal. The
    remainder is taken negative so that a zero keeps its sign, and held below a bound that only NaN passes: there the
    estimate is right already (x / inf, inf / 1). Every bf16 and fp16 gate gives the division's own bytes, by test.
    "approximate" saves two instructions: magnitudes below 2^-118 (gates below -87) come out as zeros.
    """
    if ACTIVATION == "silu":
        numerator = gate
    else:
        numerator = tl.full(gate.shape, 1.0, tl.float32)
    if DIVISION == "ieee":
        return tl.div_rn(numerator, 1.0 + _exp(gate * -1.0))
    else:
        if DIVISION == "scaled":
            numerator *= 0.25
            denominator = tl.fma(_exp(gate * -1.0), 0.25, 0.25)
        else:
            denominator = _one_plus_exp(gate * -1.0)
        reciprocal = _approximate_reciprocal(denominator)
        estimate = numerator * reciprocal
        remainder = tl.minimum(tl.fma(estimate, denominator, numerator * -1.0), 1e37)
        return tl.fma(remainder, reciprocal * -1.0, estimate)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def _row_sums(values, ROWS: tl.constexpr):
    """Sums over the columns and chunks of a tile, ``[ROWS]``.

    The order is that of PyTorch's reduction over 128 contiguous fp32 values: four neighbours one after the other, then
    the 32 results halved five times, each with the one half the width away.
    """
    CHUNKS: tl.constexpr = values.shape[0] // ROWS
    WIDTH: tl.constexpr = values.shape[1]
    columns = tl.reduce(tl.reshape(values, [CHUNKS * ROWS, WIDTH // 4, 4]), 2, _sum)
    if CHUNKS == 4:
        columns = tl.reduce(tl.reshape(columns, [2, 2 * ROWS, WIDTH // 4]), 0, _sum)
    if CHUNKS >= 2:
        columns = tl.reduce(tl.reshape(columns, [2, ROWS, WIDTH // 4]), 0, _sum)
    pairs = tl.reduce(tl.reshape(columns, [ROWS, WIDTH // 8, 2]), 1, _sum)
    return tl.reduce(pairs, 1, _sum)


@triton.jit
def _larger_integer(a, b):
    return tl.maximum(a, b)


@triton.jit
def _row_maxima(values, ROWS: tl.constexpr, LANES: tl.constexpr):
    """Largest magnitudes over the columns and chunks of a tile, ``[ROWS]``; NaN wins.

    Where a whole warp holds a row, by their bits, which order like the magnitudes with NaN on top: the maximum of 32
    integers is one instruction on NVIDIA.
    """
    CHUNKS: tl.constexpr = values.shape[0] // ROWS
    if LANES == 32 and CHUNKS == 1:
        bits = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        return tl.reduce(bits, 1, _larger_integer).to(tl.float32, bitcast=True)
    else:
        values = tl.abs(values)
        if CHUNKS > 1:
            values = tl.reduce(tl.reshape(values, [CHUNKS, ROWS, values.shape[1]]), 0, _larger)
        return tl.reduce(values, 1, _larger)


@triton.jit
def _to_lines(values, LINES: tl.constexpr):
    """A value for each row, ``[ROWS]``, as a column ``[LINES, 1]`` of the tile."""
    ROWS: tl.constexpr = values.shape[0]
    if LINES > ROWS:
        values = tl.reshape(tl.broadcast_to(values[None, :], [LINES // ROWS, ROWS]), [LINES])
    return values[:, None]


@triton.jit
def _over_neighbours(values, PIECES: tl.constexpr, PER_GROUP: tl.constexpr, IS_SUM: tl.constexpr):
    """For each piece, the sum or the maximum over the PER_GROUP consecutive pieces of its unit that it belongs with.

    ``values`` is ``[units * PIECES]``, as is the result.
    """
    if PER_GROUP == 1:
        return values
    elif PIECES % PER_GROUP == 0 and (PER_GROUP & (PER_GROUP - 1)) == 0:
        GROUPS: tl.constexpr = values.shape[0] // PER_GROUP
        grouped = tl.reshape(values, [GROUPS, PER_GROUP])
        if IS_SUM:
            combined = tl.reduce(grouped, 1, _sum)
        else:
            combined = tl.reduce(grouped, 1, _larger)
        return tl.reshape(tl.broadcast_to(combined[:, None], [GROUPS, PER_GROUP]), [GROUPS * PER_GROUP])
    else:
        UNITS: tl.constexpr = values.shape[0] // PIECES
        here = tl.arange(0, PIECES)[None, :, None] // PER_GROUP
        there = tl.arange(0, PIECES)[None, None, :] // PER_GROUP
        # Zero is neutral for both: sums are of squares, maxima of magnitudes.
        apart = tl.where(here == there, tl.reshape(values, [UNITS, 1, PIECES]), 0.0)
        if IS_SUM:
            combined = tl.reduce(apart, 2, _sum)
        else:
            combined = tl.reduce(apart, 2, _larger)
        return tl.reshape(combined, [UNITS * PIECES])


@triton.jit
def _accumulated(a, b, IS_SUM: tl.constexpr):
    if IS_SUM:
        return a + b
    else:
        return _larger(a, b)


@triton.jit
def _combined(
    values,
    PARTS: tl.constexpr,
    PART_RUN: tl.constexpr,
    PIECES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    IS_SUM: tl.constexpr,
):
    """:func:`_over_neighbours` for units of PARTS of PIECES pieces; ``values`` and the result are tuples by part."""
    combined = ()
    if PARTS == 1 or PART_RUN % PER_GROUP == 0:
        for part in tl.static_range(PARTS):
            combined += (_over_neighbours(values[part], PIECES, PER_GROUP, IS_SUM),)
    elif PER_GROUP == PARTS * PART_RUN or PER_GROUP == PARTS * PIECES:  # as much of each part
        total = values[0]
        for part in tl.static_range(1, PARTS):
            total = _accumulated(total, values[part], IS_SUM)
        total = _over_neighbours(total, PIECES, PER_GROUP // PARTS, IS_SUM)
        for _ in tl.static_range(PARTS):
            combined += (total,)
    else:
        tl.static_assert(PART_RUN == PIECES)
        UNITS: tl.constexpr = values[0].shape[0] // PIECES
        piece = tl.arange(0, PIECES)[None, :]
        totals = ()
        for group in tl.static_range(PARTS * PIECES // PER_GROUP):
            total = tl.zeros([UNITS], tl.float32)  # neutral for both
            for part in tl.static_range(PARTS):
                # Groups that this part has pieces of: from the one of its first piece to that of its last.
                if part * PIECES // PER_GROUP <= group and group <= (part * PIECES + PIECES - 1) // PER_GROUP:
                    belongs = (part * PIECES + piece) // PER_GROUP == group
                    mine = tl.where(belongs, tl.reshape(values[part], [UNITS, PIECES]), 0.0)
                    if IS_SUM:
                        total = _accumulated(total, tl.reduce(mine, 1, _sum), IS_SUM)
                    else:
                        total = _accumulated(total, tl.reduce(mine, 1, _larger), IS_SUM)
            totals += (total,)
        for part in tl.static_range(PARTS):
            spread = tl.zeros([UNITS, PIECES], tl.float32)
            for group in tl.static_range(PARTS * PIECES // PER_GROUP):
                if part * PIECES // PER_GROUP <= group and group <= (part * PIECES + PIECES - 1) // PER_GROUP:
                    belongs = (part * PIECES + piece) // PER_GROUP == group
                    spread = tl.where(belongs, totals[group][:, None], spread)
            combined += (tl.reshape(spread, [UNITS * PIECES]),)
    return combined


@triton.jit
def _scale_step(value, negative_zero, STEP: tl.constexpr, OPERAND: tl.constexpr):
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
        return _rounded(value, OPERAND, False)
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
def _codes(
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
        scaled = tl.fma(y, _to_lines(first, y.shape[0]), y * _to_lines(second, y.shape[0]))
    elif DIVISION == "power of two":
        scaled = y * _to_lines(tl.div_rn(tl.full(factor.shape, 1.0, tl.float32), factor), y.shape[0])
    elif DIVISION == "ieee":
        scaled = tl.div_rn(y, tl.broadcast_to(_to_lines(factor, y.shape[0]), y.shape))
    elif DIVISION == "triton":
        scaled = y / _to_lines(factor, y.shape[0])
    else:
        scaled = y * _to_lines(factor, y.shape[0])
    scaled = _rounded(scaled, QUOTIENT, False)
    if CLAMP > 0.0:
        scaled = tl.maximum(scaled, -CLAMP, propagate_nan=tl.PropagateNan.ALL)
        scaled = tl.minimum(scaled, CLAMP, propagate_nan=tl.PropagateNan.ALL)
    if OVERFLOW > 0.0:
        scaled = tl.where(tl.abs(scaled) > OVERFLOW, float("nan"), scaled)
    return scaled


@triton.jit
def _fp8_bytes(value, FNUZ: tl.constexpr):
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


# fmt: off
@triton.jit
def _locate(
    pointer, tile, place, inside, token_stride, outer_stride, inner_tokens, run_stride,
    HIDDEN: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, RUN: tl.constexpr, LEVELS: tl.constexpr,
):
    # fmt: on
    """Pointers ``[LINES, WIDTH]`` to a tile of a tensor whose tokens lie as LEVELS says (see ``_RowLayout``).

    What is the same for the whole tile stays scalar, so that the threads have few 64-bit offsets to compute.
    """
    token, start, column, flat, _ = place
    if LEVELS == 0:  # contiguous: neither tokens nor runs matter
        # A thread takes eight values at a time: more would not be one access of 16-bit values, and codes go along.
        offsets = tl.max_contiguous(flat[:, None] + inside, [1, 8])
        return pointer + tl.cast(tile, tl.int64) * (UNITS * UNIT) + offsets
    else:
        SCALAR: tl.constexpr = (HIDDEN // UNIT) % UNITS == 0
        tl.assume(token_stride >= 0)
        tl.assume(run_stride >= 0)
        token = tl.cast(token, tl.int64)
        if LEVELS == 2:
            token_offset = (token // inner_tokens) * outer_stride + (token % inner_tokens) * token_stride
        else:
            token_offset = token * token_stride
        if SCALAR and (UNITS * UNIT) % RUN == 0:
            pointer += token_offset + tl.cast(start // RUN, tl.int64) * run_stride
            token_offset = 0
        else:
            column += start
        if RUN == HIDDEN:
            offsets = token_offset + column
        else:
            offsets = token_offset + (column // RUN).to(tl.int64) * run_stride + column % RUN
        return pointer + tl.max_contiguous(offsets[:, None] + inside, [1, 8])


# fmt: off
@triton.jit
def _load_parameter(
    pointer, tile, row, inside,
    UNITS: tl.constexpr, UNITS_PER_TOKEN: tl.constexpr, UNIT: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, PART_RUN: tl.constexpr, SIZE: tl.constexpr,
):
    # fmt: on
    """A weight or bias of SIZE values, which repeats along the row, for the parts of a tile.

    Loaded in the tile's full shape: a narrower load would get another layout, and everything after it too. No masks:
    whatever the row, the place is inside.
    """
    loaded = ()
    for part in tl.static_range(PARTS):
        # Where every unit begins with the same column, the first will do for all.
        from_tile = 0 if UNIT % SIZE == 0 else tile
        row_of_unit = row % PIECES if UNIT % SIZE == 0 else row
        _, start, column, _, _ = _place(
            from_tile, part, row_of_unit, 0, UNITS, UNITS_PER_TOKEN, UNIT, PIECE, PIECES, PARTS, PART_RUN
        )
        loaded += (tl.load(pointer + (((start + column) % SIZE)[:, None] + inside)),)
    return loaded


@triton.jit
def _store_scales(pointer, offsets, scales, valid, LANES: tl.constexpr):
    """Store ``[ROWS]`` values from the threads that have them.

    As a tile ``[ROWS, LANES]`` of which the first column is written: LANES threads hold each row, and a store of
    ``[ROWS]`` would bring the values in another order first, through shared memory and a barrier. The hints make the
    columns the fastest axis, and give a thread one of them.
    """
    lanes = tl.arange(0, LANES)[None, :]
    shape: tl.constexpr = [scales.shape[0], LANES]
    spread = tl.multiple_of(tl.max_contiguous(offsets[:, None] + lanes, [1, LANES]), [1, 1])
    tl.store(pointer + spread, tl.broadcast_to(scales[:, None], shape), mask=(lanes == 0) & valid[:, None])


# fmt: off
@triton.jit
def _place(
    tile, part, row, num_units,
    UNITS: tl.constexpr, UNITS_PER_TOKEN: tl.constexpr, UNIT: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, PART_RUN: tl.constexpr,
):
    # fmt: on
    """Where the pieces ``row`` of a part of a tile are: (token, start, column, flat, exists).

    A piece begins at ``start + column`` of ``token``, and ``flat`` values behind the tile's first one were all rows
    contiguous. Where whole tiles make up a token, token and start are scalars. The pieces of a unit go to its parts in
    runs of PART_RUN.
    """
    unit = row // PIECES
    column = ((row % PIECES // PART_RUN * PARTS + part) * PART_RUN + row % PART_RUN) * PIECE
    flat = unit * UNIT + column
    exists = (tile * UNITS + unit < num_units) & (column < UNIT)
    if UNITS_PER_TOKEN % UNITS == 0:
        TILES_PER_TOKEN: tl.constexpr = UNITS_PER_TOKEN // UNITS
        return tile // TILES_PER_TOKEN, (tile % TILES_PER_TOKEN) * (UNITS * UNIT), flat, flat, exists
    else:
        unit += tile * UNITS
        return unit // UNITS_PER_TOKEN, 0, (unit % UNITS_PER_TOKEN) * UNIT + column, flat, exists


# fmt: off
@triton.jit
def _load_parts(
    pointer, tile, row, inside, num_units, token_stride, outer_stride, inner_tokens, run_stride,
    HIDDEN: tl.constexpr, UNITS: tl.constexpr, UNIT: tl.constexpr, PIECE: tl.constexpr, PIECES: tl.constexpr,
    PARTS: tl.constexpr, PART_RUN: tl.constexpr, RUN: tl.constexpr, LEVELS: tl.constexpr, MASKED: tl.constexpr,
    PADDED: tl.constexpr,
):
    # fmt: on
    """The parts of a tile of x or gate, as a tuple."""
    loaded = ()
    for part in tl.static_range(PARTS):
        place = _place(tile, part, row, num_units, UNITS, HIDDEN // UNIT, UNIT, PIECE, PIECES, PARTS, PART_RUN)
        pointers = _locate(
            pointer, tile, place, inside, token_stride, outer_stride, inner_tokens, run_stride,
            HIDDEN, UNITS, UNIT, RUN, LEVELS,
        )  # fmt: skip
        loaded += (_load(pointers, place[4][:, None], MASKED, PADDED),)
    return loaded


# fmt: off
# Token counts are not specialised on: one compiled kernel serves T=1, T=16 and all others.
@triton.jit(
    do_not_specialize=["num_units", "scale_token_stride", "scale_group_stride", "x_inner_tokens", "gate_inner_tokens"]
)
def gated_rmsnorm_quant_kernel(
    x_ptr, gate_ptr, weight_ptr, bias_ptr, codes_ptr, scales_ptr, eps, num_units,
    x_token_stride, x_outer_stride, x_inner_tokens, x_run_stride,
    gate_token_stride, gate_outer_stride, gate_inner_tokens, gate_run_stride,
    scale_token_stride, scale_group_stride,
    HIDDEN: tl.constexpr, NORM: tl.constexpr, GROUP: tl.constexpr, UNIT: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr, PARTS: tl.constexpr, PART_RUN: tl.constexpr,
    NORM_PIECES: tl.constexpr, GROUP_PIECES: tl.constexpr,
    CHUNKS: tl.constexpr, UNITS: tl.constexpr, LANES: tl.constexpr, SCALES_FLAT: tl.constexpr,
    X_RUN: tl.constexpr, X_LEVELS: tl.constexpr, GATE_RUN: tl.constexpr, GATE_LEVELS: tl.constexpr,
    WEIGHT_SIZE: tl.constexpr, BIAS_SIZE: tl.constexpr, WEIGHT_OFFSET: tl.constexpr, NORM_FIRST: tl.constexpr,
    ACTIVATION: tl.constexpr, ACTIVATION_DIVISION: tl.constexpr, PTX: tl.constexpr,
    ACTIVATION_ROUNDING: tl.constexpr, GATED_ROUNDING: tl.constexpr, NORM_ROUNDING: tl.constexpr,
    OFFSET_ROUNDING: tl.constexpr, WEIGHT_ROUNDING: tl.constexpr, BIAS_ROUNDING: tl.constexpr,
    OUTPUT_ROUNDING: tl.constexpr,
    STEP_0: tl.constexpr, OPERAND_0: tl.constexpr, STEP_1: tl.constexpr, OPERAND_1: tl.constexpr,
    STEP_2: tl.constexpr, OPERAND_2: tl.constexpr, STEP_3: tl.constexpr, OPERAND_3: tl.constexpr,
    STEP_4: tl.constexpr, OPERAND_4: tl.constexpr,
    FACTOR_STEP_0: tl.constexpr, FACTOR_OPERAND_0: tl.constexpr,
    FACTOR_STEP_1: tl.constexpr, FACTOR_OPERAND_1: tl.constexpr,
    DIVISION: tl.constexpr, QUOTIENT_ROUNDING: tl.constexpr, CLAMP: tl.constexpr, OVERFLOW: tl.constexpr,
    CAST: tl.constexpr,
):
    """One program: a tile of UNITS units; the module's text explains units, parts, pieces and chunks."""
    ROWS: tl.constexpr = UNITS * PIECES
    LINES: tl.constexpr = CHUNKS * ROWS
    WIDTH: tl.constexpr = PIECE // CHUNKS
    UNITS_PER_TOKEN: tl.constexpr = HIDDEN // UNIT
    # A product contracted with the sum that it goes into is an instruction less. Exact squares take no harm, and where
    # the order of the sum is not eager's, what each square is rounded to is no matter either.
    CONTRACT_SQUARES: tl.constexpr = (NORM_FIRST and x_ptr.dtype.element_ty != tl.float32) or NORM != 128
    negative_zero = tl.cast(eps, tl.float32) * 0.0 * -1.0

    # Masks are needed where a tile can reach beyond the last unit.
    PADDED: tl.constexpr = UNIT != PARTS * PIECES * PIECE
    MASKED: tl.constexpr = PADDED or UNITS_PER_TOKEN % UNITS != 0

    tile = tl.program_id(0)
    row = tl.arange(0, LINES) % ROWS
    inside = (tl.arange(0, LINES) // ROWS * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    x_parts = _load_parts(
        x_ptr, tile, row, inside, num_units, x_token_stride, x_outer_stride, x_inner_tokens, x_run_stride,
        HIDDEN, UNITS, UNIT, PIECE, PIECES, PARTS, PART_RUN, X_RUN, X_LEVELS, MASKED, PADDED,
    )
    gate_parts = _load_parts(
        gate_ptr, tile, row, inside, num_units, gate_token_stride, gate_outer_stride, gate_inner_tokens,
        gate_run_stride, HIDDEN, UNITS, UNIT, PIECE, PIECES, PARTS, PART_RUN, GATE_RUN, GATE_LEVELS, MASKED, PADDED,
    )
    if WEIGHT_SIZE > 0:
        weight = _load_parameter(
            weight_ptr, tile, row, inside, UNITS, UNITS_PER_TOKEN, UNIT, PIECE, PIECES, PARTS, PART_RUN, WEIGHT_SIZE
        )
    if BIAS_SIZE > 0:
        bias = _load_parameter(
            bias_ptr, tile, row, inside, UNITS, UNITS_PER_TOKEN, UNIT, PIECE, PIECES, PARTS, PART_RUN, BIAS_SIZE
        )
    shift, mask = _once_loads_are_issued(tile, PTX)

    activations, normed, sums = (), (), ()
    for part in tl.static_range(PARTS):
        x = _widened(x_parts[part], shift, mask, PTX)
        activated = _activated(_widened(gate_parts[part], shift, mask, PTX), ACTIVATION, ACTIVATION_DIVISION)
        activated = _rounded(activated, ACTIVATION_ROUNDING, PTX)
        if not NORM_FIRST:
            x = _rounded(x * activated, GATED_ROUNDING, PTX)
        squares = x * x if CONTRACT_SQUARES else tl.fma(x, x, negative_zero)
        activations += (activated,)
        normed += (x,)
        sums += (_row_sums(squares, ROWS),)
    sums = _combined(sums, PARTS, PART_RUN, PIECES, NORM_PIECES, True)

    outputs, maxima = (), ()
    for part in tl.static_range(PARTS):
        mean = tl.fma(sums[part], 1.0 / NORM, negative_zero)
        y = normed[part] * _to_lines(tl.rsqrt(mean + tl.cast(eps, tl.float32)), LINES)
        if (
            PTX
            and WEIGHT_SIZE > 0
            and WEIGHT_OFFSET == 0.0
            and weight_ptr.dtype.element_ty == tl.bfloat16
            and NORM_ROUNDING == "bfloat16"
            and WEIGHT_ROUNDING == "bfloat16"
        ):
            y = _rounded_times_bfloat16(y, weight[part])
        else:
            y = _rounded(y, NORM_ROUNDING, PTX)
            if WEIGHT_SIZE > 0:
                factors = weight[part].to(tl.float32)
                if WEIGHT_OFFSET != 0.0:
                    factors = _rounded(factors + WEIGHT_OFFSET, OFFSET_ROUNDING, PTX)
                y = _rounded(tl.fma(y, factors, negative_zero), WEIGHT_ROUNDING, PTX)
        if BIAS_SIZE > 0:
            y = _rounded(y + bias[part].to(tl.float32), BIAS_ROUNDING, PTX)
        if NORM_FIRST:
            y = y * activations[part]
        y = _rounded(y, OUTPUT_ROUNDING, PTX)
        outputs += (y,)
        maxima += (_row_maxima(y, ROWS, LANES),)
    scales = _combined(maxima, PARTS, PART_RUN, PIECES, GROUP_PIECES, False)

    for part in tl.static_range(PARTS):
        scale = _scale_step(scales[part], negative_zero, STEP_0, OPERAND_0)
        scale = _scale_step(scale, negative_zero, STEP_1, OPERAND_1)
        scale = _scale_step(scale, negative_zero, STEP_2, OPERAND_2)
        scale = _scale_step(scale, negative_zero, STEP_3, OPERAND_3)
        scale = _scale_step(scale, negative_zero, STEP_4, OPERAND_4)
        factor = _scale_step(scale, negative_zero, FACTOR_STEP_0, FACTOR_OPERAND_0)
        factor = _scale_step(factor, negative_zero, FACTOR_STEP_1, FACTOR_OPERAND_1)
        scaled = _codes(outputs[part], factor, PTX, DIVISION, QUOTIENT_ROUNDING, CLAMP, OVERFLOW)
        if CAST == "hardware":
            codes = scaled.to(codes_ptr.dtype.element_ty)
        else:
            codes = _fp8_bytes(scaled, CAST == "float8_e4m3fnuz by bits")

        written = _place(
            tile, part, row, num_units, UNITS, UNITS_PER_TOKEN, UNIT, PIECE, PIECES, PARTS, PART_RUN
        )
        code_ptrs = _locate(codes_ptr, tile, written, inside, 0, 0, 1, 0, HIDDEN, UNITS, UNIT, HIDDEN, 0)
        if MASKED:
            tl.store(code_ptrs, codes, mask=written[4][:, None])
        else:
            tl.store(code_ptrs, codes)
        token, start, column, flat, exists = _place(
            tile, part, tl.arange(0, ROWS), num_units,
            UNITS, UNITS_PER_TOKEN, UNIT, PIECE, PIECES, PARTS, PART_RUN,
        )
        if SCALES_FLAT:
            offsets = tl.cast(tile, tl.int64) * (UNITS * UNIT // GROUP) + flat // GROUP
        else:
            group = start // GROUP + column // GROUP
            offsets = tl.cast(token, tl.int64) * scale_token_stride + group.to(tl.int64) * scale_group_stride
        _store_scales(scales_ptr, offsets, scale, exists & (flat % GROUP == 0), LANES)
