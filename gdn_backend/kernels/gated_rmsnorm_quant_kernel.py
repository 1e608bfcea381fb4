"""The Triton kernel of the fused op; ``gated_rmsnorm_quant.py`` launches it.

**Tiles.** The row of a token is cut into *units*, the shortest stretches that hold whole norms and whole groups
(``lcm(norm_size, group_size)`` values), and a unit into *pieces* of a power of two that divides norm, group, weight and
the contiguous runs of x and gate. Tensors have sizes of powers of two, so a unit of, say, six pieces is held as three
*parts* of two. A program takes, of each part, a tile ``[ROWS, CHUNKS, WIDTH]``: ROWS pieces of ``CHUNKS * WIDTH``
values, where a thread holds all chunks of its columns, so that most of a reduction needs no other thread. Sums and
maxima of pieces are then combined to those of norms and groups (:func:`combined_over_units`).

**Bytes.** Everything is eager's, in eager's order (``eager_arithmetic.py``). The sum of squares runs in the order of
PyTorch's own reduction kernel for norms of 128 and 192 (``tile_reductions.py``).
"""

# mypy: disable-error-code="no-untyped-def, no-redef, assignment"
# ruff: noqa: RET505  (Triton compiles only the branch taken where the two are constexpr, and an if / else shows it)

from __future__ import annotations

import triton
import triton.language as tl

from gdn_backend.kernels.eager_arithmetic import (
    activation_of,
    fp8_bytes,
    rounded,
    rounded_times_bfloat16,
    scale_step,
    scaled_to_codes,
)
from gdn_backend.kernels.tile_reductions import (
    combined_over_units,
    piece_of_unit,
    row_maxima,
    row_sums,
    sums_over_192,
    to_lines,
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
        if SCALAR:
            pointer += token_offset
            token_offset = 0
        if RUN == HIDDEN:
            offsets = token_offset + start + column
        elif SCALAR and (UNITS * UNIT) % RUN == 0:
            offsets = (start // RUN + column // RUN).to(tl.int64) * run_stride + column % RUN
        else:
            column += start
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
    column = piece_of_unit(row % PIECES, part, PARTS, PART_RUN) * PIECE
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
    SUMS_AS_EAGER: tl.constexpr, NORM_PIECES: tl.constexpr, GROUP_PIECES: tl.constexpr,
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
    CONTRACT_SQUARES: tl.constexpr = (NORM_FIRST and x_ptr.dtype.element_ty != tl.float32) or not SUMS_AS_EAGER
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

    activations, normed, squares, sums = (), (), (), ()
    for part in tl.static_range(PARTS):
        x = _widened(x_parts[part], shift, mask, PTX)
        activated = activation_of(_widened(gate_parts[part], shift, mask, PTX), ACTIVATION, ACTIVATION_DIVISION)
        activated = rounded(activated, ACTIVATION_ROUNDING, PTX)
        if not NORM_FIRST:
            x = rounded(x * activated, GATED_ROUNDING, PTX)
        activations += (activated,)
        normed += (x,)
        squares += (x * x if CONTRACT_SQUARES else tl.fma(x, x, negative_zero),)
    if SUMS_AS_EAGER and NORM == 192:
        sums = sums_over_192(squares, ROWS)
    else:
        for part in tl.static_range(PARTS):
            sums += (row_sums(squares[part], ROWS),)
        sums = combined_over_units(sums, PARTS, PART_RUN, PIECES, NORM_PIECES, True)

    outputs, maxima = (), ()
    for part in tl.static_range(PARTS):
        mean = tl.fma(sums[part], 1.0 / NORM, negative_zero)
        y = normed[part] * to_lines(tl.rsqrt(mean + tl.cast(eps, tl.float32)), LINES)
        if (
            PTX
            and WEIGHT_SIZE > 0
            and WEIGHT_OFFSET == 0.0
            and weight_ptr.dtype.element_ty == tl.bfloat16
            and NORM_ROUNDING == "bfloat16"
            and WEIGHT_ROUNDING == "bfloat16"
        ):
            y = rounded_times_bfloat16(y, weight[part])
        else:
            y = rounded(y, NORM_ROUNDING, PTX)
            if WEIGHT_SIZE > 0:
                factors = _widened(weight[part], shift, mask, PTX)
                if WEIGHT_OFFSET != 0.0:
                    factors = rounded(factors + WEIGHT_OFFSET, OFFSET_ROUNDING, PTX)
                y = rounded(tl.fma(y, factors, negative_zero), WEIGHT_ROUNDING, PTX)
        if BIAS_SIZE > 0:
            y = rounded(y + _widened(bias[part], shift, mask, PTX), BIAS_ROUNDING, PTX)
        if NORM_FIRST:
            y = y * activations[part]
        y = rounded(y, OUTPUT_ROUNDING, PTX)
        outputs += (y,)
        maxima += (row_maxima(y, ROWS, LANES),)
    scales = combined_over_units(maxima, PARTS, PART_RUN, PIECES, GROUP_PIECES, False)

    for part in tl.static_range(PARTS):
        scale = scale_step(scales[part], negative_zero, STEP_0, OPERAND_0)
        scale = scale_step(scale, negative_zero, STEP_1, OPERAND_1)
        scale = scale_step(scale, negative_zero, STEP_2, OPERAND_2)
        scale = scale_step(scale, negative_zero, STEP_3, OPERAND_3)
        scale = scale_step(scale, negative_zero, STEP_4, OPERAND_4)
        factor = scale_step(scale, negative_zero, FACTOR_STEP_0, FACTOR_OPERAND_0)
        factor = scale_step(factor, negative_zero, FACTOR_STEP_1, FACTOR_OPERAND_1)
        scaled = scaled_to_codes(outputs[part], factor, PTX, DIVISION, QUOTIENT_ROUNDING, CLAMP, OVERFLOW)
        if CAST == "hardware":
            codes = scaled.to(codes_ptr.dtype.element_ty)
        else:
            codes = fp8_bytes(scaled, CAST == "float8_e4m3fnuz by bits")

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
        # What is the same for the whole tile goes to the pointer, as in _locate.
        scale_ptrs = scales_ptr
        if SCALES_FLAT:
            scale_ptrs += tl.cast(tile, tl.int64) * (UNITS * UNIT // GROUP)
            offsets = flat // GROUP
        else:
            offsets = (column // GROUP).to(tl.int64) * scale_group_stride
            token_offset = tl.cast(token, tl.int64) * scale_token_stride
            if UNITS_PER_TOKEN % UNITS == 0:
                scale_ptrs += token_offset + tl.cast(start // GROUP, tl.int64) * scale_group_stride
            else:
                offsets += token_offset
        first = flat % GROUP == 0
        _store_scales(scale_ptrs, offsets, scale, exists & first if MASKED else first, LANES)
