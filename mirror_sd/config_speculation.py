"""The section `speculation` of the configuration: where drafts come from, and how long they are."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from mirror_sd.config_section import Section


class SpeculationConfig(Section):
    enabled: bool = Field(True, description="draft at all; a request can still turn it off")
    drafter: Literal["auto", "lookup", "history", "head", "remote"] = Field(
        "auto", description="where drafts come from; auto chooses what pays, step by step"
    )
    draft: str = Field(
        "auto",
        description="file of the draft head; auto is the one shipped for the model, none for none",
    )
    length: Literal["window", "bandit"] = Field(
        "bandit",
        description="rule that caps the draft length: learned online, or a window over rounds",
    )
    history_tokens: int = Field(
        200_000,
        ge=0,
        le=10_000_000,
        description="tokens of past answers kept for each tenant, 23 bytes each; 0: none",
    )
    history_tenants: int = Field(
        64, ge=1, le=10_000, description="tenants whose history is kept, the latest ones"
    )
    min_tokens: int = Field(
        0,
        ge=0,
        le=32,
        description="tokens to draft where it does not seem to pay; 0: only what pays",
    )
    max_tokens: int = Field(16, ge=1, le=32, description="longest draft length")
    initial_tokens: int = Field(
        4, ge=0, le=32, description="draft length of a new sequence, where length is window"
    )
    window: int = Field(
        10, ge=1, le=1000, description="rounds that the rule looks back, where length is window"
    )
    grow_above: float = Field(
        0.8,
        ge=0,
        le=1,
        description="mean acceptance that adds 2, else 1 is taken off, where length is window",
    )
    ngram_max: int = Field(4, ge=1, le=16, description="longest n-gram that lookup matches")
    ngram_min: int = Field(2, ge=1, le=16, description="shortest n-gram that lookup matches")

    @property
    def asks_drafters(self) -> bool:
        """Whether drafts may come from another device."""
        return self.enabled and self.drafter in ("auto", "remote")

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        for low, high in (("min_tokens", "max_tokens"), ("ngram_min", "ngram_max")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ValueError(f"{low} is {least}; it must not exceed {high}, which is {most}")
        return self

    @model_validator(mode="after")
    def _history_has_room(self) -> Self:
        if self.drafter == "history" and self.history_tokens == 0:
            raise ValueError(
                "drafter is history, and history_tokens is 0: nothing would be drafted"
            )
        return self
