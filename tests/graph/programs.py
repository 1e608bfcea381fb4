"""Programs made at random: equivalent spellings of one site. ``changes.py`` then changes what they mean.

Every choice goes through ``pick``, a function from options to one of them: a random generator's ``choice`` in
``scripts/fuzz.py``, hypothesis' ``draw`` in the tests, which then shrinks what fails.
"""

from __future__ import annotations

import torch

from tests.graph.norm_spellings import choose_norm
from tests.graph.program import Pick, Program
from tests.graph.quant_spellings import choose_quant
from tests.graph.sites import BASE


def equivalent(pick: Pick) -> Program:
    """A program that has to fuse."""
    head_dim = pick([128, 128, 64, 96, 256, 192])
    heads = (
        pick([4, 6, 8, 2, 1 if head_dim == 128 else 2])
        if head_dim % 128 == 0
        else {64: 4, 96: 4, 192: 2}[head_dim] * pick([1, 2])
    )
    dtype = pick([torch.bfloat16, torch.bfloat16, torch.float16, torch.float32])
    program = Program(
        steps=dict(BASE),
        names={},
        heads=heads,
        head_dim=head_dim,
        tokens=pick([1, 2, 3, 5, 0]),
        dtype=dtype,
        gate_dtype=pick([dtype, dtype, torch.float32, torch.bfloat16]),
        weight_dtype=pick([dtype, torch.float32, torch.bfloat16]),
        # Merging heads copies what is transposed; where there is one head the codes would be transposed as well.
        strides=pick(["contiguous", "contiguous", "transposed" if heads > 1 else "packed", "packed"]),
        values=pick(["normal", "normal", "tiny", "large", "zeros", "not finite"]),
    )
    program.shape = pick(["flat", "flat", "heads", "batch", "groups" if heads > 1 else "batch"])
    program.per_head_weight = program.shape in ("heads", "batch") and pick([False, False, True])
    program.dynamic = pick([False, program.strides != "transposed"])
    choose_norm(program, pick)
    _choose_layout(program, pick)
    choose_quant(program, pick)
    return program


def _choose_layout(program: Program, pick: Pick) -> None:
    heads, width, hidden = program.heads, program.head_dim, program.hidden
    program.options["group"] = group = pick([128, 128, 128, hidden, 64 if hidden % 64 == 0 else 128])
    count = hidden // group
    rows = [
        ("reshape", lambda c: c.y.reshape(-1, hidden)),
        ("reshaped twice", lambda c: c.y.reshape(-1, heads, width).reshape(-1, hidden)),
        ("flattened flatten", lambda c: c.y.flatten(0, -2).unflatten(0, (-1, heads)).flatten(1)),
        ("size read", lambda c: c.y.reshape(c.x.numel() // hidden, -1)),
        ("contiguous", lambda c: c.y.contiguous().view(-1, heads, width).reshape(-1, heads * width)),
        ("unsqueezed", lambda c: c.y.reshape(1, -1, hidden).squeeze(0)),
        ("clone", lambda c: c.y.reshape(-1, hidden).clone()),
        ("batch of one", lambda c: c.y.reshape(1, -1, hidden)),
        ("[None]", lambda c: c.y.reshape(-1, hidden)[None][0:1].squeeze(0)),
    ]
    groups = [
        ("view", lambda c: c.rows.view(-1, count, group)),
        ("reshape", lambda c: c.rows.reshape(-1, count, group)),
        ("unflatten", lambda c: c.rows.unflatten(-1, (count, group))),
        ("unflatten -1", lambda c: c.rows.unflatten(-1, (-1, group))),
        ("4-D", lambda c: c.rows.view(-1, 1, count, group)),
        ("flat", lambda c: c.rows.reshape(-1, group)),
        ("unflatten in the batch", lambda c: c.rows.reshape(-1, hidden).unflatten(-1, (count, group))),
        ("[:]", lambda c: c.rows.view(-1, count, group)[:]),
    ]
    if group == hidden:
        groups.append(("rows", lambda c: c.rows))
    program.choose("rows", pick(rows))
    program.choose("groups", pick(groups))
