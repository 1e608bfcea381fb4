"""What a fused site costs on the CPU, against what plain Inductor makes of the unfused graph."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from gdn_backend.ops import gated_rmsnorm_quant  # noqa: F401  registers the op
from gdn_backend.ops.call import encode_call
from gdn_backend.ops.spec import FusedSpec
from tests.kernels.naive import kimi, mamba2, quant_vllm, qwen3_next

pytestmark = pytest.mark.slow

NUM_TOKENS, WIDTH, GROUPS = 512, 4096, 8
ROUNDS = 41

NARROW = ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
SITES = {
    "qwen3_next": (qwen3_next, FusedSpec(WIDTH, 128, 128, 128, roundings=NARROW), 1.15),
    "kimi": (
        kimi,
        FusedSpec(WIDTH, 128, 128, 128, activation="sigmoid", roundings=("output:bfloat16",)),
        1.15,
    ),
    "mamba2": (
        lambda *inputs: mamba2(*inputs, groups=GROUPS),
        FusedSpec(WIDTH, WIDTH // GROUPS, WIDTH // GROUPS, 128, norm_before_gate=False, roundings=NARROW[:2]),
        1.4,
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """CPU time of one thread: what others do on the machine disturbs it least."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SITES)
def test_is_about_as_fast_as_plain_inductor(name: str) -> None:
    norm, spec, limit = SITES[name]
    call = encode_call(spec, "reference")

    def unfused(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return quant_vllm(norm(x, gate, weight, 1e-6).view(-1, WIDTH), 128, torch.float8_e4m3fn)

    def fused(x: Tensor, gate: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return torch.ops.gdn_backend.gated_rmsnorm_fp8_quant(x, gate, weight, None, 1e-6, call)

    shape = (NUM_TOKENS, WIDTH) if name == "mamba2" else (NUM_TOKENS * WIDTH // 128, 128)
    inputs = (torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16(), torch.randn(shape[-1]).bfloat16())
    plain = torch.compile(unfused, fullgraph=True)
    ours = torch.compile(fused, fullgraph=True, options={"emulate_precision_casts": True})
    ratio = interleaved_ratio(lambda: ours(*inputs), lambda: plain(*inputs))
    assert ratio <= limit, f"{ratio:.3f} times the CPU time of plain Inductor, at most {limit} wanted"


def interleaved_ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> float:
    """Ratio of the median CPU times, the two taken in turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(ROUNDS):
        for run, samples in zip((ours, theirs), times, strict=True):
            start = time.thread_time()
            run()
            samples.append(time.thread_time() - start)
    return statistics.median(times[0]) / statistics.median(times[1])
