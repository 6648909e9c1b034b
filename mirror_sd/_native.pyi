"""The optional C++ part; `python -m mirror_sd.backends.native.build_extension` builds it.

Arrays are C-contiguous and of exactly the dtype named, else TypeError; a bad shape or value is a
ValueError. What takes long releases the GIL.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends.protocol import Float32, Int32

# Sampling: mirror_sd/speculative/src. `isa` is one of `available_isas()`; "" takes MIRROR_SD_ISA
# of the environment, else the best. The results are the same bits with each.

class InvalidLogits(ArithmeticError): ...

class Chooser:
    """See mirror_sd.speculative.sampler.NativeChooser."""

    def __init__(
        self,
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        presence_penalty: float,
        frequency_penalty: float,
        seed: int,
        bias: Sequence[tuple[int, float]],
        stop_tokens: Sequence[int],
        completion: Sequence[int],
        isa: str = "",
    ) -> None: ...
    def commit(self, token: int) -> None: ...
    def choose(self, logits: Float32, position: int) -> int: ...
    def judge(
        self, logits: Float32, draft: Sequence[int], position: int, room: int
    ) -> tuple[list[int], int, int]:
        """Tokens, how many of the draft are among them, and 0, 1 (stop token) or 2 (no room)."""

def token_logprob(
    logits: Float32, token: int, best: int, isa: str = ""
) -> tuple[float, list[tuple[int, float]]]: ...
def sampling_isa(isa: str = "") -> str:
    """The name of the instruction set that sampling uses."""

def philox_words(counter: Sequence[int], key: Sequence[int]) -> list[int]: ...
def gumbel(seed: int, position: int, token: int) -> float: ...
def available_isas() -> list[str]:
    """Instruction sets of this build that this machine runs, best first."""

# The decoder: mirror_sd/backends/native/src.

def usable_cores(threads: int) -> list[int]:
    """A core for each thread, or nothing if this process may not use as many."""

def packed_bytes(format: str, outputs: int, inputs: int) -> int: ...
def pack(weights: Float32, format: str, threads: int, out: NDArray[np.uint8]) -> float:
    """Packs [outputs, inputs] into `out`; returns the matrix's multiplier."""

def read_bandwidth(threads: int, bytes: int, rounds: int = 5) -> float:
    """GB/s that the threads read together, each its own part of `bytes`; the best of the rounds."""

class Decoder:
    """See mirror_sd.backends.native.native_backend."""

    def __init__(
        self,
        *,
        vocab_size: int,
        hidden_size: int,
        intermediate_size: int,
        layers: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        max_context: int,
        rms_eps: float,
        rope_scale: float,
        frequencies: Float32,
        windows: Sequence[int],
        cache: str,
        isa: str,
        threads: int,
        cores: Sequence[int],
    ) -> None: ...
    def set_matrix(
        self,
        role: str,
        layer: int,
        data: NDArray[np.uint8],
        outputs: int,
        inputs: int,
        multiplier: float,
        format: str,
    ) -> None: ...
    def set_vector(self, role: str, layer: int, data: Float32) -> None: ...
    def seal(self) -> None:
        """After the last weight."""

    def kv_bytes_per_block(self, block_size: int) -> int: ...
    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...
    def discard_kv(self, blocks: Int32) -> None: ...
    def forward(
        self,
        token_ids: Int32,
        positions: Int32,
        sequence_offsets: Int32,
        block_tables: tuple[Int32, ...],
        logit_rows: Int32,
        logits: Float32,
        taps: Sequence[int] = (),
        features: Float32 | None = None,
    ) -> None:
        """Fills the first rows of `logits` [at least R, vocab], and of `features` [at least T,
        taps * hidden_size] if there are taps."""

    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...

class DraftHead:
    """See mirror_sd.backends.native.native_draft. Keeps its target alive."""

    def __init__(
        self,
        target: Decoder,
        *,
        feature_size: int,
        token_ids: Int32,
        intermediate_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rms_eps: float,
        frequencies: Float32,
        cache: str,
    ) -> None: ...
    def set_matrix(
        self,
        role: str,
        data: NDArray[np.uint8],
        outputs: int,
        inputs: int,
        multiplier: float,
        format: str,
    ) -> None: ...
    def set_vector(self, role: str, data: Float32) -> None: ...
    def seal(self) -> None:
        """After the last weight."""

    def kv_bytes_per_block(self, block_size: int) -> int: ...
    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...
    def draft(
        self,
        token_ids: Int32,
        positions: Int32,
        sequence_offsets: Int32,
        block_tables: tuple[Int32, ...],
        features: Float32,
        steps: Int32,
        floors: Float32,
        temperatures: Float32,
        seeds: NDArray[np.uint64],
        tokens: Int32,
        probabilities: Float32,
    ) -> None:
        """Fills `tokens` and `probabilities` [S, at least the most steps]."""
