"""Launch configurations of the Triton kernels, frozen, by architecture, each with its reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from gdn_backend.environment import architecture


@dataclass(frozen=True)
class LaunchConfig:
    """How one launch cuts its work; ``kernels/gated_rmsnorm_quant.py`` explains units and chunks."""

    units: int  # of one program, a power of two
    chunks: int  # of a piece that one thread holds
    num_warps: int
    tiles: int = 1  # of one program, which then loads one while it computes the other

    def arguments(self, piece: int, pieces: int, warp_size: int) -> dict[str, int]:
        """The kernel's arguments and launch options for units of ``pieces`` pieces of ``piece`` values."""
        width = piece // self.chunks
        values_per_thread = self.units * pieces * piece // (self.num_warps * warp_size)
        return {
            "UNITS": self.units,
            "CHUNKS": self.chunks,
            "TILES": self.tiles,
            # Threads that share a row: each loads ACCESS values of it at a time, fewer where there are not so many.
            "LANES": max(1, width // max(1, min(ACCESS, values_per_thread))),
            "num_warps": self.num_warps,
        }


@dataclass(frozen=True)
class Regime:
    """How launches of up to ``most_values`` values are cut; these are wishes that small shapes bound."""

    most_values: float
    values_per_thread: int
    num_warps: int
    tiles: int = 1


#: Chosen by sweeps on an H200 (32 heads of 128, T tokens), of the kind that scripts/tune_kernel.py runs.
SM90 = (
    # T <= 8: latency counts. Four values a thread make the shortest program, and a warp then holds a row, whose maximum
    # is one instruction.
    Regime(2**15, 4, 4),
    # T <= 256: the same with fewer, larger programs to start.
    Regime(2**20, 4, 8),
    # T = 512: instructions count, and a value costs fewer of them with 16 in a thread. One warp a program fills all
    # multiprocessors evenly.
    Regime(2**21, 16, 1),
    # Beyond: a second tile on its way while the first is computed, which one warp after the other does not achieve by
    # itself. Programs of two warps end more evenly than those of four.
    Regime(math.inf, 16, 2, tiles=2),
)
#: Not measured. Waves of 64 lanes, 304 (gfx942) or 256 (gfx950) compute units, four waves a SIMD to hide latency; the
#: listings show no spills and about 60 VGPRs for one tile of 16 values a lane.
CDNA = (
    Regime(2**18, 4, 4),
    Regime(2**21, 8, 4),
    Regime(math.inf, 16, 4),
)
#: For token counts that are not known when the launch is compiled: best nowhere, far off nowhere.
ANY_COUNT = Regime(math.inf, 8, 4)
#: A unit of several pieces that is as large as this is a program of its own: its reductions cross warps anyway. Such
#: units count double where regimes end, since fuller threads have fewer partial results to combine (seen for 30 heads
#: of 192; other units follow by analogy).
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
    regimes: tuple[Regime, ...]


NVIDIA = Architecture(("float8_e4m3fn",), True, True, 32, SM90)
OLDER_NVIDIA = Architecture((), False, False, 32, SM90)
CDNA3 = Architecture(("float8_e4m3fnuz",), False, False, 64, CDNA)
CDNA4 = Architecture(("float8_e4m3fn",), False, False, 64, CDNA)
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
    alone = parts == 1 and pieces > 1 and part >= LARGE_UNIT
    regime = ANY_COUNT
    if isinstance(num_units, int):
        num_values = num_units * parts * part * (2 if alone else 1)
        regime = next(regime for regime in machine.regimes if num_values <= regime.most_values)
    values_per_thread = regime.values_per_thread if parts == 1 else min(ACCESS, regime.values_per_thread)
    threads_values = values_per_thread * machine.warp_size
    units = 1 if alone else max(1, threads_values * regime.num_warps // part)
    while parts == 1 and units_per_token % units:  # tiles that make up whole tokens need no masks
        units //= 2
    num_warps = min(MOST_WARPS, max(1, units * part // threads_values))
    chunks = min(max(1, values_per_thread // ACCESS), max(1, piece // ACCESS))
    return LaunchConfig(units, chunks, num_warps, regime.tiles)
