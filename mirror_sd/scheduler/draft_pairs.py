"""Which drafter drafts for which class, and how many tokens.

A round verifies k drafted tokens of each of n sequences in one forward and gives
(1 - a^(k+1)) / (1 - a) tokens of each, where a is the chance of a drafted token (Leviathan et al.,
arXiv 2211.17192). Meanwhile the drafter goes on as if all were accepted. Where they are, and it
guessed the token that the verifier adds as well (a^(k+1)), the next draft took only the time by
which it is longer than the verify; else it is waited for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mirror_sd.scheduler.class_shares import Demand
from mirror_sd.scheduler.device_profile import DeviceProfile, DrafterProfile

# A pair must bring this much: the model is no better than that.
_WORTH = 1.05


@dataclass(frozen=True, slots=True)
class Pair:
    """`length`: tokens of a draft. Times the tokens a second of the verifier alone: `speedup` where
    drafting overlaps with verifying, `serial_speedup` where each waits for the other. `covered`:
    the share of the verify time during which drafting goes on that is of use."""

    drafter: str
    verifier: str
    length: int
    speedup: float
    serial_speedup: float
    covered: float
    reason: str


def pairs(
    devices: Sequence[DeviceProfile],
    drafters: Sequence[DrafterProfile],
    demand: Demand,
    draft_factor: float,
    max_tokens: int,
) -> tuple[tuple[Pair, ...], tuple[str, ...]]:
    """The pairs that pay, and reasons for what is left out.

    Each verifier gets the drafter that serves it best beside those it serves already, the verifier
    that gains most first; a drafter that is left over helps where it is of most use.
    """
    longest = int(max_tokens * draft_factor + 0.5)
    if not drafters:
        return (), ("no drafter is configured",)
    if longest < 1:
        return (), (f"the links leave {draft_factor:.2f} of the drafting across devices: none",)
    notes: list[str] = []
    if draft_factor < 1:
        notes.append(
            f"the links leave {draft_factor:.2f} of the drafting: {longest} tokens at most"
        )
    found: list[Pair] = []
    served = dict.fromkeys((drafter.name for drafter in drafters), 0)

    def best_for(device: DeviceProfile, choice: Sequence[DrafterProfile]) -> Pair | None:
        options = [
            _pair(device, drafter, _streams(device, demand), served[drafter.name], longest)
            for drafter in choice
            if drafter.serves_class(device.device_class) and drafter.device.workers
        ]
        return max(options, key=lambda pair: pair.speedup, default=None)

    alive = [device for device in devices if device.workers]
    firsts = {device.device_class: best_for(device, drafters) for device in alive}
    for device in sorted(alive, key=lambda item: -_gain(item, firsts[item.device_class])):
        pair = best_for(device, drafters)
        if pair is None:
            notes.append(f"no drafter serves {device.device_class}")
        elif pair.speedup < _WORTH:
            notes.append(f"{pair.drafter} would not speed up {pair.verifier}: {pair.reason}")
        else:
            found.append(pair)
            served[pair.drafter] += device.workers
    for drafter in drafters:
        if served[drafter.name] == 0:
            spare = [p for device in alive if (p := best_for(device, [drafter])) is not None]
            best = max(spare, key=lambda pair: pair.speedup, default=None)
            if best is not None and best.speedup >= _WORTH:
                found.append(best)
    return tuple(found), tuple(dict.fromkeys(notes))


def _gain(device: DeviceProfile, pair: Pair | None) -> float:
    return device.tokens_per_s * (pair.speedup - 1.0) if pair is not None else 0.0


def _streams(device: DeviceProfile, demand: Demand) -> float:
    """Sequences of a worker now, at least one."""
    running: Mapping[str, int] = demand.in_flight
    streams = running.get(device.device_class, 0) / max(device.workers, 1)
    return min(max(streams, 1.0), device.slots)


def _pair(
    device: DeviceProfile, drafter: DrafterProfile, streams: float, served: int, longest: int
) -> Pair:
    """With the drafter's own length, or that which gives most. `served`: workers that it serves
    already."""
    plain_s = device.step_s(streams)
    each = streams * (served + device.workers) / drafter.device.workers
    token_s = drafter.device.step_s(each)
    chance = min(drafter.acceptance, 0.999)
    best: Pair | None = None
    fixed = drafter.length
    lengths = range(1, longest + 1) if fixed is None else (min(fixed, longest),)
    for length in lengths:
        verify_s = device.step_s(streams * (length + 1))
        draft_s = length * token_s + drafter.link_s
        tokens = (1 - chance ** (length + 1)) / (1 - chance)
        hit = chance ** (length + 1)
        round_s = verify_s + (1 - hit) * draft_s + hit * max(draft_s - verify_s, 0.0)
        speedup = tokens * plain_s / round_s
        if best is None or speedup > best.speedup:
            best = Pair(
                drafter.name,
                device.device_class,
                length,
                speedup,
                tokens * plain_s / (verify_s + draft_s),
                hit * min(draft_s / verify_s, 1.0),
                f"{length} tokens take {1e3 * draft_s:.1f} ms to draft, {1e3 * verify_s:.1f} ms to"
                f" verify, and give {tokens:.2f} tokens; a step without takes"
                f" {1e3 * plain_s:.1f} ms",
            )
    assert best is not None
    return best
