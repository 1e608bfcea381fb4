"""Launch configurations of the Triton kernels, frozen, by architecture, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton

from gdn_backend.environment import architecture

TRITON_VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])


@dataclass(frozen=True)
class LaunchConfig:
    """How one launch cuts its work; ``kernels/gated_rmsnorm_quant_kernel.py`` explains units, parts and chunks."""

    units: int  # of one program, a power of two
    chunks: int  # of a piece that one thread holds
    num_warps: int

    def arguments(self, piece: int, pieces: int, warp_size: int) -> dict[str, int]:
        """The kernel's arguments and launch options for parts of ``pieces`` pieces of ``piece`` values."""
        width = piece // self.chunks
        values_per_thread = self.units * pieces * piece // (self.num_warps * warp_size)
        return {
            "UNITS": self.units,
            "CHUNKS": self.chunks,
            # Threads that share a row: each loads ACCESS values of it at a time, fewer where there are not so many.
            "LANES": max(1, width // max(1, min(ACCESS, values_per_thread))),
            "num_warps": self.num_warps,
        }


@dataclass(frozen=True)
class Regime:
    """How launches of up to ``most_values`` values are cut; these are wishes that small shapes bound.

    ``values_per_thread`` are of one part; ``num_warps`` is not asked where a unit is a program of its own.
    """

    most_values: float
    values_per_thread: int
    num_warps: int = 1


@dataclass(frozen=True)
class Regimes:
    """The regimes for each kind of unit, by size."""

    heads: tuple[Regime, ...]  # units of fewer than LARGE_UNIT values, many of which make a program
    large: tuple[Regime, ...]  # larger ones, each a program of its own: their reductions cross threads anyway
    parts: tuple[Regime, ...]  # units of several parts


#: From a sweep of scripts/tune_kernel.py on an H200 (scripts/results/tune_kernel.txt).
SM90 = Regimes(
    heads=(
        # T <= 8 (of 32 heads of 128): latency counts. Four values a thread make the shortest program, and a warp then
        # holds a row, whose maximum is one instruction.
        Regime(2**15, 4, 4),
        # T <= 256: the same with fewer, larger programs to start.
        Regime(2**20, 4, 8),
        # T <= 1024: instructions count, and a value costs fewer of them with 16 in a thread. One warp a program fills
        # all multiprocessors evenly.
        Regime(2**22, 16, 1),
        # Beyond: a program's registers, not their number, bound how many run on a multiprocessor.
        Regime(math.inf, 16, 2),
    ),
    # The same for units of 1024: 32 values a thread make them the work of one warp, which needs no barrier.
    large=(Regime(2**21, 4), Regime(2**25, 16), Regime(math.inf, 32)),
    # Units of 384 in three parts: 4 values of each make a unit the work of one warp.
    parts=(Regime(2**21, 4), Regime(math.inf, 8, 2)),
)
#: Not measured. Waves of 64 lanes, 304 (gfx942) or 256 (gfx950) compute units, four waves a SIMD to hide latency; the
#: listings show no spills and about 60 VGPRs for 16 values a lane.
CDNA = Regimes(
    heads=(Regime(2**18, 4, 4), Regime(2**21, 8, 4), Regime(math.inf, 16, 4)),
    large=(Regime(2**18, 4), Regime(2**21, 8), Regime(math.inf, 16)),
    parts=(Regime(2**18, 4, 4), Regime(math.inf, 8, 4)),
)
#: For token counts that are not known when the launch is compiled: best nowhere, far off nowhere.
ANY_COUNT = Regime(math.inf, 8, 4)
#: The values of a unit of a single part that is a program of its own.
LARGE_UNIT = 512
MOST_WARPS = 16
#: Values that a thread loads at once, 16 bytes of 16-bit ones; it takes more as further chunks of its row.
ACCESS = 8


@dataclass(frozen=True)
class Architecture:
    """What a GPU can do that the kernel makes use of."""

    hardware_fp8: tuple[str, ...]  # formats that Triton converts to in hardware
    cast_saturates: bool  # that conversion clamps to the maximum and keeps NaN
    ptx: bool  # runs PTX instructions of sm90
    warp_size: int
    regimes: Regimes


NVIDIA = Architecture(("float8_e4m3fn",), True, True, 32, SM90)
OLDER_NVIDIA = Architecture((), False, False, 32, SM90)
CDNA3 = Architecture(("float8_e4m3fnuz",), False, False, 64, CDNA)
#: Triton 3.6 emulates the conversion there; with 3.9 the listings show the instruction.
CDNA4 = Architecture(("float8_e4m3fn",) if TRITON_VERSION >= (3, 9) else (), False, False, 64, CDNA)
OTHER = Architecture((), False, False, 32, SM90)  # the interpreter too: its casts get subnormal codes wrong


def describe(device: torch.device) -> Architecture:
    """What the GPU ``device`` can do."""
    name = architecture(device)
    if name.startswith("sm"):
        return NVIDIA if int(name[2:]) >= 90 else OLDER_NVIDIA
    return {"gfx942": CDNA3, "gfx950": CDNA4}.get(name, OTHER)


def launch_config(
    machine: Architecture, parts: int, piece: int, pieces: int, units_per_token: int, num_units: int | torch.SymInt
) -> LaunchConfig:
    """The configuration for ``num_units`` units of ``parts`` parts of ``pieces`` pieces of ``piece`` values.

    What a unit of a single part is padded with counts as values.
    """
    part = piece * pieces
    alone = parts == 1 and part >= LARGE_UNIT
    regime = ANY_COUNT
    if isinstance(num_units, int):
        regimes = machine.regimes
        chosen = regimes.parts if parts > 1 else regimes.large if alone else regimes.heads
        regime = next(regime for regime in chosen if num_units * parts * part <= regime.most_values)
    threads_values = regime.values_per_thread * machine.warp_size
    units = 1 if alone else max(1, threads_values * regime.num_warps // part)
    while parts == 1 and units_per_token % units:  # tiles that make up whole tokens need no masks
        units //= 2
    num_warps = min(MOST_WARPS, max(1, units * part // threads_values))
    chunks = min(max(1, regime.values_per_thread // ACCESS), max(1, piece // ACCESS))
    return LaunchConfig(units, chunks, num_warps)
