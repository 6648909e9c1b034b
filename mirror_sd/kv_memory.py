"""The KV memory of an engine: as many blocks as fit its device, given up when memory runs short."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from mirror_sd import telemetry
from mirror_sd.backends.protocol import Backend, DraftHead
from mirror_sd.config import EngineConfig
from mirror_sd.host_memory import HostMemory
from mirror_sd.memory import arenas
from mirror_sd.memory.block_pool import BlockPool
from mirror_sd.memory.pressure import Level, MemoryPressure
from mirror_sd.speculative.decode_loop import DecodeLoop

logger = logging.getLogger(__name__)

# Gives the memory of blocks back to the system.
Discard = Callable[[Sequence[int]], None]


class KvMemory:
    """Allocates the cache; `pool` tells whose its blocks are. Where the back end computes in the
    memory of `host` and can give that of blocks back, it is watched; a card's memory is its back
    end's alone, taken at once.
    """

    def __init__(
        self,
        backend: Backend,
        config: EngineConfig,
        *,
        slots: int,
        device_class: str,
        clock: Callable[[], float],
        head: DraftHead | None = None,
        host: HostMemory | None = None,
    ) -> None:
        size, context = config.block_size, backend.capabilities.max_context
        if backend.capabilities.device != "cpu":
            host = None
        self.arena = arenas.plan(
            config.kv_cache_mb * 2**20,
            backend.kv_bytes_per_block(size) + (head.kv_bytes_per_block(size) if head else 0),
            sequences=slots,
            blocks_per_sequence=-(-context // size),
            free_bytes=host.free_bytes() if host is not None else None,
        )
        if self.arena.bound == "device":
            logger.warning(
                "the KV cache has %d MB, engine.kv_cache_mb asks for %d: no more memory is free",
                self.arena.size_bytes // 2**20,
                config.kv_cache_mb,
            )
        backend.allocate_kv(self.arena.blocks, size)
        self.pool = BlockPool(self.arena.blocks)
        # Below what one sequence may need nothing could be run to its end.
        self._least = min(-(-context // size), self.arena.blocks)
        self._discard: Discard | None = getattr(backend, "discard_kv", None)
        # To give up what stays resident would cost time and help nobody.
        is_watched = host is not None and self._discard is not None
        self._pressure = MemoryPressure(
            config.shed_above, host.used_share if host and is_watched else _unknown, clock
        )
        self._shed = telemetry.KV_SHED.labels(device_class)
        self._preemptions = telemetry.PREEMPTIONS.labels(device_class)

    def relieve(self, loop: DecodeLoop) -> None:
        """Before a step: look at the device's memory, and give up what the level asks for."""
        before, level = self._pressure.level, self._pressure.look()
        if level is None:
            return
        if level is not before:
            logger.warning("memory: %s", _WORDS[level])
        if level is not Level.PREEMPT:
            self.pool.limit = self.pool.num_blocks
        if level is Level.CALM:
            return
        self._give_up_prefixes()
        if level is Level.PREEMPT:
            if len(loop.running) > 1 and self.pool.used > self._least:
                loop.preempt_last()
                self._preemptions.inc()
                self._give_up_prefixes()
            self.pool.limit = max(self.pool.used, self._least)

    def _give_up_prefixes(self) -> None:
        blocks = self.pool.forget_cached()
        if blocks:
            self._shed.inc(len(blocks))
            if self._discard is not None:
                self._discard(blocks)


def _unknown() -> None:
    return None


_WORDS = {
    Level.CALM: "there is enough again",
    Level.SHED: "short; prefixes kept for later requests are given up",
    Level.PREEMPT: "nearly out; sequences of low priority give way and are computed again later",
}
