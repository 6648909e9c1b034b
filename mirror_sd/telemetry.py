"""Every Prometheus metric of the Python processes, declared once.

The processes of a stack share prometheus_client's multiprocess directory (the supervisor sets
`PROMETHEUS_MULTIPROC_DIR`), so whichever gateway is scraped answers for all of them, and counters
survive the death of the process that made them. The edge's own metrics are in
`openresty/lua/mirror/metrics.lua`; nginx joins both into one scrape.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_HELP: dict[str, str] = {}


def _counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
    _HELP[name.removesuffix("_total")] = text
    return Counter(name, text, labels)


def _gauge(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    _HELP[name] = text
    return Gauge(name, text, labels, multiprocess_mode="livesum")


def _latest(name: str, text: str, labels: tuple[str, ...] = ()) -> Gauge:
    """A gauge that one process at a time sets: its successor's value replaces it."""
    _HELP[name] = text
    return Gauge(name, text, labels, multiprocess_mode="livemostrecent")


def _histogram(
    name: str, text: str, buckets: tuple[float, ...], labels: tuple[str, ...] = ()
) -> Histogram:
    _HELP[name] = text
    return Histogram(name, text, labels, buckets=buckets)


# Gateway. `class` is the device class, `tier` vip or standard, `status` the HTTP status.
REQUESTS = _counter(
    "mirror_gateway_requests_total",
    "Generation requests answered, streams counted when they end.",
    ("class", "tier", "status"),
)
STREAM_ERRORS = _counter(
    "mirror_gateway_stream_errors_total",
    "Streams that ended with an error event after they had begun.",
    ("class", "tier"),
)
DISCONNECTS = _counter(
    "mirror_gateway_disconnects_total", "Clients that left before their answer was complete."
)
RESUMES = _counter(
    "mirror_gateway_resumes_total", "Sequences resubmitted after a worker or the broker was lost."
)
DISPLACEMENTS = _counter(
    "mirror_gateway_displacements_total",
    "Times that a running sequence gave its slot to a VIP request; it goes on where it was.",
)
TIME_TO_FIRST_TOKEN = _histogram(
    "mirror_gateway_time_to_first_token_seconds",
    "From the request's arrival at the gateway to its first token.",
    _SECONDS,
    ("class", "tier"),
)
INTER_TOKEN_LATENCY = _histogram(
    "mirror_gateway_inter_token_latency_seconds",
    "Time between tokens of one sequence; tokens that arrive together share the gap.",
    (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 2.5),
    ("class", "tier"),
)
PROMPT_TOKENS = _counter("mirror_gateway_prompt_tokens_total", "Prompt tokens.", ("class",))
COMPLETION_TOKENS = _counter(
    "mirror_gateway_completion_tokens_total", "Completion tokens delivered.", ("class",)
)

# Broker.
QUEUE_DEPTH = _gauge("mirror_broker_queue_depth", "Requests waiting.", ("class", "tier"))
QUEUE_AGE = _gauge(
    "mirror_broker_queue_oldest_age_seconds", "Age of the oldest waiting request.", ("class",)
)
QUEUE_WAIT = _histogram(
    "mirror_broker_queue_wait_seconds",
    "Time a request waited before it was dispatched.",
    _SECONDS,
    ("class", "tier"),
)
IN_FLIGHT = _gauge("mirror_broker_in_flight", "Requests held by workers.", ("class",))
WORKERS = _gauge("mirror_broker_workers", "Live workers.", ("class",))
WORKERS_LOST = _counter(
    "mirror_broker_workers_lost_total", "Workers that fell silent or left.", ("class",)
)
FALLBACKS = _counter(
    "mirror_broker_class_fallbacks_total",
    "Requests dispatched to another class than the one they asked for.",
    ("class", "served_by"),
)
STEALS = _counter(
    "mirror_broker_steals_total",
    "Requests taken by an idle class because the one they asked for was busy.",
    ("class", "served_by"),
)
BROKER_DISPLACEMENTS = _counter(
    "mirror_broker_displacements_total",
    "Generations stopped to make room for a VIP; they go on later.",
    ("class",),
)
MERGED = _counter(
    "mirror_broker_merged_total",
    "Requests merged with another: coalesced (identical), shared (opted in), hinted (drafts).",
    ("kind", "class"),
)
DRAFT_SOURCES = _gauge(
    "mirror_broker_draft_sources", "Finished answers kept to draft similar ones from."
)
BATCH_LIMIT = _gauge(
    "mirror_broker_batch_limit", "Sequences that the workers are given at once.", ("class",)
)
BAD_FRAMES = _counter("mirror_broker_bad_frames_total", "Frames dropped as unreadable.", ("peer",))

# Worker.
BATCH_SEQUENCES = _histogram(
    "mirror_worker_batch_sequences",
    "Sequences in one forward.",
    (1, 2, 4, 8, 16, 32, 64, 128),
    ("class",),
)
BATCH_TOKENS = _histogram(
    "mirror_worker_batch_tokens",
    "Tokens in one forward: prompt, decode and draft rows.",
    (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024),
    ("class",),
)
XLA_COMPILATIONS = _counter(
    "mirror_worker_xla_compilations_total",
    "Programs that the xla engine compiled or read; only before its first forward.",
)
STEP_SECONDS = _histogram(
    "mirror_worker_step_seconds",
    "Duration of one engine step.",
    (0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2.5),
    ("class",),
)
DRAFT_SECONDS = _counter("mirror_worker_draft_seconds_total", "Time spent drafting.", ("class",))
VERIFY_SECONDS = _counter(
    "mirror_worker_verify_seconds_total", "Time of forwards that verified a draft.", ("class",)
)
DRAFTED = _counter("mirror_worker_drafted_tokens_total", "Draft tokens verified.", ("class",))
ACCEPTED = _counter("mirror_worker_accepted_tokens_total", "Draft tokens accepted.", ("class",))
ACCEPTED_LENGTH = _histogram(
    "mirror_worker_accepted_length",
    "Draft tokens accepted in one verification round.",
    (0, 1, 2, 3, 4, 6, 8, 12, 16, 32),
    ("class",),
)
SOURCE_DRAFTED = _counter(
    "mirror_worker_source_drafted_tokens_total",
    "Draft tokens verified, by where they came from: lookup, history, hint, head, remote.",
    ("class", "source"),
)
SOURCE_ACCEPTED = _counter(
    "mirror_worker_source_accepted_tokens_total",
    "Draft tokens accepted, by where they came from.",
    ("class", "source"),
)
DRAFT_REPETITIONS = _counter(
    "mirror_worker_draft_repetitions_total",
    "Times that an answer began to accept the same n-gram again and again; its drafts are halved.",
    ("class",),
)
DRAFT_HEAD_FAILURES = _counter(
    "mirror_worker_draft_head_failures_total",
    "Draft heads switched off because they failed; their workers go on without.",
    ("class",),
)
DRAFT_HINTS = _counter(
    "mirror_worker_draft_hints_total",
    "Pieces of a similar answer that came to draft from.",
    ("class",),
)
DRAFT_HEAD = _latest(
    "mirror_worker_draft_head",
    "1 where a draft head drafts, 0 where one is set and cannot be used; absent where none is.",
    ("class",),
)
HISTORY_BYTES = _gauge(
    "mirror_worker_history_bytes", "Memory of the answers kept to draft others from.", ("class",)
)
KV_USED = _gauge("mirror_worker_kv_blocks_used", "KV blocks held by sequences.", ("class",))
KV_FREE = _gauge(
    "mirror_worker_kv_blocks_free", "KV blocks free or holding only reusable prefixes.", ("class",)
)
KV_PEAK = _gauge(
    "mirror_worker_kv_blocks_peak", "Most KV blocks that sequences held at once.", ("class",)
)
KV_SHED = _counter(
    "mirror_worker_kv_blocks_shed_total",
    "KV blocks of reusable prefixes given up because host memory was short.",
    ("class",),
)
MEMORY_PEAK = _gauge(
    "mirror_worker_memory_peak_bytes", "Most memory that the workers had resident.", ("class",)
)
PREFIX_HITS = _counter(
    "mirror_worker_prefix_cached_tokens_total",
    "Prompt tokens found in the prefix cache.",
    ("class",),
)
PREEMPTIONS = _counter(
    "mirror_worker_preemptions_total", "Sequences displaced for want of KV blocks.", ("class",)
)
RUNNING = _gauge("mirror_worker_running_sequences", "Sequences in the engine.", ("class",))
ALLOCATOR_INFO = _gauge(
    "mirror_worker_allocator_info", "1 for each live worker's malloc.", ("class", "allocator")
)
ENGINE_INFO = _gauge(
    "mirror_worker_engine_info",
    "1 for each live worker's engine.",
    ("class", "engine", "precision", "isa", "bit_stable"),
)

REMOTE_DRAFTERS = _gauge(
    "mirror_worker_drafters", "Drafters on other devices that workers can have now.", ("class",)
)
REMOTE_WAIT_SECONDS = _counter(
    "mirror_worker_draft_wait_seconds_total", "Time spent waiting for drafters.", ("class",)
)
REMOTE_LATE = _counter(
    "mirror_worker_draft_waits_late_total",
    "Waits for a drafter that ended without a proposal.",
    ("class",),
)
REMOTE_STALE = _counter(
    "mirror_worker_stale_proposals_total",
    "Proposals that came too late, or made no sense, and were dropped.",
    ("class",),
)
REMOTE_LOST = _counter(
    "mirror_worker_draft_sessions_lost_total",
    "Sequences whose drafter was lost or refused them; they go on with local drafts.",
    ("class",),
)

# Drafter.
DRAFTER_SESSIONS = _gauge("mirror_drafter_sessions", "Sequences drafted for.", ("class",))
DRAFTER_TOKENS = _counter("mirror_drafter_tokens_total", "Tokens drafted.", ("class",))
DRAFTER_PACE = _latest(
    "mirror_drafter_seconds_per_token", "Time of a drafted token, lately.", ("class",)
)
DRAFTER_BAD_FRAMES = _counter(
    "mirror_drafter_bad_frames_total", "Frames dropped as unreadable.", ("class",)
)

# Pool.
WORKER_RESTARTS = _counter(
    "mirror_pool_worker_restarts_total", "Workers started again after they died.", ("class",)
)

# Probe. NaN is a value that cannot be read.
PROBE_DOCUMENTS = _counter(
    "mirror_probe_documents_total",
    "Weight documents by what the edge did: accepted, refused, unreachable.",
    ("result",),
)
PROBE_READ_ERRORS = _counter("mirror_probe_read_errors_total", "Readings that failed.", ("source",))
PROBE_FACTOR = _latest("mirror_probe_factor", "Share of its policy's traffic left.", ("class",))
PROBE_UTILISATION = _latest("mirror_probe_utilisation_ratio", "How busy, 0..1.", ("class",))
PROBE_TEMPERATURE = _latest(
    "mirror_probe_temperature_celsius", "Temperature of the hottest device.", ("class",)
)
PROBE_MEMORY = _latest("mirror_probe_memory_pressure_ratio", "Memory in use, 0..1.", ("class",))
PROBE_PCIE = _latest("mirror_probe_pcie_ratio", "Share of the PCIe link in use.", ("class",))
PROBE_DRAFT_FACTOR = _latest(
    "mirror_probe_draft_factor", "Share of drafting across devices that PCIe leaves room for."
)
PROBE_DEGRADE_LEVEL = _latest("mirror_probe_degrade_level", "Step of the ladder, 0..3.")
PROBE_DEGRADE_STEPS = _counter(
    "mirror_probe_degrade_steps_total", "Steps taken on the ladder.", ("direction",)
)
PROBE_P99 = _latest(
    "mirror_probe_inter_token_p99_seconds", "p99 time between tokens, over 10 seconds."
)
PROBE_REJECTION = _latest(
    "mirror_probe_rejection_ratio", "Share of draft tokens rejected, over 30 seconds."
)
PROBE_ALERTS = _latest("mirror_probe_alerts_firing", "Subjects for which it fires.", ("alert",))
PROBE_WEBHOOK_POSTS = _counter(
    "mirror_probe_webhook_posts_total",
    "Alerts for the webhook: delivered, failed, dropped.",
    ("result",),
)


class _Documented(Collector):
    """The multiprocess files do not keep help texts; put them back."""

    def collect(self) -> Iterable[Metric]:
        for metric in MultiProcessCollector(None).collect():  # type: ignore[no-untyped-call]
            metric.documentation = _HELP.get(metric.name, metric.documentation)
            yield metric


def exposition() -> bytes:
    """All processes' metrics in the Prometheus text format; reads files, so call it off the loop.

    Needs `PROMETHEUS_MULTIPROC_DIR`.
    """
    registry = CollectorRegistry()
    registry.register(_Documented())
    return generate_latest(registry)
