"""Rotary position frequencies, plain and scaled.

Formulas and their float32 order of operations follow transformers' `modeling_rope_utils`, so that
our fp32 logits can be held against it: linear (kaiokendev), llama3 (Llama 3.1), YaRN (Peng et al.,
arXiv 2309.00071).
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mirror_sd.uir.model_spec import ModelSpec, RopeScaling

Float32 = NDArray[np.float32]


def plain_frequencies(theta: float, head_dim: int) -> Float32:
    """[head_dim / 2] radians per position, without scaling."""
    return np.divide(1.0, _periods(theta, head_dim), dtype=np.float32)


def _periods(theta: float, head_dim: int) -> Float32:
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    # The power in float64: numpy's own in float32 is an ulp off, an angle of 1e-4 at 4,000 tokens.
    return np.power(np.float64(theta), exponents.astype(np.float64)).astype(np.float32)


def inverse_frequencies(spec: ModelSpec) -> tuple[Float32, float]:
    """([head_dim / 2] radians per position, the factor that cosines and sines are scaled by)."""
    periods = _periods(spec.rope_theta, spec.head_dim)
    plain = plain_frequencies(spec.rope_theta, spec.head_dim)
    scaling = spec.rope_scaling
    if scaling is None:
        return plain, 1.0
    if scaling.kind == "linear":
        return np.divide(plain, scaling.factor, dtype=np.float32), 1.0
    if scaling.kind == "factors":
        return np.divide(plain, scaling.factors, dtype=np.float32), 1.0
    if scaling.kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(periods, scaling, spec), _yarn_attention_factor(scaling)


def _llama3(plain: Float32, scaling: RopeScaling) -> Float32:
    wavelengths = 2 * math.pi / plain
    longest = scaling.original_context / scaling.low_freq_factor
    shortest = scaling.original_context / scaling.high_freq_factor
    slowed = np.where(wavelengths > longest, plain / np.float32(scaling.factor), plain)
    smooth = (scaling.original_context / wavelengths - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    smoothed = (1 - smooth) * slowed / np.float32(scaling.factor) + smooth * slowed
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return np.asarray(np.where(between, smoothed, slowed), np.float32)


def _yarn(periods: Float32, scaling: RopeScaling, spec: ModelSpec) -> Float32:
    def dimension_of(rotations: float) -> float:
        turns = scaling.original_context / (rotations * 2 * math.pi)
        return spec.head_dim * math.log(turns) / (2 * math.log(spec.rope_theta))

    low, high = dimension_of(scaling.beta_fast), dimension_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.head_dim - 1)
    if low == high:
        high += 0.001
    ramp = (np.arange(spec.head_dim // 2, dtype=np.float32) - low) / (high - low)
    extrapolated = 1 - np.clip(ramp, 0, 1)
    frequencies = (1 - extrapolated) / (scaling.factor * periods) + extrapolated / periods
    return np.asarray(frequencies, np.float32)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    def magnitude(mscale: float) -> float:
        return 1.0 if scaling.factor <= 1 else 0.1 * mscale * math.log(scaling.factor) + 1.0

    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
