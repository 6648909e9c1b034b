"""What the broker knows of each gateway, worker and live generation."""

from __future__ import annotations

from dataclasses import dataclass, field

from mirror_sd.messages import Heartbeat, Register, WorkerStats
from mirror_sd.scheduler.batch_limit import BatchLimit, Interval
from mirror_sd.scheduler.minhash_merger import Answer
from mirror_sd.scheduler.ticket import Ticket


@dataclass(slots=True)
class Gateway:
    """`session` is drawn when the broker first hears it, or hears it again after giving it up;
    it goes out as `Pong.instance`, so the gateway learns that its requests are gone."""

    identity: bytes
    session: str
    heard_at: float
    pid: int = 0


@dataclass(slots=True)
class Member:
    """A request that a generation answers."""

    gateway: bytes
    prompt_tokens: int


@dataclass(slots=True)
class Generation:
    """What one worker makes, for one request or for several that were merged.

    `name` is its id on the worker's side and that of the request that began it. `leader` is the
    gateway of that request, None when it has left while others stay. `frame` is its submit, kept
    until a worker has it, then empty. `answer`: what the merger knows it by; `source`: where its
    drafts come from. `made`: the tokens seen of it, those delivered before it began apart.
    """

    name: str
    ticket: Ticket
    frame: bytes
    leader: bytes | None
    delivered: int
    answer: Answer | None = None
    source: Answer | None = None
    followers: dict[str, Member] = field(default_factory=dict)
    made: int = 0

    @property
    def tokens_left(self) -> int:
        return self.ticket.tokens_left - self.made

    def members(self) -> list[tuple[str, bytes]]:
        """The requests and their gateways."""
        leader = [] if self.leader is None else [(self.name, self.leader)]
        return leader + [(name, member.gateway) for name, member in self.followers.items()]


@dataclass(slots=True)
class Worker:
    """`progressed_at`: when it last made a step, sent tokens, or was given work while idle."""

    identity: bytes
    register: Register
    heard_at: float
    progressed_at: float
    batch: BatchLimit
    load: Heartbeat | None = None
    beaten_at: float = 0.0

    @property
    def worker_id(self) -> str:
        return self.register.worker_id

    @property
    def is_draining(self) -> bool:
        return self.load is not None and self.load.draining

    def beat(self, heartbeat: Heartbeat, now: float) -> None:
        last = self.load
        if last is None or heartbeat.steps != last.steps:
            self.progressed_at = now
        if last is not None and now > self.beaten_at:
            # Of a sequence that came or went in between, half its time is counted.
            running = (heartbeat.running + last.running) / 2
            made = heartbeat.tokens - last.tokens
            self.batch.observe(Interval(running, made, now - self.beaten_at))
        self.load = heartbeat
        self.beaten_at = now

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
            emulated=self.register.emulated,
            tokens=load.tokens if load else 0,
            health=load.health if load else None,
            pace=load.pace if load else None,
            kv_blocks_peak=load.kv_blocks_peak if load else 0,
        )
