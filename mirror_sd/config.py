"""The configuration: one frozen object per process, every default in this file.

Precedence: command-line `--set key=value` > environment `MIRROR_SD__SERVER__PORT=8081` > file
(`--config`, YAML) > default. A bad value raises `ConfigError` naming the key, the value and what
is allowed. The supervisor resolves it once and hands the result to its children as JSON
(`MIRROR_SD_CONFIG_JSON` holds the path), so all processes of a stack agree.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, field_validator, model_validator

from mirror_sd.config_drafters import DrafterConfig
from mirror_sd.config_section import DeviceClass, Precision, Section, of_class
from mirror_sd.config_source import assign, describe, read
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.errors import ConfigError

ENV_PREFIX = "MIRROR_SD__"


class ServerConfig(Section):
    host: str = Field("127.0.0.1", description="address that nginx listens on")
    port: int = Field(8080, ge=1, le=65535, description="port that nginx listens on")
    admin_port: int | None = Field(
        None,
        ge=1,
        le=65535,
        description="loopback port of the admin endpoints; default: port + 1000 (or - 1000)",
    )
    keys_file: str | None = Field(
        None, description="API keys (`mirror-sd key`); default: ~/.config/mirror-sd/keys.json"
    )
    policy_file: str | None = Field(
        None, description="routing policy, a Lua table; default: openresty/lua/mirror/policy.lua"
    )
    gateways: int = Field(2, ge=1, le=64, description="gateway processes")
    max_body_bytes: int = Field(
        4 * 1024 * 1024, ge=1024, le=8 * 1024 * 1024, description="largest request body"
    )
    drain_s: float = Field(5.0, ge=0, le=600, description="grace for running answers at shutdown")
    request_timeout_s: float = Field(
        600.0, gt=0, le=86400, description="longest life of one request, queueing included"
    )
    start_timeout_s: float = Field(120.0, gt=0, description="longest wait for `ready`")

    @property
    def reachable_host(self) -> str:
        """Where a client on this machine reaches a server that listens on `host`."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(self.host, self.host)

    @property
    def effective_admin_port(self) -> int:
        if self.admin_port is not None:
            return self.admin_port
        return self.port + 1000 if self.port + 1000 <= 65535 else self.port - 1000

    @property
    def effective_keys_file(self) -> Path:
        if self.keys_file is not None:
            return Path(self.keys_file).expanduser()
        base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
        return Path(base).expanduser() / "mirror-sd" / "keys.json"


class ModelConfig(Section):
    path: str = Field(
        "smollm2-135m-instruct",
        description="a model name (`mirror-sd model list`), a Hugging Face directory or a .gguf",
    )
    served_name: str | None = Field(None, description="name in the API; default: from the path")
    max_context: int | None = Field(
        None, ge=16, description="context limit in tokens; default: the model's own"
    )


class EmulationConfig(Section):
    """What `engine: emulated` pretends to be; None takes the class's own profile."""

    latency_ms: float | None = Field(
        None, ge=0, le=60_000, description="emulated: time of a step, whatever its batch"
    )
    max_batch: int | None = Field(
        None, ge=1, le=4096, description="emulated: most sequences in a step"
    )
    prefill_tok_s: float | None = Field(
        None, ge=0.1, description="emulated: prompt tokens read in a second"
    )


class PoolConfig(Section):
    engine: Literal[
        "auto", "native", "torch", "xla", "onnxruntime", "transformers", "reference", "emulated"
    ] = Field(
        "auto",
        description="back end of the workers; auto: native on the CPU, xla on a TPU, else "
        "torch; emulated computes nothing and paces itself by `emulation`",
    )
    device: str = Field(
        "auto",
        description="device of the workers as torch names it (xla: cpu, tpu or cuda; onnxruntime: "
        "cpu, cuda, trt or openvino); auto: the pool's class must be there; with engine xla: what "
        "JAX finds",
    )
    precision: Precision = Field(
        "auto",
        description="auto: int8 on native and onnxruntime, bf16 on xla; on torch and transformers"
        " bf16, but fp16 on GPUs before Ampere and fp32 on CPUs that do not multiply bf16",
    )
    workers: int = Field(1, ge=1, le=256, description="worker processes")
    threads: int | None = Field(
        None, ge=1, description="threads a worker; default: its share of the cores"
    )
    pin: bool = Field(True, description="pin each worker to its cores")
    cores: tuple[int, ...] | None = Field(
        None, min_length=1, description="CPU numbers that the workers share; default: all"
    )
    allocator: Literal["auto", "jemalloc", "glibc"] = Field(
        "auto", description="malloc of CPU workers; auto: jemalloc where it is installed"
    )
    emulation: EmulationConfig = EmulationConfig()


class EngineConfig(Section):
    block_size: int = Field(16, ge=1, le=256, description="tokens in a KV block")
    kv_cache_mb: int = Field(1024, ge=8, description="memory of the paged KV cache of a worker")
    kv_precision: Literal["auto", "bf16", "int8", "fp32"] = Field(
        "auto",
        description="the workers' cache; int8 (native engine) halves it; auto: bf16 or fp32",
    )
    prefill_chunk: int = Field(
        256, ge=16, le=8192, description="most prompt tokens in one forward, all sequences together"
    )
    segment_above: int = Field(
        2048, ge=0, description="a prompt of more tokens is read in segments while others decode"
    )
    segment_pace: float = Field(
        1.6, gt=1, le=100, description="longest step with a segment, in steps without one"
    )
    prefix_reuse: bool = Field(True, description="keep finished KV blocks for equal prefixes")
    shed_above: float = Field(
        0.92,
        gt=0,
        le=1,
        description="used host memory from which native workers give up prefixes",
    )


class BatchSizes(Section):
    CPU: int = Field(16, ge=1, le=4096)
    GPU: int = Field(32, ge=1, le=4096)
    TPU: int = Field(64, ge=1, le=4096)

    def of(self, device_class: str) -> int:
        """The limit of a class given by its lower-case name."""
        return int(getattr(self, device_class.upper()))


class SchedulerConfig(Section):
    max_batch_size: BatchSizes = BatchSizes()
    timeout_ms: float = Field(50.0, ge=0, le=10_000, description="longest wait to fill a batch")
    similarity_threshold: float = Field(
        0.85, ge=0, le=1, description="Jaccard similarity from which requests may share an answer"
    )
    max_queue: int = Field(1024, ge=1, description="waiting requests a class; more get a 429")
    vip_queue_extra: float = Field(
        0.25, ge=0, le=10, description="share of max_queue that VIP requests may wait in besides"
    )
    max_wait_s: float = Field(
        30.0,
        gt=0,
        description="longest wait of a standard request: near it, it goes before VIP; "
        "where more is foreseen, it gets a 429",
    )
    standard_share: float = Field(
        0.1, ge=0, lt=1, description="least share of dispatches for standard while both tiers wait"
    )
    preemption: bool = Field(
        True, description="a VIP displaces the standard request with most left when slots are full"
    )
    steal_after_ms: float = Field(
        250.0, ge=0, description="a class with nothing to do takes what waited this long elsewhere"
    )
    adaptive_batch: bool = Field(
        True, description="let the batch size follow measured throughput and latency"
    )
    target_inter_token_ms: float = Field(
        200.0, gt=0, description="time between tokens above which a worker's batch shrinks"
    )
    split: Literal["policy", "measured"] = Field(
        "policy", description="shares of the classes: the policy's, or by what devices measured"
    )


class MergeConfig(Section):
    enabled: bool = Field(
        True, description="one generation for identical requests, draft hints for similar ones"
    )
    share_answers: tuple[str, ...] = Field(
        (), description="tenants whose similar requests may share an answer within the partition"
    )
    max_entries: int = Field(2048, ge=1, description="finished answers kept as draft sources")
    expire_s: float = Field(600.0, gt=0, description="how long a finished answer is kept")
    hint_similarity: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Jaccard similarity from which another answer is a draft source, "
        "where it is below scheduler.similarity_threshold",
    )
    permutations: int = Field(128, ge=16, le=512, description="length of a MinHash signature")
    min_answer_tokens: int = Field(
        8, ge=1, description="requests that ask for fewer tokens are not compared"
    )


class ProbeConfig(Section):
    enabled: bool = Field(True, description="run the probe daemon that feeds weights back")
    interval_s: float = Field(
        1.0, ge=0.1, le=2, description="time between readings; the edge forgets one after 5 s"
    )
    webhook: str | None = Field(None, description="URL that alerts are posted to")
    hot_c: float = Field(85.0, gt=0, description="temperature from which a class gives up traffic")
    cool_c: float = Field(80.0, gt=0, description="temperature below which it gets it back")
    memory_pressure: float = Field(
        0.9, gt=0, le=1, description="used memory above which a class gives up traffic"
    )
    utilisation_gap: float = Field(
        0.3, gt=0, le=1, description="difference of utilisation between classes that rebalances"
    )
    rejection_rate: float = Field(
        0.2, gt=0, le=1, description="rejected drafts from which draft quality is alerted"
    )
    inter_token_p99_ms: float = Field(
        200.0, gt=0, description="p99 time between tokens above which service degrades by a step"
    )

    @field_validator("webhook")
    @classmethod
    def _webhook_is_a_url(cls, url: str | None) -> str | None:
        if url is not None:
            parts = urlsplit(url)
            if parts.scheme not in ("http", "https") or not parts.hostname:
                raise ValueError("it must be an http or https URL with a host")
        return url

    @model_validator(mode="after")
    def _thresholds_in_order(self) -> Self:
        if self.cool_c >= self.hot_c:
            raise ValueError(f"cool_c is {self.cool_c}; it must be below hot_c, {self.hot_c}")
        return self


class BrokerConfig(Section):
    heartbeat_ms: int = Field(500, ge=50, le=10_000, description="interval of heartbeats")
    missed_heartbeats: int = Field(
        3, ge=2, le=100, description="silent intervals after which a peer is gone"
    )
    stall_s: float = Field(
        30.0,
        gt=0,
        description="a worker that has work but makes no step for this long is lost; /health fails",
    )
    fallback_s: float = Field(
        3.0, ge=0, description="a class without a worker for this long is served by another"
    )
    worker_wait_s: float = Field(
        30.0, gt=0, description="requests get a 503 when no worker was there for this long"
    )


class Config(Section):
    server: ServerConfig = ServerConfig()
    model: ModelConfig = ModelConfig()
    pools: dict[DeviceClass, PoolConfig] = Field({"cpu": PoolConfig()}, min_length=1)
    drafters: dict[DeviceClass, DrafterConfig] = Field({})
    engine: EngineConfig = EngineConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    merge: MergeConfig = MergeConfig()
    broker: BrokerConfig = BrokerConfig()
    probe: ProbeConfig = ProbeConfig()

    @model_validator(mode="after")
    def _cache_format_of_the_engines(self) -> Self:
        if self.engine.kv_precision == "int8":
            for name, pool in self.pools.items():
                if pool.engine not in ("auto", "native", "emulated"):
                    raise ValueError(
                        f"engine.kv_precision is int8, which only the native engine has;"
                        f" pools.{name}.engine is {pool.engine}"
                    )
        return self

    @model_validator(mode="after")
    def _proposals_are_no_longer_than_drafts(self) -> Self:
        most = self.speculation.max_tokens
        for name, drafter in self.drafters.items():
            if drafter.length is not None and drafter.length > most:
                raise ValueError(
                    f"drafters.{name}.length is {drafter.length}; it must not exceed"
                    f" speculation.max_tokens, which is {most}"
                )
        return self

    def pool(self, device_class: str) -> PoolConfig:
        """Raises `ConfigError` for a class without one, as does `drafter`."""
        return of_class(self.pools, "pool", device_class)

    def drafter(self, device_class: str) -> DrafterConfig:
        return of_class(self.drafters, "drafter", device_class)

    @field_validator("pools", "drafters", mode="before")
    @classmethod
    def _pool_without_settings(cls, pools: Any) -> Any:
        # `pools: {gpu:}` in YAML is a pool with all defaults.
        if isinstance(pools, Mapping):
            return {name: pool if pool is not None else {} for name, pool in pools.items()}
        return pools


def load(
    file: Path | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Resolve the configuration; `overrides` are `key.sub=value` texts, values in YAML.

    Raises `ConfigError`, one sentence, naming the key at fault and where it came from.
    """
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = read(file) if file is not None else {}
    # A pool named by --set or the environment stands beside the default one, not in its place.
    tree.setdefault("pools", {str(name): {} for name in Config().pools})
    for name, text in sorted(environ.items()):
        if name.startswith(ENV_PREFIX):
            assign(tree, name.removeprefix(ENV_PREFIX).lower().split("__"), text, name)
    for item in overrides:
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set {item!r}: write it as key.sub=value")
        assign(tree, key.strip().split("."), text, f"--set {key}")
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(describe(error)) from error
