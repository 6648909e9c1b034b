"""The emulated engine: its pace, its text, its faults, and that it says what it is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from mirror_sd.backends.protocol import Capabilities
from mirror_sd.config import Config, EmulationConfig
from mirror_sd.errors import ContextLengthExceeded, InvalidRequest
from mirror_sd.messages import Chunk, Finished, Pace, SamplingParams, Submit
from mirror_sd.run_dir import RunDir
from mirror_sd.uir import stand_in_tokenizer
from workers import emulated, engines, profile
from workers.emulated import ANSWER_TOKENS, EmulatedEngine
from workers.emulated_device import MAX_LATENCY_FACTOR, ControlFile, EmulatedDevice
from workers.emulated_text import EmulatedText, word_ids
from workers.profile import Profile
from workers.report import registration


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


class Crash(Exception):
    pass


def crash() -> None:
    raise Crash


class Bench:
    def __init__(self, directory: Path, paces: Profile, slots: int = 64) -> None:
        self.time = Time()
        self.file = directory / "emulation-gpu.json"
        self.device = EmulatedDevice(ControlFile(self.file), self.time)
        self.engine = EmulatedEngine(
            paces,
            EmulatedText([11, 12, 13, 14, 15]),
            self.device,
            Capabilities("emulated", "gpu", "none", 100, 1000, True, is_emulated=True),
            model_name="m",
            device_class="gpu",
            slots=slots,
            prefill_chunk=256,
            block_size=16,
            clock=self.time,
            wait=self.time.wait,
            crash=crash,
        )

    def control(self, **values: object) -> None:
        # A new file each time, as `mirror-sd emulate` puts it there.
        fresh = self.file.with_suffix(".new")
        fresh.write_text(json.dumps(values))
        fresh.replace(self.file)

    def run(self, *submits: Submit) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {s.request_id: list(s.delivered) for s in submits}
        for submit in submits:
            self.engine.add(submit)
        self.ends: dict[str, Finished] = {}
        while self.engine.has_work:
            for output in self.engine.step():
                if isinstance(output, Chunk):
                    assert output.index == len(tokens[output.request_id])
                    tokens[output.request_id].extend(output.tokens)
                else:
                    assert isinstance(output, Finished)
                    self.ends[output.request_id] = output
        return tokens


GPU = Profile(latency_ms=20, max_batch=32, prefill_tok_s=20_000)


def ask(
    name: str = "a",
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 8,
    delivered: Sequence[int] = (),
    **params: object,
) -> Submit:
    return Submit(
        request_id=name,
        model="m",
        prompt=tuple(prompt),
        delivered=tuple(delivered),
        params=SamplingParams(max_tokens=max_tokens, seed=1, **params),  # type: ignore[arg-type]
    )


def test_a_full_batch_gets_one_token_each_in_the_time_of_a_step(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU)
    begin = bench.time.now
    tokens = bench.run(*(ask(f"r{i}", max_tokens=10) for i in range(32)))
    assert [len(t) for t in tokens.values()] == [10] * 32
    assert bench.time.now - begin == pytest.approx(0.2)
    assert bench.engine.stats().tokens == 320
    assert bench.engine.stats().kv_blocks_used == 0


def test_the_time_that_the_loop_takes_between_steps_does_not_slow_the_device(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, GPU)
    begin = bench.time.now
    bench.engine.add(ask(max_tokens=50))
    while bench.engine.has_work:
        bench.engine.step()
        bench.time.now += 0.004
    assert bench.time.now - begin == pytest.approx(50 * 0.02 + 0.004)


def test_a_long_prompt_is_read_in_pieces_at_the_prefill_rate(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Profile(latency_ms=20, max_batch=32, prefill_tok_s=1000))
    begin = bench.time.now
    bench.run(ask(prompt=range(512), max_tokens=1))
    assert bench.time.now - begin == pytest.approx(0.512)


def test_the_null_engine_answers_within_the_step_that_admits(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Profile(latency_ms=0, max_batch=8, prefill_tok_s=1))
    bench.engine.add(ask(prompt=range(900), max_tokens=1))
    outputs = bench.engine.step()
    assert [type(output) for output in outputs] == [Chunk, Finished]
    assert bench.time.now == 100.0


def test_the_pace_told_is_that_of_the_profile_as_the_control_file_slows_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Profile(latency_ms=20, max_batch=4, prefill_tok_s=1000))
    assert bench.engine.stats().pace == Pace(curve=((1, 0.02), (4, 0.02)), prefill_tok_s=1000.0)
    bench.control(latency_factor=2.0)
    bench.run(ask(max_tokens=2))
    assert bench.engine.stats().pace == Pace(curve=((1, 0.04), (4, 0.04)), prefill_tok_s=500.0)
    null = Bench(tmp_path, Profile(latency_ms=0, max_batch=4, prefill_tok_s=1000))
    assert null.engine.stats().pace is None


def test_more_sequences_than_slots_wait(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU, slots=2)
    for index in range(5):
        bench.engine.add(ask(f"r{index}"))
    bench.engine.step()
    assert (bench.engine.stats().running, bench.engine.stats().waiting) == (2, 3)


def test_slots_are_the_smaller_of_profile_and_scheduler(tmp_path: Path) -> None:
    assert Bench(tmp_path, GPU, slots=64).engine.slots == 32
    assert Bench(tmp_path, GPU, slots=16).engine.slots == 16


@pytest.mark.parametrize("cut", [0, 1, 5, 8])
def test_a_resumed_answer_goes_on_with_the_same_text(tmp_path: Path, cut: int) -> None:
    bench = Bench(tmp_path, GPU)
    whole = bench.run(ask("whole"))["whole"]
    resumed = bench.run(ask("resumed", delivered=whole[:cut]))
    assert resumed["resumed"] == whole
    assert bench.ends["resumed"].usage.completion_tokens == 8
    assert bench.run(ask("other", prompt=(9, 9)))["other"] != whole


def test_an_answer_without_a_small_limit_ends_by_itself(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU)
    tokens = bench.run(ask(max_tokens=900), ask("b", max_tokens=3))
    assert len(tokens["a"]) == ANSWER_TOKENS
    assert bench.ends["a"].reason == "stop"
    assert bench.ends["b"].reason == "length"


def test_what_is_asked_for_besides_tokens_is_there(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU)
    bench.engine.add(ask(prompt=(5, 6), logprobs=2, prompt_logprobs=True))
    [chunk] = bench.engine.step()
    assert isinstance(chunk, Chunk)
    assert chunk.logprobs is not None and len(chunk.logprobs) == 1
    assert chunk.prompt_logprobs is not None and len(chunk.prompt_logprobs) == 2


def test_an_aborted_sequence_gives_nothing_more(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU, slots=1)
    bench.engine.add(ask("runs"))
    bench.engine.add(ask("waits"))
    bench.engine.step()
    bench.engine.abort("runs")
    bench.engine.abort("waits")
    bench.engine.abort("unknown")
    assert not bench.engine.has_work


def test_what_can_never_run_is_refused(tmp_path: Path) -> None:
    engine = Bench(tmp_path, GPU).engine
    with pytest.raises(ContextLengthExceeded):
        engine.add(ask(prompt=range(1000)))
    with pytest.raises(InvalidRequest):
        engine.add(ask(prompt=()))
    with pytest.raises(InvalidRequest):
        engine.add(Submit(request_id="x", model="other", prompt=(1,), params=ask().params))


def test_utilisation_is_the_share_of_time_in_steps_and_warms_the_device(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU)
    idle = bench.engine.health()
    assert idle.utilisation == 0 and idle.temperature_c == pytest.approx(35)
    bench.run(ask(max_tokens=400))  # eight seconds
    busy = bench.engine.health()
    assert busy.utilisation is not None and busy.utilisation > 0.99
    for _ in range(100):
        bench.run(ask(max_tokens=50))
        warm = bench.engine.health().temperature_c
    assert warm is not None and 70 < warm < 76
    bench.time.now += 5
    assert (bench.engine.health().utilisation or 0) < 0.01


def test_the_control_file_sets_health_and_pace_and_is_read_again_when_it_changes(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, GPU)
    bench.control(temperature_c=86.0, utilisation=0.5, memory_pressure=0.95, latency_factor=3)
    health = bench.engine.health()
    assert (health.temperature_c, health.utilisation, health.memory_pressure) == (86.0, 0.5, 0.95)
    begin = bench.time.now
    bench.run(ask(max_tokens=10))
    assert bench.time.now - begin == pytest.approx(0.6)
    bench.control(temperature_c=60.0)
    assert bench.engine.health().temperature_c == 60.0
    bench.file.unlink()
    assert (bench.engine.health().temperature_c or 99) < 60.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"temperature_c": "hot"}',
        '{"fault": "flood"}',
        '{"heat": 1}',
        '{"latency_factor": -1}',
        '{"latency_factor": 1e30}',
    ],
)
def test_a_control_file_that_makes_no_sense_changes_nothing(tmp_path: Path, text: str) -> None:
    bench = Bench(tmp_path, GPU)
    bench.control(temperature_c=70.0)
    assert bench.engine.health().temperature_c == 70.0
    bench.file.write_text(text)
    assert bench.engine.health().temperature_c == 70.0


def test_a_control_file_that_cannot_be_looked_at_changes_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU)
    bench.control(temperature_c=70.0)
    assert bench.engine.health().temperature_c == 70.0
    bench.file.unlink()
    bench.file.symlink_to(bench.file)
    assert bench.engine.health().temperature_c == 70.0
    bench.file.unlink()
    bench.control(temperature_c=60.0)
    assert bench.engine.health().temperature_c == 60.0


def test_the_slowest_step_that_can_be_set_is_one_that_can_be_waited_for(tmp_path: Path) -> None:
    slowest = EmulationConfig(latency_ms=60_000, prefill_tok_s=0.1)
    longest_s = profile.load("gpu", slowest).step_s(8192) * MAX_LATENCY_FACTOR
    assert longest_s < 2**62 / 1e9  # what time.sleep takes
    with pytest.raises(ValidationError):
        EmulationConfig(prefill_tok_s=1e-300)


def test_a_crash_ends_a_busy_and_an_idle_worker(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU)
    bench.control(fault="crash")
    with pytest.raises(Crash):
        bench.engine.health()
    bench.engine.add(ask())
    with pytest.raises(Crash):
        bench.engine.step()


def test_a_hang_lasts_until_it_is_taken_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path, GPU)
    bench.control(fault="hang")
    bench.engine.add(ask(max_tokens=1))
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        bench.time.now += seconds
        if len(waits) == 100:
            bench.control()

    bench.engine._wait = wait
    assert len(bench.engine.step()) == 2
    assert bench.time.now - 100.0 > 4.9


def test_profiles_are_those_of_their_class_unless_the_configuration_differs() -> None:
    assert profile.load("cpu", EmulationConfig()) == Profile(120, 8, 2000)
    assert profile.load("gpu", EmulationConfig()) == Profile(20, 32, 20_000)
    assert profile.load("tpu", EmulationConfig(latency_ms=0, max_batch=4)) == Profile(0, 4, 40_000)


def test_the_words_of_a_vocabulary_are_whole_and_none_is_special(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    stand_in_tokenizer.export("some/model.gguf", tmp_path)
    facts = json.loads((tmp_path / "model.json").read_text())
    ids = word_ids(tmp_path / "tokenizer.json", facts["vocab_size"])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.decode(list(ids)).split()[:4] == ["the", "morning", "light", "was"]
    assert facts["name"] == "model"


def test_an_emulated_pool_is_made_without_a_model_and_registers_as_emulated(
    tmp_path: Path,
) -> None:
    config = Config.model_validate(
        {"pools": {"tpu": {"engine": "emulated"}}, "model": {"path": "/nowhere/tiny"}}
    )
    run = RunDir(tmp_path)
    stand_in_tokenizer.export(config.model.path, run.tokenizer)
    engine = engines.create(config, run, "tpu", threads=None)
    frame = registration(engine, "w", "tpu", 1)
    assert frame.emulated and frame.engine == emulated.NAME
    assert (frame.model, frame.slots) == ("tiny", 64)


def test_an_emulated_worker_imports_no_engine() -> None:
    code = (
        "import sys, workers.worker, workers.emulated\n"
        "print({'torch', 'transformers', 'mirror_sd.engine', 'mirror_sd._native'} & "
        "set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "set()"
