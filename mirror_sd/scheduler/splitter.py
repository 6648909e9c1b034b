"""Who takes which part of the work: shares of the classes, drafters for verifiers, draft lengths.

Pure: profiles, demand and the probe's factors in, a `Plan` out. `class_shares` and `draft_pairs`
have the rules.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mirror_sd.scheduler import class_shares, draft_pairs
from mirror_sd.scheduler.class_shares import Demand, Split
from mirror_sd.scheduler.device_profile import DeviceProfile, DrafterProfile
from mirror_sd.scheduler.draft_pairs import Pair

__all__ = ["Demand", "DynamicSplitter", "Factors", "Pair", "Plan", "Split"]

# Upper bounds of the prompt lengths that are told apart, in tokens.
BOUNDS = (50, 500, 2000)


@dataclass(frozen=True, slots=True)
class Factors:
    """Of the probe, 0..1. `health`: by class, how much of its traffic heat, memory and deaths leave
    (the load is for the plan to see to); a class that is not named has 1. `draft`: how much of the
    usual drafting across devices the links leave room for."""

    health: Mapping[str, float] = field(default_factory=dict)
    draft: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """`splits`: shares by prompt length, the last without bound. `pairs`: which drafter drafts for
    which class, and how many tokens; empty where drafting on another device does not pay. `load`:
    requests asked for, by those that all classes can answer; above 1 they cannot."""

    splits: tuple[Split, ...]
    pairs: tuple[Pair, ...]
    load: float
    reasons: tuple[str, ...] = ()

    def drafters_of(self, device_class: str) -> tuple[Pair, ...]:
        """The pairs of a verifier, the best first."""
        return tuple(pair for pair in self.pairs if pair.verifier == device_class)

    def verifiers_of(self, drafter: str) -> tuple[Pair, ...]:
        """The pairs of a drafter."""
        return tuple(pair for pair in self.pairs if pair.drafter == drafter)

    def shares_of(self, prompt_tokens: int) -> Mapping[str, float]:
        """The shares of the classes, which add up to 1, of a prompt of that length."""
        for split in self.splits:
            if split.below is None or prompt_tokens < split.below:
                return split.shares
        raise LookupError("a plan without splits")


class DynamicSplitter:
    """`devices` answer requests, `drafters` draft for them. What is measured replaces a profile by
    `observe`; each `plan` goes by the latest."""

    def __init__(
        self,
        devices: Sequence[DeviceProfile],
        drafters: Sequence[DrafterProfile] = (),
        *,
        bounds: Sequence[int] = BOUNDS,
        max_tokens: int = 16,
    ) -> None:
        """`max_tokens`: the longest draft. Raises `ValueError` without any device."""
        if not devices:
            raise ValueError("a plan needs a device")
        self._devices = {device.device_class: device for device in devices}
        self._drafters = {drafter.name: drafter for drafter in drafters}
        self._bounds = tuple(bounds)
        self._max_tokens = max_tokens

    @property
    def devices(self) -> tuple[DeviceProfile, ...]:
        return tuple(self._devices.values())

    @property
    def drafters(self) -> tuple[DrafterProfile, ...]:
        return tuple(self._drafters.values())

    def observe(self, profile: DeviceProfile | DrafterProfile) -> None:
        """Go by this from now on. Raises `KeyError` for a device or drafter that is not there."""
        if isinstance(profile, DrafterProfile):
            if profile.name not in self._drafters:
                raise KeyError(profile.name)
            self._drafters[profile.name] = profile
        else:
            if profile.device_class not in self._devices:
                raise KeyError(profile.device_class)
            self._devices[profile.device_class] = profile

    def plan(self, demand: Demand | None = None, factors: Factors | None = None) -> Plan:
        """By default for a stack without load whose devices are well."""
        demand, factors = demand or Demand(), factors or Factors()
        devices = self.devices
        splits = class_shares.splits(devices, demand, factors.health, self._bounds)
        pairs, reasons = draft_pairs.pairs(
            devices, self.drafters, demand, factors.draft, self._max_tokens
        )
        return Plan(splits, pairs, class_shares.load(devices, demand), reasons)
