"""An engine whose host runs out of memory, and how a host's memory is read."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from mirror_sd import telemetry
from mirror_sd.config import EngineConfig
from mirror_sd.config_speculation import SpeculationConfig
from mirror_sd.engine import Engine
from mirror_sd.host_memory import HostMemory
from mirror_sd.messages import Chunk
from tests.unit.speculative.hash_target import HashTarget
from tests.unit.speculative.test_engine import run, solo, submit


class Host(HostMemory):
    def __init__(self, used=0.5, free=2**40) -> None:
        self.used, self.free = used, free

    def used_share(self):
        return self.used

    def free_bytes(self):
        return self.free


class Target(HashTarget):
    """Its blocks hold nothing any more once they are discarded."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.discarded = []

    def discard_kv(self, blocks):
        self.discarded += blocks
        self.slots[list(blocks)] = -1


class Machine:
    def __init__(self, blocks=64, slots=4, target=None) -> None:
        self.now = 0.0
        self.host = Host()
        self.target = target or Target(memory=1)
        self.engine = Engine(
            self.target,
            EngineConfig(block_size=4, kv_cache_mb=blocks, prefill_chunk=16, shed_above=0.9),
            SpeculationConfig(enabled=False),
            model_name="m",
            device_class="cpu",
            slots=slots,
            host=self.host,
            clock=self.clock,
        )

    def clock(self):
        self.now += 0.3
        return self.now


def shed():
    return telemetry.KV_SHED.labels("cpu")._value.get()


def test_prefixes_are_given_up_when_the_host_runs_short():
    machine, before = Machine(), shed()
    prompt = list(range(33))
    run(machine.engine, [submit("a", prompt)])
    _, ends = run(machine.engine, [submit("b", prompt)])
    assert ends["b"].usage.cached_tokens == 32 and shed() == before
    machine.host.used = 0.92
    tokens, ends = run(machine.engine, [submit("c", prompt)])
    assert ends["c"].usage.cached_tokens == 0
    assert shed() > before and len(machine.target.discarded) == shed() - before
    assert tokens["c"] == solo(submit("c", prompt), memory=1)


def test_nothing_is_given_up_where_that_would_free_nothing():
    machine, before = Machine(target=HashTarget(memory=1)), shed()
    machine.host.used = 0.99
    prompt = list(range(33))
    run(machine.engine, [submit("a", prompt)])
    _, ends = run(machine.engine, [submit("b", prompt)])
    assert ends["b"].usage.cached_tokens == 32 and shed() == before
    pool = machine.engine._memory.pool
    assert pool.limit == pool.num_blocks


def test_sequences_of_low_priority_give_way_when_it_gets_worse(caplog):
    # A sequence may need 10 blocks, so that there is something to give up.
    machine = Machine(blocks=40)
    machine.engine.max_context = 40
    machine.engine._memory._least = 10
    items = [
        submit(name, [i] * 9, max_tokens=24, tier="vip" if name == "vip" else "standard")
        for i, name in enumerate(("first", "second", "third", "vip"))
    ]
    for item in items:
        machine.engine.add(item)
    tokens = {item.request_id: [] for item in items}

    def steps(count):
        running = []
        for _ in range(count):
            for output in machine.engine.step():
                if isinstance(output, Chunk):
                    tokens[output.request_id].extend(output.tokens)
            running.append(machine.engine.stats().running)
            machine.engine.check_integrity()
        return running

    assert steps(5)[-1] == 4
    machine.host.used = 0.99
    with caplog.at_level(logging.INFO):
        running = steps(12)
    assert running == sorted(running, reverse=True) and running[-1] == 1
    found = [text.split()[1].rstrip(":") for text in caplog.messages if "displaced" in text]
    assert found == ["third", "second", "first"]
    assert "sequences of low priority give way" in caplog.text
    machine.host.used = 0.5
    while machine.engine.has_work:
        steps(1)
    for item in items:
        assert tokens[item.request_id] == solo(item, memory=1)
    assert machine.engine.stats().kv_blocks_used == 0


def test_as_much_may_be_cached_again_when_it_is_only_short():
    machine = Machine(blocks=40)
    machine.engine._memory._least = 10
    pool, most = machine.engine._memory.pool, []
    for used in (0.97, 0.93, 0.91, 0.88, 0.5):
        machine.host.used = used
        for _ in range(4):  # so that it looks at the host
            machine.engine.step()
        most.append(pool.limit)
    # Nearly out from 0.95 on and until it is below 0.92; short from 0.9 on and until 0.87.
    assert most == [10, 10, 40, 40, 40]


def test_the_last_sequence_runs_to_its_end_whatever_the_host_says():
    machine = Machine(blocks=128)
    machine.host.used = 1.0
    items = [submit(name, [i] * 50, max_tokens=60) for i, name in enumerate("ab")]
    tokens, _ = run(machine.engine, items)
    for item in items:
        assert tokens[item.request_id] == solo(item, memory=1, blocks=128)


def test_the_cache_is_no_larger_than_what_is_free(caplog):
    host = Host(free=20 * 2**20)
    engine = Engine(
        HashTarget(),
        EngineConfig(block_size=4, kv_cache_mb=64),
        SpeculationConfig(enabled=False),
        model_name="m",
        device_class="cpu",
        slots=4,
        host=host,
    )
    assert engine.stats().kv_blocks_free == 18
    assert "engine.kv_cache_mb asks for 64" in caplog.text


def test_the_peak_of_blocks_is_told():
    machine = Machine()
    run(machine.engine, [submit(f"r{i}", [i] * 16, max_tokens=4) for i in range(3)])
    stats = machine.engine.stats()
    assert stats.kv_blocks_used == 0 and 12 <= stats.kv_blocks_peak <= 15


def fake_root(tmp_path: Path, group: dict[str, str] | None = None, name: str = "b") -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    400 kB\n"
    )
    if group is not None:
        (tmp_path / "proc/self/cgroup").write_text(f"0::/a/{name}\n")
        folder = tmp_path / "sys/fs/cgroup/a" / name
        folder.mkdir(parents=True)
        for name, text in group.items():
            (folder.parent / name).write_text(text)
    return tmp_path


def test_the_host_is_as_full_as_it_says(tmp_path):
    memory = HostMemory(fake_root(tmp_path))
    assert memory.used_share() == pytest.approx(0.6)
    assert memory.free_bytes() == 400 * 1024


def test_the_group_that_is_nearer_its_limit_counts(tmp_path):
    group = {
        "memory.max": "200000",
        "memory.current": "190000",
        "memory.stat": "anon 5\ninactive_file 10000\n",
    }
    memory = HostMemory(fake_root(tmp_path, group))
    assert memory.used_share() == pytest.approx(0.9)
    assert memory.free_bytes() == 20_000


def test_a_group_with_a_colon_in_its_name_counts(tmp_path):
    group = {"memory.max": "200000", "memory.current": "190000"}
    memory = HostMemory(fake_root(tmp_path, group, "app-foo::bar:1"))
    assert memory.free_bytes() == 10_000


def test_a_group_without_a_limit_does_not_count(tmp_path):
    memory = HostMemory(fake_root(tmp_path, {"memory.max": "max\n", "memory.current": "9"}))
    assert memory.free_bytes() == 400 * 1024


def test_a_host_that_tells_nothing_is_not_known(tmp_path):
    memory = HostMemory(tmp_path)
    assert memory.used_share() is None and memory.free_bytes() is None


def test_this_host_tells():
    assert 0 < HostMemory().used_share() <= 1
