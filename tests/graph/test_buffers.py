"""Values of a site that go through tensors made for them, and sites that read what other sites give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from gdn_backend.fusion.match import Reason
from tests.graph.harness import assert_fused, assert_missed, run
from tests.graph.sites import FP8, make_inputs, site

RETURNED = {"result": lambda c: (c.codes, c.scale)}

Buffer = Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def like(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_like(value, dtype=dtype)


def of_its_shape(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(value.shape, dtype=dtype)


def new_zeros(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return value.new_zeros(value.shape, dtype=dtype)


def copied(value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return buffer.copy_(value)


def copied_and_read_by_its_first_name(value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    buffer.copy_(value)
    return buffer


def assigned(value: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    buffer[:] = value
    return buffer


@pytest.mark.parametrize("fill", [copied, copied_and_read_by_its_first_name, assigned])
@pytest.mark.parametrize("make", [like, of_its_shape, new_zeros])
@pytest.mark.parametrize(
    ("step", "source", "dtype"),
    [
        ("narrow", "norm", torch.bfloat16),
        ("y", "product", torch.bfloat16),
        ("data", "groups", torch.float32),
        ("scale", "floored", torch.float32),
        ("codes", "clamped", FP8),
    ],
)
def test_a_value_written_to_a_tensor_made_for_it(step: str, source: str, dtype: Any, make: Any, fill: Any) -> None:
    def floored(c: Any) -> Any:
        c.floored = c.unfloored.clamp(min=1e-10)
        return c.floored

    def through_a_buffer(c: Any) -> Any:
        value = floored(c) if source == "floored" else getattr(c, source)
        return fill(value, make(value, dtype))

    assert_fused(run(site(RETURNED, {step: through_a_buffer}), *make_inputs()))


def test_a_tensor_that_others_read_too_is_no_buffer_of_the_site() -> None:
    def viewed_before(c: Any) -> Any:
        buffer = torch.empty(c.clamped.shape, dtype=FP8)
        c.first = buffer.view(-1)[:3]
        return buffer.copy_(c.clamped)

    result = {"result": lambda c: (c.codes, c.scale, c.first)}
    assert_missed(run(site(result, codes=viewed_before), *make_inputs()), Reason.SHARED_INTERMEDIATE, at="buffer")


def test_a_size_that_is_read_before_a_scale_is_floored_in_place() -> None:
    def floored(c: Any) -> Any:
        c.count = c.unfloored.size(0)
        return c.unfloored.clamp_(min=1e-10)

    result = {"result": lambda c: (c.codes, c.scale.view(c.count, -1))}
    assert_fused(run(site(result, scale=floored), *make_inputs(), dynamic=True))


def test_a_site_whose_input_is_the_scales_of_another() -> None:
    """The first site gives the second one's operand: no name of it may be left behind."""
    first, second = site(), site()

    def model(x: torch.Tensor, z: torch.Tensor) -> Any:
        codes, scales = first(x, z)
        return codes, scales, second(scales.view(-1, 128), z[: scales.numel() // 128])

    assert_fused(run(model, *make_inputs(128)), count=2)
