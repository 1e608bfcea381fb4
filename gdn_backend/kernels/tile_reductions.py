"""Sums and maxima over tiles; ``gated_rmsnorm_quant_kernel.py`` explains rows, pieces, parts and units."""

# mypy: disable-error-code="no-untyped-def, no-redef, assignment"
# ruff: noqa: RET505, SIM108  (Triton compiles only the branch taken where the two are constexpr, and an if / else shows it)

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def row_sums(values, ROWS: tl.constexpr):
    """Sums over the columns and chunks of a tile, ``[ROWS]``.

    The order is that of PyTorch's reduction over 128 contiguous fp32 values: four neighbours one after the other, then
    the 32 results halved five times, each with the one half the width away.
    """
    return _halved(_of_four_neighbours(values), ROWS)


@triton.jit
def _of_four_neighbours(values):
    return tl.reduce(tl.reshape(values, [values.shape[0], values.shape[1] // 4, 4]), 2, _sum)


@triton.jit
def _halved(columns, ROWS: tl.constexpr):
    """Sums over the columns and chunks of ``[CHUNKS * ROWS, columns]``, each time with the one half the width away."""
    CHUNKS: tl.constexpr = columns.shape[0] // ROWS
    WIDTH: tl.constexpr = columns.shape[1]
    if CHUNKS == 4:
        columns = tl.reduce(tl.reshape(columns, [2, 2 * ROWS, WIDTH]), 0, _sum)
    if CHUNKS >= 2:
        columns = tl.reduce(tl.reshape(columns, [2, ROWS, WIDTH]), 0, _sum)
    pairs = tl.reduce(tl.reshape(columns, [ROWS, WIDTH // 2, 2]), 1, _sum)
    return tl.reduce(pairs, 1, _sum)


@triton.jit
def sums_over_192(values, ROWS: tl.constexpr, PART_RUN: tl.constexpr):
    """Sums over norms of three pieces of 64 in three parts, for each part ``[ROWS]``.

    The order is that of PyTorch's reduction over 192 contiguous fp32 values (``input_vectorized_thread_reduce_impl`` in
    its Reduce.cuh): the last 64 are added to the first 64 one by one; then all goes on as with 128.
    """
    if PART_RUN == 1:  # each norm has a piece of each part
        first = _of_four_neighbours(values[0] + values[2])
        second = _of_four_neighbours(values[1])
        total = _halved(first + second, ROWS)
        return total, total, total
    else:  # pieces 0 1 | 2 3 | 4 5 of two norms
        tl.static_assert(PART_RUN == 2)
        LINES: tl.constexpr = values[0].shape[0]
        is_even = (tl.arange(0, LINES) % 2 == 0)[:, None]
        # Even rows: pieces 0 and 2, and piece 4, which is the second of the other norm; odd rows: 3 and 5, and 1.
        first = _of_four_neighbours(values[1] + tl.where(is_even, values[0], values[2]))
        second = _of_four_neighbours(tl.where(is_even, values[2], values[0]))
        shape: tl.constexpr = [LINES // 2, 2, first.shape[1]]
        even = _halved(tl.reduce(tl.reshape(tl.where(is_even, first, second), shape), 1, _sum), ROWS // 2)
        odd = _halved(tl.reduce(tl.reshape(tl.where(is_even, second, first), shape), 1, _sum), ROWS // 2)
        both = tl.where(tl.arange(0, 2)[None, :] == 0, even[:, None], odd[:, None])
        of_even = tl.reshape(tl.broadcast_to(even[:, None], both.shape), [ROWS])
        of_odd = tl.reshape(tl.broadcast_to(odd[:, None], both.shape), [ROWS])
        return of_even, tl.reshape(both, [ROWS]), of_odd


@triton.jit
def _larger_integer(a, b):
    return tl.maximum(a, b)


@triton.jit
def row_maxima(values, ROWS: tl.constexpr, LANES: tl.constexpr):
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
def to_lines(values, LINES: tl.constexpr):
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
def combined_over_units(
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
