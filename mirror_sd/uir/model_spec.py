"""A decoder's dimensions and options: everything a back end must know besides the weights.

One shape covers the Llama, Qwen2, Qwen3 and Mistral families: pre-norm blocks of grouped-query
attention with rotary positions and a SiLU-gated MLP, RMS norms throughout. Roles of the weights
have our own names, listed by `expected_shapes`, whatever the file calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mirror_sd.errors import ModelError

Family = Literal["llama", "qwen2", "qwen3", "mistral"]
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3", "mistral")
Shape = tuple[int, ...]
_POSITIVE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads"),
    *("num_kv_heads", "head_dim", "max_context", "rope_theta", "rms_eps"),
)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; see `uir.rope`.

    `factors` (kind "factors", from a GGUF's rope_freqs) divide the frequencies one by one.
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    factors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Dimensions in elements. `windows[i]` is the sliding attention window of layer i, in tokens
    (the token itself included), or None for full attention."""

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_eps: float
    max_context: int
    windows: tuple[int | None, ...]
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ModelError(f"the model's {name} must be positive, not {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} KV heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"rotary positions need an even head dimension, not {self.head_dim}")
        if len(self.windows) != self.num_layers:
            raise ModelError(f"{len(self.windows)} windows given for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise ModelError("a sliding window must hold at least one token")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of the keys (or the values) of one token in one layer."""
        return self.num_kv_heads * self.head_dim


def layer_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Role -> shape of one layer's weights; matrices are [outputs, inputs]."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    shapes: dict[str, Shape] = {
        "attention_norm": (hidden,),
        "q": (spec.query_size, hidden),
        "k": (spec.kv_size, hidden),
        "v": (spec.kv_size, hidden),
        "o": (hidden, spec.query_size),
        "mlp_norm": (hidden,),
        "gate": (inner, hidden),
        "up": (inner, hidden),
        "down": (hidden, inner),
    }
    if spec.qkv_bias:
        shapes |= {
            "q_bias": (spec.query_size,),
            "k_bias": (spec.kv_size,),
            "v_bias": (spec.kv_size,),
        }
    if spec.output_bias:
        shapes["o_bias"] = (hidden,)
    if spec.qk_norm:
        shapes |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
    return shapes


def expected_shapes(spec: ModelSpec) -> dict[str, Shape]:
    """Name -> shape of every weight: `embedding`, `layers.<i>.<role>`, `final_norm`, `head`."""
    shapes: dict[str, Shape] = {"embedding": (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        for role, shape in layer_shapes(spec).items():
            shapes[f"layers.{layer}.{role}"] = shape
    shapes["final_norm"] = (spec.hidden_size,)
    if not spec.tied_embeddings:
        shapes["head"] = (spec.vocab_size, spec.hidden_size)
    return shapes
