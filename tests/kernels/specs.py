"""Specs that the Triton kernel's tests run: one for each way in which it works otherwise."""

from __future__ import annotations

import dataclasses

import torch

from gdn_backend.ops.spec import FusedSpec, QuantSpec

QWEN = ("norm:bfloat16", "weight:bfloat16", "output:bfloat16")
ONE = ("output:bfloat16",)
BASE = FusedSpec(hidden_size=4096, head_dim=128, norm_size=128, group_size=128, roundings=QWEN)


def change(**fields: object) -> FusedSpec:
    return dataclasses.replace(BASE, **fields)  # type: ignore[arg-type]


def quant(*steps: tuple[str, float] | tuple[str], factor: tuple = (), **fields: object) -> FusedSpec:
    return change(quant=QuantSpec(scale_steps=steps, factor_steps=factor, **fields))  # type: ignore[arg-type]


SPECS = {
    "qwen": BASE,
    "fp32 chain": change(roundings=()),
    "kimi": change(roundings=ONE, activation="sigmoid"),
    "fp16": change(roundings=("norm:float16", "weight:float16", "output:float16")),
    "silu in bf16": change(roundings=("activation:bfloat16", *QWEN)),
    "one plus weight": change(roundings=("offset:bfloat16", *QWEN), weight_offset=1.0),
    "heads of 64": change(hidden_size=1024, head_dim=64, norm_size=64),
    "heads of 96": change(hidden_size=768, head_dim=96, norm_size=96),
    "heads of 192, groups of 256": change(hidden_size=3072, head_dim=192, norm_size=192, group_size=256),
    "heads of 320": change(hidden_size=2560, head_dim=320, norm_size=320),
    "heads of 224": change(hidden_size=1792, head_dim=224, norm_size=224),
    "heads of 256": change(hidden_size=2048, head_dim=256, norm_size=256),
    "olmo": change(hidden_size=5760, head_dim=192, norm_size=192),
    "olmo fp32 chain": change(hidden_size=5760, head_dim=192, norm_size=192, roundings=()),
    "mamba2": change(hidden_size=8192, norm_size=1024, norm_before_gate=False, roundings=ONE),
    "mamba2 decode": change(
        hidden_size=2048, norm_size=512, norm_before_gate=False, roundings=("norm:bfloat16", "weight:bfloat16")
    ),
    "zamba2": change(hidden_size=5120, norm_size=2560, norm_before_gate=False, roundings=ONE),
    "norm of 8192": change(
        hidden_size=8192, norm_size=8192, norm_before_gate=False, roundings=("gated:bfloat16", *ONE)
    ),
    "per token": change(group_size=4096, granularity="token"),
    "olmo per token": change(hidden_size=5760, head_dim=192, norm_size=192, group_size=5760, granularity="token"),
    "three heads per token": change(hidden_size=384, group_size=384, granularity="token"),
    "16384 per token": change(hidden_size=16384, group_size=16384, granularity="token"),
    "one head": change(hidden_size=128),
    "three heads": change(hidden_size=384),
    "groups of 32": change(group_size=32),
    "groups of 64": change(group_size=64),
    "groups of 256": change(group_size=256),
    "fnuz": change(fp8_dtype="float8_e4m3fnuz"),
    "fnuz to 224": change(fp8_dtype="float8_e4m3fnuz", quant=QuantSpec((("div", 224.0), ("max", 1e-7)), clamp=224.0)),
    "no floor": quant(("div", 448.0)),
    "vllm cuda": quant(("max", 1e-10), ("div_rn", 448.0), clamp=448.0),
    "hf": quant(("max", 1e-4), ("div", 448.0), factor=(("reciprocal",),), operation="multiply"),
    "hub": quant(("div", 448.0), factor=(("max", 1e-12),)),
    "inverse": quant(("max", 1e-4), ("reciprocal",), ("mul", 448.0), operation="multiply", clamp=448.0),
    "added": quant(("add", 1e-6), ("mul", 1 / 448)),
    "capped": quant(("min", 1.0), ("div", 448.0), ("max", 1e-8)),
    "clamp below": quant(("div", 448.0), ("max", 1e-7), clamp=240.0),
    "bf16 scale": quant(("div", 448.0), ("round", "bfloat16"), quotient="bfloat16"),
    "ue8m0": quant(("div", 448.0), ("max", 1e-10), ("exp2_ceil_log2",), clamp=448.0),
    "ue8m0 bits": quant(
        ("max", 1e-4), ("div", 448.0), ("ceil_pow2_bits",), factor=(("reciprocal",),), operation="multiply"
    ),
    "ue8m0 no floor": quant(("div", 448.0), ("exp2_ceil_log2",)),
    "column": quant(("div", 448.0), ("max", 1e-7), scale_layout="column"),
}


def dtype_before_quantisation(spec: FusedSpec) -> torch.dtype:
    return spec.rounding("output") or spec.rounding("weight") or torch.float32
