"""What a worker tells of itself: its registration, its refusals, its gauges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mirror_sd import allocator, telemetry
from mirror_sd.backends.protocol import Capabilities
from mirror_sd.engine_stats import EngineStats
from mirror_sd.errors import BY_CODE, CapacityError, InvalidRequest, MirrorError
from mirror_sd.messages import DeviceHealth, Failed, Register, Submit
from workers.link import Outbound


class Engine(Protocol):
    """What the loop needs of `mirror_sd.engine.Engine` or `workers.emulated.EmulatedEngine`."""

    model_name: str
    slots: int
    max_context: int

    @property
    def capabilities(self) -> Capabilities: ...
    @property
    def has_work(self) -> bool: ...
    def add(self, submit: Submit) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def hint(self, request_id: str, index: int, tokens: tuple[int, ...]) -> None: ...
    def step(self) -> Sequence[Outbound]: ...
    def stats(self) -> EngineStats: ...
    def health(self) -> DeviceHealth:
        """What it knows of its device; called on another thread than the rest."""
        ...

    def check_integrity(self) -> None: ...
    def idle(self) -> None:
        """Called now and then while there is no work."""
        ...


class Gauges:
    """The worker's own metrics; the engine counts its steps itself."""

    def __init__(self, device_class: str, capabilities: Capabilities) -> None:
        self._running = telemetry.RUNNING.labels(device_class)
        self._kv_used = telemetry.KV_USED.labels(device_class)
        self._kv_free = telemetry.KV_FREE.labels(device_class)
        self._kv_peak = telemetry.KV_PEAK.labels(device_class)
        self._memory_peak = telemetry.MEMORY_PEAK.labels(device_class)
        self._history = telemetry.HISTORY_BYTES.labels(device_class)
        malloc = allocator.running() or "unknown"
        telemetry.ALLOCATOR_INFO.labels(device_class, malloc).set(1)
        telemetry.ENGINE_INFO.labels(
            device_class,
            capabilities.name,
            capabilities.precision,
            capabilities.isa,
            str(capabilities.bit_stable).lower(),
        ).set(1)

    def set(self, stats: EngineStats) -> None:
        self._running.set(stats.running)
        self._kv_used.set(stats.kv_blocks_used)
        self._kv_free.set(stats.kv_blocks_free)
        self._kv_peak.set(stats.kv_blocks_peak)
        peak = allocator.peak_bytes()
        if peak is not None:
            self._memory_peak.set(peak)
        self._history.set(stats.history_bytes)


def registration(engine: Engine, worker_id: str, device_class: str, pid: int) -> Register:
    """The frame that tells the broker of this worker."""
    return Register(
        worker_id=worker_id,
        device_class=device_class,
        pid=pid,
        model=engine.model_name,
        engine=engine.capabilities.name,
        precision=engine.capabilities.precision,
        slots=engine.slots,
        max_context=engine.max_context,
        emulated=engine.capabilities.is_emulated,
    )


def refusal(request_id: str, error: MirrorError) -> Failed:
    """The frame for a request that the engine did not take."""
    can_retry = isinstance(error, CapacityError)
    code = error.code
    if code not in BY_CODE:
        code = "no_worker" if can_retry else InvalidRequest.code
    return Failed(
        request_id=request_id,
        code=code or "internal_error",
        message=error.message,
        param=error.param,
        retry_after_s=error.retry_after_s,
        retryable=can_retry,
    )
