"""What the workers of a device class can do: the time of a forward by its rows, and their slots."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

Origin = Literal["measured", "default"]


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """The workers of one class, all alike.

    `curve`: (rows, seconds) of one forward, rows rising, seconds above 0 and never falling; a line
    lies between two points, and beyond the last one a row takes what it takes when prompts are
    read. `prefill_tok_s`: prompt tokens read in a second. `slots`: sequences that one worker runs
    at once. `origin`: whether a worker has measured it, or it is what is expected of such a device.
    Raises `ValueError` for numbers that no device has.
    """

    device_class: str
    curve: tuple[tuple[int, float], ...]
    prefill_tok_s: float
    slots: int
    workers: int = 1
    origin: Origin = "default"

    def __post_init__(self) -> None:
        rows = [point[0] for point in self.curve]
        seconds = [point[1] for point in self.curve]
        is_rising = all(a < b for a, b in pairwise(rows))
        is_slowing = all(a <= b for a, b in pairwise(seconds))
        if not self.curve or rows[0] < 1 or not is_rising:
            raise ValueError(f"the rows of a curve must rise from 1 or more: {self.curve}")
        if not 0 < seconds[0] <= seconds[-1] < float("inf") or not is_slowing:
            raise ValueError(f"the seconds of a curve must not fall, nor be 0: {self.curve}")
        if not 0 < self.prefill_tok_s < float("inf") or self.slots < 1 or self.workers < 0:
            raise ValueError(f"no device is like this: {self}")

    def step_s(self, rows: float) -> float:
        """Seconds of a forward of `rows`, which may be an average."""
        points = self.curve
        index = bisect_left(points, rows, key=lambda point: point[0])
        if index == 0:
            return points[0][1]
        before, took = points[index - 1]
        if index == len(points):
            return took + (rows - before) / self.prefill_tok_s
        after, takes = points[index]
        return took + (takes - took) * (rows - before) / (after - before)

    @property
    def latency_s(self) -> float:
        """Seconds between the tokens of a sequence that is alone."""
        return self.step_s(1)

    @property
    def tokens_per_s(self) -> float:
        """With every slot of every worker taken, nothing drafted."""
        return self.workers * self.slots / self.step_s(self.slots)

    def measured(self, seconds: Sequence[tuple[int, float]], prefill_tok_s: float) -> DeviceProfile:
        """The same with what a worker has measured; falls, which are noise, are evened out."""
        curve, most = [], 0.0
        for rows, took in seconds:
            most = max(most, took)
            curve.append((rows, most))
        return replace(self, curve=tuple(curve), prefill_tok_s=prefill_tok_s, origin="measured")

    def at_pace(self, seconds: float) -> DeviceProfile:
        """The same curve, all of it as much quicker or slower as a forward of one row is."""
        times = seconds / self.latency_s
        curve = tuple((rows, times * took) for rows, took in self.curve)
        return replace(
            self, curve=curve, prefill_tok_s=self.prefill_tok_s / times, origin="measured"
        )


@dataclass(frozen=True, slots=True)
class DrafterProfile:
    """Workers that draft for others. `device.step_s(n)` is the time of a drafted token for each of
    `n` sequences; `link_s` of a message there and back; `acceptance` the chance of a drafted token
    to be the target's, where all before were; `serves`: the classes it drafts for, by default all
    but its own; `length`: tokens of a draft, None for what pays most."""

    name: str
    device: DeviceProfile
    link_s: float = 0.001
    acceptance: float = 0.8
    serves: tuple[str, ...] = ()
    length: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.acceptance <= 1 or not 0 <= self.link_s < float("inf"):
            raise ValueError(f"no drafter is like this: {self}")

    def serves_class(self, device_class: str) -> bool:
        if self.serves:
            return device_class in self.serves
        return device_class != self.device.device_class
