"""Sums and maxima over tiles; ``gated_rmsnorm_quant_kernel.py`` explains rows, pieces, parts and units."""

# mypy: disable-error-code="no-untyped-def, no-redef, assignment"
# ruff: noqa: RET505  (Triton compiles only the branch taken where the two are constexpr, and an if / else shows it)

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
def sums_over_192(values, ROWS: tl.constexpr):
    """Sums over norms of three pieces of 64, one of each of three parts, for each part ``[ROWS]``.

    The order is that of PyTorch's reduction over 192 contiguous fp32 values (``input_vectorized_thread_reduce_impl`` in
    its Reduce.cuh): the last 64 are added to the first 64 one by one; then all goes on as with 128.
    """
    first = _of_four_neighbours(values[0] + values[2])
    second = _of_four_neighbours(values[1])
    total = _halved(first + second, ROWS)
    return total, total, total


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
    values = tl.abs(values)
    if LANES == 32 and CHUNKS == 1:
        values = tl.reduce(tl.reshape(values, [ROWS, LANES, values.shape[1] // LANES]), 2, _larger)
        return tl.reduce(values.to(tl.int32, bitcast=True), 1, _larger_integer).to(tl.float32, bitcast=True)
    else:
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
def _reduced(values, AXIS: tl.constexpr, IS_SUM: tl.constexpr):
    if IS_SUM:
        return tl.reduce(values, AXIS, _sum)
    else:
        return tl.reduce(values, AXIS, _larger)


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
        combined = _reduced(grouped, 1, IS_SUM)
        return tl.reshape(tl.broadcast_to(combined[:, None], [GROUPS, PER_GROUP]), [GROUPS * PER_GROUP])
    else:
        UNITS: tl.constexpr = values.shape[0] // PIECES
        here = tl.arange(0, PIECES)[None, :, None] // PER_GROUP
        there = tl.arange(0, PIECES)[None, None, :] // PER_GROUP
        # Zero is neutral for both: sums are of squares, maxima of magnitudes.
        apart = tl.where(here == there, tl.reshape(values, [UNITS, 1, PIECES]), 0.0)
        combined = _reduced(apart, 2, IS_SUM)
        return tl.reshape(combined, [UNITS * PIECES])


@triton.jit
def _accumulated(a, b, IS_SUM: tl.constexpr):
    if IS_SUM:
        return a + b
    else:
        return _larger(a, b)


@triton.jit
def _over_pairs(values, PARTS: tl.constexpr, IS_SUM: tl.constexpr):
    """:func:`combined_over_units` for pairs of pieces that lie as rows of an odd number of parts.

    In even rows parts 0 1, 2 3, ... belong together, in odd rows 1 2, 3 4, ..., and what is left of the two rows.
    """
    ROWS: tl.constexpr = values[0].shape[0]
    is_even = tl.arange(0, ROWS) % 2 == 0
    across = _over_neighbours(tl.where(is_even, values[PARTS - 1], values[0]), 2, 2, IS_SUM)
    combined = (tl.where(is_even, _accumulated(values[0], values[1], IS_SUM), across),)
    for part in tl.static_range(1, PARTS - 1):
        partner = tl.where(is_even == (part % 2 == 0), values[part + 1], values[part - 1])
        combined += (_accumulated(values[part], partner, IS_SUM),)
    combined += (tl.where(is_even, across, _accumulated(values[PARTS - 2], values[PARTS - 1], IS_SUM)),)
    return combined


@triton.jit
def _over_any(
    values,
    PARTS: tl.constexpr,
    PART_RUN: tl.constexpr,
    PIECES: tl.constexpr,
    PER_GROUP: tl.constexpr,
    IS_SUM: tl.constexpr,
):
    """:func:`combined_over_units` however groups lie: each by itself, with zeros for the pieces that are not its."""
    UNITS: tl.constexpr = values[0].shape[0] // PIECES
    row = tl.arange(0, PIECES)[None, :]
    totals = ()
    for group in tl.static_range(PARTS * PIECES // PER_GROUP):
        total = tl.zeros([UNITS], tl.float32)  # neutral for both
        for part in tl.static_range(PARTS):
            if _may_share(group, part, PART_RUN, PIECES, PER_GROUP):
                belongs = piece_of_unit(row, part, PARTS, PART_RUN) // PER_GROUP == group
                mine = tl.where(belongs, tl.reshape(values[part], [UNITS, PIECES]), 0.0)
                total = _accumulated(total, _reduced(mine, 1, IS_SUM), IS_SUM)
        totals += (total,)
    combined = ()
    for part in tl.static_range(PARTS):
        spread = tl.zeros([UNITS, PIECES], tl.float32)
        for group in tl.static_range(PARTS * PIECES // PER_GROUP):
            if _may_share(group, part, PART_RUN, PIECES, PER_GROUP):
                belongs = piece_of_unit(row, part, PARTS, PART_RUN) // PER_GROUP == group
                spread = tl.where(belongs, totals[group][:, None], spread)
        combined += (tl.reshape(spread, [UNITS * PIECES]),)
    return combined


@triton.jit
def piece_of_unit(row, part, PARTS: tl.constexpr, PART_RUN: tl.constexpr):
    """Which piece of its unit is in a row of a part."""
    return (row // PART_RUN * PARTS + part) * PART_RUN + row % PART_RUN


@triton.constexpr_function
def _may_share(group, part, part_run, pieces, per_group):
    """Whether a part has pieces of a group: where it is one run, from the group of its first piece to its last's."""
    return part_run != pieces or part * pieces // per_group <= group <= (part * pieces + pieces - 1) // per_group


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
    if PARTS == 1 or PART_RUN % PER_GROUP == 0:
        combined = ()
        for part in tl.static_range(PARTS):
            combined += (_over_neighbours(values[part], PIECES, PER_GROUP, IS_SUM),)
        return combined
    elif PER_GROUP == PARTS * PART_RUN or PER_GROUP == PARTS * PIECES:  # as much of each part
        total = values[0]
        for part in tl.static_range(1, PARTS):
            total = _accumulated(total, values[part], IS_SUM)
        total = _over_neighbours(total, PIECES, PER_GROUP // PARTS, IS_SUM)
        combined = ()
        for _ in tl.static_range(PARTS):
            combined += (total,)
        return combined
    elif PART_RUN == 1 and PER_GROUP == 2 and PARTS % 2 == 1 and PIECES % 2 == 0:
        return _over_pairs(values, PARTS, IS_SUM)
    else:
        return _over_any(values, PARTS, PART_RUN, PIECES, PER_GROUP, IS_SUM)
