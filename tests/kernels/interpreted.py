"""Runs the Triton kernel in Triton's interpreter, for every spec and some at random; prints JSON: what is not exact.

A process of its own, because Triton reads ``TRITON_INTERPRET`` when it is imported. The interpreter truncates where
bf16 is rounded (Triton 3.9), so everything that is bf16 elsewhere is fp16 here. The kernel does what eager does on a
GPU, so the reference has to be told to multiply where eager on the CPU divides by a number.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import sys

import torch
import triton
import triton.language as tl

from gdn_backend.exactness import measure_distance
from gdn_backend.kernels.configs import LaunchConfig, describe
from gdn_backend.kernels.eager_arithmetic import USE_LIBDEVICE
from gdn_backend.kernels.gated_rmsnorm_quant import plan
from gdn_backend.kernels.gated_rmsnorm_quant_kernel import gated_rmsnorm_quant_kernel
from gdn_backend.kernels.reference import reference
from gdn_backend.kernels.tile_reductions import sums_over_192
from gdn_backend.ops.gated_rmsnorm_quant import allocate_outputs
from gdn_backend.ops.spec import FusedSpec, QuantSpec
from tests.kernels.specs import ONE, SPECS, change, dtype_before_quantisation

#: Two tokens, or one where a row alone takes the interpreter a second.
LONG_ROW = 4096
#: What eager on a CPU and the interpreter do otherwise than a GPU: codes of values past the FP8 maximum, which are NaN
#: there and clamped here; the last bit of exp, which a scale shows that nothing rounds before.
LEFT_OUT = ("capped", "fp32 chain", "olmo fp32 chain")

RANDOM_CASES = 40


def in_fp16(spec: FusedSpec) -> FusedSpec:
    """``spec`` with fp16 for bf16."""
    fields = {**dataclasses.asdict(spec.quant), "quotient": _in_fp16(spec.quant.quotient)}
    for name in ("scale_steps", "factor_steps"):
        steps = getattr(spec.quant, name)
        fields[name] = steps and tuple(tuple(_in_fp16(part) for part in step) for step in steps)
    roundings = tuple(str(_in_fp16(entry)) for entry in spec.roundings)
    return dataclasses.replace(spec, roundings=roundings, quant=QuantSpec(**fields))


def _in_fp16(part: object) -> object:
    return part.replace("bfloat16", "float16") if isinstance(part, str) else part


def as_on_a_gpu(spec: FusedSpec) -> FusedSpec:
    """``spec`` with eager's division by a number as what it is on a GPU, a product with the reciprocal in fp32."""
    quant = spec.quant.resolve(spec.torch_fp8_dtype)

    def step(name: str, *operands: object) -> tuple[object, ...]:
        if name != "div":
            return (name, *operands)
        return ("mul", float(1.0 / torch.tensor(operands[0], dtype=torch.float32)))

    scale_steps = tuple(step(*entry) for entry in quant.scale_steps or ())
    factor_steps = tuple(step(*entry) for entry in quant.factor_steps)
    changed = dataclasses.replace(quant, scale_steps=scale_steps, factor_steps=factor_steps)
    return dataclasses.replace(spec, quant=changed)


def run(spec: FusedSpec, *, is_strided: bool) -> list[str]:
    """What is not exact: nothing, or the distance as text."""
    hidden = spec.hidden_size
    num_tokens = 1 if hidden > LONG_ROW else 2
    x, gate = (torch.randn(num_tokens, hidden).half() for _ in range(2))
    if is_strided:
        gate = torch.stack([gate, gate + 1], dim=1)[:, 0]
    x[-1, : min(128, hidden)] = 0.0
    weight = torch.rand(spec.norm_size if spec.norm_before_gate else hidden).half() + 0.5 - spec.weight_offset
    codes, scales = poisoned(x, spec)
    programs, arguments = plan(x, gate, weight, None, 1e-6, spec, codes, scales, describe(x.device))
    gated_rmsnorm_quant_kernel[(programs,)](**arguments)
    eager = reference(x, gate, weight, None, 1e-6, as_on_a_gpu(spec))
    distance = measure_distance(codes, scales, *eager, spec.quant.scale_format)
    is_exact = distance.is_exact(dtype_before_quantisation(spec), spec.quant.scale_format)
    return [] if is_exact else [distance.render()]


def random_case(rng: random.Random) -> tuple[str, list[str]]:
    """A spec, layouts and a cut at random: what was run, and what is not exact."""
    norm = rng.choice([32, 64, 96, 128, 160, 192, 224, 320, 384, 640])
    group = rng.choice([32, 64, 128])
    hidden = math.lcm(norm, group) * rng.choice([1, 2, 3])
    per_token = {"group_size": hidden, "granularity": "token"} if rng.random() < 0.3 else {"group_size": group}
    norm_first = rng.random() < 0.7
    order = {} if norm_first else {"norm_before_gate": False, "roundings": ONE}
    spec = in_fp16(change(hidden_size=hidden, head_dim=norm, norm_size=norm, **per_token, **order))
    num_tokens = rng.choice([1, 2, 3, 5])
    x, gate = (laid_out(torch.randn(num_tokens, hidden // norm, norm).half(), rng) for _ in range(2))
    weight = torch.rand(rng.choice([norm, hidden]) if norm_first else hidden).half() + 0.5
    config = LaunchConfig(rng.choice([1, 2, 4]), rng.choice([1, 2]), rng.choice([1, 2, 4]))
    codes, scales = poisoned(x, spec)
    programs, arguments = plan(x, gate, weight, None, 1e-6, spec, codes, scales, describe(x.device), config=config)
    gated_rmsnorm_quant_kernel[(programs,)](**arguments)
    eager = reference(x, gate, weight, None, 1e-6, as_on_a_gpu(spec))
    distance = measure_distance(codes, scales, *eager)
    name = f"{spec} of {num_tokens} tokens, weight of {len(weight)}, {x.stride()}, {gate.stride()}, {config}"
    return name, [] if distance.is_exact(dtype_before_quantisation(spec)) else [distance.render()]


def laid_out(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    """``[T, H, D]`` with strides of its own."""
    return rng.choice(
        [
            lambda: tensor,
            lambda: torch.stack([tensor, tensor + 1], dim=1)[:, 0],
            lambda: torch.cat([tensor, tensor + 1], dim=2)[..., : tensor.shape[2]],
            lambda: tensor.transpose(0, 1).contiguous().transpose(0, 1),
        ]
    )()


def poisoned(x: torch.Tensor, spec: FusedSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """codes and scales that show what is not written."""
    codes, scales = allocate_outputs(x, spec)
    codes.view(torch.uint8).fill_(0x55)
    scales.fill_(-777.0)
    return codes, scales


@triton.jit
def _sums_over_192(values_ptr, sums_ptr):
    """Four norms of 192, cut as the fused kernel cuts them; the sum that each of the 12 pieces belongs to."""
    row = tl.arange(0, 4)
    values, places = (), ()
    for part in tl.static_range(3):
        piece = row * 3 + part
        values += (tl.load(values_ptr + piece[:, None] * 64 + tl.arange(0, 64)[None, :]),)
        places += (sums_ptr + piece,)
    sums = sums_over_192(values, 4)
    for part in tl.static_range(3):
        tl.store(places[part], sums[part])


def order_of_192() -> list[str]:
    """What is added to what first, seen by numbers that are lost beside 2^24 one at a time, but not two at once."""
    values, sums = torch.zeros(4, 192), torch.zeros(4, 3)
    values[:, 0] = 2.0**24
    values[:, 128:130] = 1.0  # lost: each is added to a number of the first 64
    values[:, 70] = torch.tensor([0.0, 4.0, 8.0, 12.0])
    _sums_over_192[(1,)](values, sums)
    expected = (values[:, 0] + values[:, 70])[:, None].expand(4, 3)
    return [] if torch.equal(sums, expected) else [f"{sums.tolist()}, expected {expected.tolist()}"]


def main() -> int:
    assert not USE_LIBDEVICE, "Triton does not interpret"
    torch.manual_seed(0)
    specs = {name: in_fp16(spec) for name, spec in SPECS.items() if name not in LEFT_OUT}
    found = {name: run(spec, is_strided=False) for name, spec in specs.items()}
    found |= {f"{name}, strided gate": run(specs[name], is_strided=True) for name in ("qwen", "olmo")}
    found["order of 192"] = order_of_192()
    rng = random.Random(0)
    found |= dict(random_case(rng) for _ in range(RANDOM_CASES))
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
