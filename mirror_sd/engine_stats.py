"""What every engine counts, emulated ones included; light enough for those to import."""

from __future__ import annotations

from dataclasses import dataclass

from mirror_sd.messages import Pace


@dataclass(frozen=True, slots=True)
class EngineStats:
    """`steps`, `tokens` (generated) and the seconds spent on drafting, and in forwards, count since
    the start; the rest is of now. `pace` is None before anything was measured. `kv_blocks_peak`:
    the most that were used at once."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_free: int
    steps: int
    tokens: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    history_bytes: int = 0
    pace: Pace | None = None
    kv_blocks_peak: int = 0
