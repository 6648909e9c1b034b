"""What the broker knows of each gateway, worker and live request."""

from __future__ import annotations

from dataclasses import dataclass

from mirror_sd.messages import Heartbeat, Register, WorkerStats


@dataclass(slots=True)
class Gateway:
    """`session` is drawn when the broker first hears it, or hears it again after giving it up;
    it goes out as `Pong.instance`, so the gateway learns that its requests are gone."""

    identity: bytes
    session: str
    heard_at: float
    pid: int = 0


@dataclass(slots=True)
class Request:
    """A live request; `frame` is its submit, kept until a worker has it, then empty."""

    gateway: bytes
    frame: bytes


@dataclass(slots=True)
class Worker:
    """`progressed_at`: when it last made a step, sent tokens, or was given work while idle."""

    identity: bytes
    register: Register
    heard_at: float
    progressed_at: float
    load: Heartbeat | None = None

    @property
    def worker_id(self) -> str:
        return self.register.worker_id

    @property
    def is_draining(self) -> bool:
        return self.load is not None and self.load.draining

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        if self.load is None or heartbeat.steps != self.load.steps:
            self.progressed_at = now
        self.load = heartbeat

    def stalled_s(self, in_flight: int, now: float) -> float:
        """Seconds without progress; 0 while it has nothing to do."""
        return max(0.0, now - self.progressed_at) if in_flight else 0.0

    def stats(self, in_flight: int, now: float) -> WorkerStats:
        load = self.load
        return WorkerStats(
            worker_id=self.worker_id,
            device_class=self.register.device_class,
            pid=self.register.pid,
            model=self.register.model,
            engine=self.register.engine,
            precision=self.register.precision,
            slots=self.register.slots,
            in_flight=in_flight,
            running=load.running if load else 0,
            waiting=load.waiting if load else 0,
            kv_blocks_used=load.kv_blocks_used if load else 0,
            kv_blocks_free=load.kv_blocks_free if load else 0,
            steps=load.steps if load else 0,
            silent_s=max(0.0, now - self.heard_at),
            stalled_s=self.stalled_s(in_flight, now),
            draining=self.is_draining,
        )
