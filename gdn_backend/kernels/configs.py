"""Launch configurations of the Triton kernels, frozen, by architecture, each with its reason."""

from __future__ import annotations

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
            # Threads that share a row: each holds 16 bytes of 16-bit values at a time, less where there are too few.
            "LANES": max(1, width // max(1, min(8, values_per_thread))),
            "num_warps": self.num_warps,
        }


@dataclass(frozen=True)
class Architecture:
    """What a GPU can do that the kernel makes use of."""

    hardware_fp8: tuple[str, ...]  # formats that Triton converts to in hardware
    cast_saturates: bool  # that conversion clamps to the maximum and keeps NaN
    ptx: bool  # runs PTX instructions of sm90
    warp_size: int = 32


NVIDIA = Architecture(("float8_e4m3fn",), True, True)
OLDER_NVIDIA = Architecture((), False, False)
CDNA3 = Architecture(("float8_e4m3fnuz",), False, False, 64)
CDNA4 = Architecture(("float8_e4m3fn",), False, False, 64)
OTHER = Architecture((), False, False)  # the interpreter too: its casts get subnormal codes wrong


def describe(device: torch.device) -> Architecture:
    """What the GPU ``device`` can do."""
    name = architecture(device)
    if name.startswith("sm"):
        return NVIDIA if int(name[2:]) >= 90 else OLDER_NVIDIA
    return {"gfx942": CDNA3, "gfx950": CDNA4}.get(name, OTHER)


def launch_config(machine: Architecture, tile: int, piece: int, num_units: int | torch.SymInt) -> LaunchConfig:
    """The configuration for ``num_units`` units of ``tile`` values (padding included)."""
    units = max(1, 1024 // tile)
    return LaunchConfig(units, 1, 4 if tile <= 4096 else 8)
