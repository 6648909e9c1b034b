"""The engine of one device: owns the back end, the KV pool and the decode loop.

`add`, `step`, `abort`. One thread; no sockets. The same engine serves a worker process and the
offline `mirror-sd generate`.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable

from mirror_sd import admission
from mirror_sd.backends.protocol import Backend, Capabilities, DraftHead
from mirror_sd.config import Config, EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine_backend import create_backend
from mirror_sd.engine_metrics import EngineMetrics
from mirror_sd.engine_stats import EngineStats
from mirror_sd.host_memory import HostMemory
from mirror_sd.kv_memory import KvMemory
from mirror_sd.memory.prefix_cache import PrefixCache
from mirror_sd.messages import Chunk, DeviceHealth, Finished, SamplingParams, SequenceUsage, Submit
from mirror_sd.speculative import drafters
from mirror_sd.speculative.calibration import calibrate
from mirror_sd.speculative.decode_loop import DecodeLoop, Output
from mirror_sd.speculative.draft_planner import DraftPlanner
from mirror_sd.speculative.head_source import HeadDrafting
from mirror_sd.speculative.length_controller import WindowController
from mirror_sd.speculative.remote_drafting import RemoteDrafting
from mirror_sd.speculative.sampler import open_chooser
from mirror_sd.speculative.sampling import TokenChooser
from mirror_sd.speculative.sequence import Sequence
from mirror_sd.speculative.sequence_drafts import SequenceDrafts

logger = logging.getLogger(__name__)

# Step of the ladder of degradation from which drafts are half as long.
_SHORTER_DRAFTS_LEVEL = 1


class Engine:
    """Generates sequences on one back end; the constructor allocates the KV cache."""

    def __init__(
        self,
        backend: Backend,
        engine: EngineConfig,
        speculation: SpeculationConfig,
        *,
        model_name: str,
        device_class: str,
        slots: int,
        head: DraftHead | None = None,
        remote: RemoteDrafting | None = None,
        host: HostMemory | None = None,
        choosers: Callable[[SamplingParams, Iterable[int]], TokenChooser] = open_chooser,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`choosers`: how tokens are chosen, given the parameters and what was generated before.
        `head`: a draft head made for this back end's model. `remote`: drafters elsewhere.
        `host`: whose memory is watched."""
        self._backend = backend
        self.model_name = model_name
        self.device_class = device_class
        self.slots = slots
        self._clock = clock
        self._choosers = choosers
        self._speculation = speculation
        self._prefill_chunk = engine.prefill_chunk
        self._segment_above = engine.segment_above
        size = engine.block_size
        self._memory = KvMemory(
            backend,
            engine,
            slots=slots,
            device_class=device_class,
            clock=clock,
            head=head,
            host=host,
        )
        # After the cache is there: the xla engine compiles and tests itself with it.
        self.capabilities: Capabilities = backend.capabilities
        self._pool, blocks = self._memory.pool, self._memory.arena.blocks
        self._cache = PrefixCache(self._pool, size, engine.prefix_reuse)
        self._drafters = (
            drafters.create(speculation, has_head=head is not None, has_remote=remote is not None)
            if speculation.enabled
            else None
        )
        self.remote = remote
        self._planner = DraftPlanner(
            speculation,
            self._pool,
            block_size=size,
            clock=clock,
            head=None if head is None else HeadDrafting(head, backend, blocks, size),
            remote=remote,
        )
        self._loop = DecodeLoop(
            backend,
            self._pool,
            self._cache,
            planner=self._planner,
            block_size=size,
            prefill_chunk=engine.prefill_chunk,
            segment_pace=engine.segment_pace,
            clock=clock,
        )
        self.max_context = min(self.capabilities.max_context, blocks * size)
        self._waiting: deque[Sequence] = deque()
        self._finished_early: list[Output] = []
        self._arrivals = itertools.count()
        self._steps = 0
        self._tokens = 0
        self._draft_s = self._verify_s = 0.0
        self._metrics = EngineMetrics(device_class)

    def warm_up(self, budget_s: float = 0.5) -> None:
        """Measure forwards and the head, so that drafts are as long as pays from the first request
        on. To be called before any `add`."""
        if self._drafters is not None:
            calibrate(
                self._backend,
                self._planner.cost,
                num_blocks=self._pool.num_blocks,
                block_size=self._cache.block_size,
                clock=self._clock,
                budget_s=budget_s,
            )
            self._planner.time_head()

    @property
    def has_work(self) -> bool:
        return bool(self._loop.running or self._waiting or self._finished_early)

    @property
    def draft_sources(self) -> tuple[str, ...]:
        """What a request can ask to be drafted from."""
        found = [*(self._drafters or ())]
        found += ["head"] if self.has_draft_head else []
        return (*found, *(("remote",) if self.remote is not None else ()))

    def idle(self) -> None:
        """To be called now and then while there is no work: drafters may come and go."""
        if self.remote is not None:
            self.remote.tend()
            self._metrics.record_remote(self.remote.take_counts())

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self._loop.running),
            waiting=len(self._waiting),
            kv_blocks_used=self._pool.used,
            kv_blocks_free=self._pool.free,
            kv_blocks_peak=self._pool.high_water,
            steps=self._steps,
            tokens=self._tokens,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            history_bytes=sum(drafter.nbytes for drafter in (self._drafters or {}).values()),
            pace=self._planner.cost.pace(self._prefill_chunk),
        )

    def health(self) -> DeviceHealth:
        """Nothing is known here: the probe reads the host's and the cards' sensors itself."""
        return DeviceHealth()

    def add(self, submit: Submit) -> None:
        """Queue a sequence. Raises `InvalidRequest` if it can never run here."""
        running = (s.request_id for s in (*self._waiting, *self._loop.running))
        admission.check(submit, self.model_name, self.max_context, self.capabilities, running)
        params = submit.params
        # A resumed request may have lost only its last frame, `Finished`.
        length = len(submit.prompt) + len(submit.delivered)
        if submit.delivered and (
            len(submit.delivered) >= params.max_tokens or length >= self.max_context
        ):
            usage = SequenceUsage(
                prompt_tokens=len(submit.prompt), completion_tokens=len(submit.delivered)
            )
            self._finished_early.append(
                Finished(request_id=submit.request_id, reason="length", usage=usage)
            )
            return
        tokens = [*submit.prompt, *submit.delivered]
        scores_prompt = params.prompt_logprobs and not submit.delivered
        self._waiting.append(
            Sequence(
                submit=submit,
                chain=self._cache.chain(submit.tenant),
                chooser=self._choosers(params, submit.delivered),
                drafts=self._drafts_of(submit, tokens),
                max_context=self.max_context,
                tokens=tokens,
                arrival=next(self._arrivals),
                prompt_logprobs=[None] if scores_prompt else None,
            )
        )

    def _drafts_of(self, submit: Submit, tokens: list[int]) -> SequenceDrafts | None:
        params = submit.params
        if self._drafters is None or not params.speculation:
            return None
        rule, wanted = self._speculation, params.draft_source
        # A source that is not there leaves the choice to us.
        only = wanted if wanted in self.draft_sources else "auto"
        # Under load the rows of drafts that are rejected cost others their time.
        share = 2 if submit.degrade_level >= _SHORTER_DRAFTS_LEVEL else 1
        longest = rule.max_tokens // share
        takes_remote = only in ("auto", "remote")
        return SequenceDrafts(
            self._drafters,
            tokens,
            tenant=submit.tenant,
            prompt_length=len(submit.prompt),
            longest=min(longest, params.draft_tokens) if params.draft_tokens > 0 else longest,
            only=only,
            window=None if rule.length == "bandit" else self._window(share),
            uses_head=only in ("auto", "head"),
            takes_hints=only == "auto",
            longest_remote=int(longest * submit.draft_factor + 0.5) if takes_remote else 0,
            is_sampled=params.temperature > 0,
        )

    @property
    def has_draft_head(self) -> bool:
        return self._planner.head is not None and self._planner.head.is_on

    def _window(self, share: int) -> WindowController:
        rule = self._speculation
        return WindowController(
            minimum=min(max(rule.min_tokens, 1), rule.max_tokens // share),
            maximum=rule.max_tokens // share,
            initial=rule.initial_tokens // share,
            window=rule.window,
            grow_above=rule.grow_above,
        )

    def hint(self, request_id: str, index: int, tokens: tuple[int, ...]) -> None:
        """Tokens `index .. index + len(tokens)` of another answer that this one may resemble. They
        are only ever drafts; unknown requests and ids outside the vocabulary are ignored."""
        vocab = self.capabilities.vocab_size
        if index < 0 or not all(0 <= token < vocab for token in tokens):
            return
        for sequence in (*self._loop.running, *self._waiting):
            if sequence.request_id == request_id:
                self._metrics.hints.inc()
                sequence.hint(index, tokens)
                return

    def abort(self, request_id: str) -> None:
        """Drop a sequence at once and free its blocks; an unknown id is ignored (it may just have
        finished)."""
        for sequence in (*self._loop.running, *self._waiting):
            if sequence.request_id == request_id:
                self._drop(sequence)
                return

    def abort_all(self) -> None:
        for sequence in (*self._loop.running, *self._waiting):
            self._drop(sequence)
        self._finished_early.clear()

    def _drop(self, sequence: Sequence) -> None:
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            if sequence.drafts is not None:  # it may have run before
                sequence.drafts.close()
        else:
            self._loop.end(sequence)

    def step(self) -> list[Output]:
        """Admit, run one forward, return what it produced."""
        outputs, self._finished_early = self._finished_early, []
        self._memory.relieve(self._loop)
        self._admit()
        begin = self._clock()
        made = self._loop.step()
        self._tokens += sum(len(item.tokens) for item in made if isinstance(item, Chunk))
        outputs.extend(made)
        self._requeue_preempted()
        if self._loop.report.tokens:
            self._steps += 1
            self._account(self._clock() - begin)
        return outputs

    def _account(self, seconds: float) -> None:
        report = self._loop.report
        self._draft_s += report.drafts.seconds
        if report.drafts.by_source:
            self._verify_s += report.forward_s
        self._metrics.record(self._loop, seconds)
        if self.remote is not None:
            self._metrics.record_remote(self.remote.take_counts())
        head = self._planner.head
        if head is not None and not head.is_on:
            self._planner.head = None
            self._metrics.head_failed()

    def _admit(self) -> None:
        while self._waiting and len(self._loop.running) < self.slots:
            sequence = self._waiting[0]
            if sequence.prompt_logprobs is None:
                sequence.table = self._cache.take(sequence.chain, sequence.tokens)
            opens_head = self._planner.shall_open_head(
                sequence, len(self._loop.running) + len(self._waiting), self._cache
            )
            sequence.computed = len(sequence.table) * self._cache.block_size
            needed = -(-len(sequence.tokens) // self._cache.block_size) - len(sequence.table)
            sequence.is_long = sequence.pending > self._segment_above
            if needed > self._pool.free and self._loop.running:
                self._loop.release(sequence)
                return
            self._waiting.popleft()
            self._loop.running.append(sequence)
            if opens_head and self._planner.head is not None:
                self._planner.head.open(sequence)
            if self.remote is not None and sequence.drafts is not None:
                sequence.drafts.draft_remotely(self.remote, sequence.submit.params)
            if sequence.completion_tokens == len(sequence.submit.delivered):
                sequence.cached_tokens = min(sequence.computed, len(sequence.submit.prompt))
            self._metrics.prefix_hits.inc(sequence.computed)

    def _requeue_preempted(self) -> None:
        displaced = sorted(self._loop.preempted, key=lambda s: s.priority, reverse=True)
        self._loop.preempted.clear()
        self._waiting.extendleft(displaced)

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if a KV block leaked or is held twice."""
        self._pool.check_integrity(s.table for s in self._loop.running)


Connect = Callable[[Capabilities], RemoteDrafting | None]


def build(
    config: Config, device_class: str, threads: int | None = None, connect: Connect | None = None
) -> Engine:
    """The engine on `create_backend`, which says what is raised."""
    return build_on(create_backend(config, device_class, threads), config, device_class, connect)


def build_on(
    backend: Backend, config: Config, device_class: str, connect: Connect | None = None
) -> Engine:
    """The engine that the configuration describes for a class, on a back end loaded before, with
    its draft head, and with the drafters that `connect` knows for it.

    Raises `DraftMismatch` where the settings name a draft that was made for another model.
    """
    from mirror_sd import draft_store, model_store
    from mirror_sd.backends import draft_registry

    files = model_store.resolve(config.model.path)
    engine = Engine(
        backend,
        config.engine,
        config.speculation,
        model_name=config.model.served_name or files.name,
        device_class=device_class,
        slots=config.scheduler.max_batch_size.of(device_class),
        host=HostMemory(),
        head=draft_store.open_head(
            config,
            files,
            device_class,
            lambda program: draft_registry.create(backend, program, threads=None),
        ),
        remote=connect(backend.capabilities) if connect is not None else None,
    )
    engine.warm_up()
    return engine
