"""The torch back end: the protocol's face of `TorchDecoder`, on CPU or any torch device."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from mirror_sd.backends import batch_check, tapped, torch_selftest
from mirror_sd.backends.protocol import Capabilities, Float32, RaggedBatch
from mirror_sd.backends.torch_cache import empty_cache, geometry_of
from mirror_sd.backends.torch_decoder import TorchDecoder
from mirror_sd.backends.torch_linear import can_pack
from mirror_sd.backends.torch_plan import Geometry, make_plan
from mirror_sd.backends.torch_static import StaticForward
from mirror_sd.uir.program import Program

log = logging.getLogger(__name__)


class TorchBackend:
    """Raises `ValueError` on a bad batch and leaves the cache as it was.

    is_static: plans of few shapes, as on an accelerator (`torch_static`); None: by the device.
    """

    def __init__(
        self, program: Program, device: str, precision: str, *, is_static: bool | None = None
    ) -> None:
        self._device = torch.device(device)
        self._is_static = self._device.type != "cpu" if is_static is None else is_static
        self._static: StaticForward | None = None
        with torch.inference_mode():
            self._decoder = TorchDecoder(program, self._device)
        self._cache: Tensor | None = None
        self._geometry: Geometry | None = None
        self._num_blocks = self._block_size = 0
        self._taps: tuple[int, ...] = ()
        self._features = np.empty((0, 0), np.float32)
        spec = program.spec
        bit_stable = torch_selftest.is_bit_stable(
            self._decoder, self._device, is_static=self._is_static
        )
        if not bit_stable:
            log.warning(
                "torch on this device (%s, %s) gives a row different bits in different batches: "
                "near-ties may be decided differently under load",
                device,
                precision,
            )
        self._capabilities = Capabilities(
            name="torch",
            device=device,
            precision=precision,
            vocab_size=spec.vocab_size,
            max_context=spec.max_context,
            bit_stable=bit_stable,
            detail=self._detail(),
            num_layers=spec.num_layers,
            hidden_size=spec.hidden_size,
        )

    def _detail(self) -> str:
        if not self._is_static:
            packs = can_pack(self._device, self._decoder.dtype)
            return "oneDNN prepacked weights" if packs else "plain products"
        if self._device.type != "cuda":
            return "static shapes"
        name = torch.cuda.get_device_name(self._device)
        return f"{name}, CUDA graphs, allocator {torch.cuda.get_allocator_backend()}"

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    @property
    def decoder(self) -> TorchDecoder:
        """For a draft head, which looks tokens up in its embedding."""
        return self._decoder

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def weight_bytes(self) -> int:
        """Of the tensors on the device; an embedding that is the head too counts for both."""
        return self._decoder.weight_bytes

    @property
    def graph_captures(self) -> int:
        """CUDA graphs captured since `allocate_kv`."""
        return 0 if self._static is None else self._static.captures

    def kv_bytes_per_block(self, block_size: int) -> int:
        spec = self._decoder.spec
        per_token = 2 * spec.kv_size * spec.num_layers * self._decoder.kv_dtype.itemsize
        return per_token * block_size

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        batch_check.check_cache(num_blocks, block_size)
        # A static plan's padding rows are written to a block of their own.
        slots = (num_blocks + self._is_static) * block_size
        self._cache = empty_cache(self._decoder, slots, self._device)
        self._geometry = geometry_of(self._decoder, block_size, self._device)
        if self._is_static:
            self._static = StaticForward(self._decoder, self._geometry, self._cache)
            self._static.tap(self._taps)
            self._static.warm_up()
        self._num_blocks, self._block_size = num_blocks, block_size

    def forward(self, batch: RaggedBatch) -> Float32:
        batch_check.check(
            batch,
            vocab_size=self._capabilities.vocab_size,
            max_context=self._capabilities.max_context,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
        )
        assert self._cache is not None and self._geometry is not None
        if self._static is not None:
            logits, self._features = self._static(batch)
            return logits
        kept = dict.fromkeys(self._taps, torch.empty(0))
        with torch.inference_mode():
            found = self._decoder.forward(
                make_plan(batch, self._geometry), self._cache, tapped=kept
            )
            if kept:
                features = torch.cat([x[: len(batch.token_ids)] for x in kept.values()], dim=1)
                self._features = features.cpu().numpy()
            result: Float32 = found[: len(batch.logit_rows)].cpu().numpy()
            return result

    def tap(self, layers: Sequence[int]) -> None:
        self._taps = tapped.checked(layers, self._capabilities.num_layers)
        width = len(self._taps) * self._capabilities.hidden_size
        self._features = np.empty((0, width), np.float32)
        if self._static is not None:
            self._static.tap(self._taps)
            self._static.warm_up()

    @property
    def features(self) -> Float32:
        return self._features
