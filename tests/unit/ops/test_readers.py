"""Sensors: this host's own, GPUs by a stand-in for NVML, and the counters of a scrape."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from ops.readers import service
from ops.readers.gpus import Gpus
from ops.readers.host import Host
from ops.readings import DeviceReading, share, temperature
from tests.unit.ops.test_dashboards import declared


class Nvml:
    """The driver of some GPUs; a figure that is an error code raises it."""

    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound
    NVMLError_Unknown = pynvml.NVMLError_Unknown
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_PCIE_UTIL_TX_BYTES = pynvml.NVML_PCIE_UTIL_TX_BYTES
    NVML_PCIE_UTIL_RX_BYTES = pynvml.NVML_PCIE_UTIL_RX_BYTES
    nvmlClocksThrottleReasonSwThermalSlowdown = pynvml.nvmlClocksThrottleReasonSwThermalSlowdown
    nvmlClocksThrottleReasonHwThermalSlowdown = pynvml.nvmlClocksThrottleReasonHwThermalSlowdown

    def __init__(self, *gpus: dict[str, Any]) -> None:
        self.gpus = [
            {"degrees": 60, "busy": 50, "used": 30, "tx": 1000, "rx": 2000, "throttle": 0} | gpu
            for gpu in gpus
        ]
        self.has_driver = True
        self.is_open = False

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
        self.is_open = True

    def nvmlShutdown(self) -> None:
        self.is_open = False

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def _figure(self, index: int, name: str) -> Any:
        value = self.gpus[index][name]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlDeviceGetTemperature(self, handle: int, _sensor: int) -> Any:
        return self._figure(handle, "degrees")

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return SimpleNamespace(gpu=self._figure(handle, "busy"))

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:
        return SimpleNamespace(used=self._figure(handle, "used"), total=100)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> Any:
        return self._figure(handle, "throttle")

    def nvmlDeviceGetCurrPcieLinkGeneration(self, handle: int) -> int:
        return 4

    def nvmlDeviceGetCurrPcieLinkWidth(self, handle: int) -> int:
        return 16

    def nvmlDeviceGetPcieThroughput(self, handle: int, direction: int) -> Any:
        is_tx = direction == pynvml.NVML_PCIE_UTIL_TX_BYTES
        return self._figure(handle, "tx" if is_tx else "rx")


def test_stand_in_has_only_what_nvml_has() -> None:
    names = [name for name in dir(Nvml) if name.startswith(("nvml", "NVML"))]
    assert len(names) > 15
    assert [name for name in names if not hasattr(pynvml, name)] == []


def test_gpus_are_read_as_the_hottest_fullest_and_busiest_link() -> None:
    nvml = Nvml(
        {"degrees": 61, "used": 95, "busy": 20}, {"degrees": 86, "busy": 80, "rx": 31504000}
    )
    reading = Gpus(nvml).read()
    assert reading.temperature_c == 86.0
    assert reading.memory_pressure == 0.95
    assert reading.utilisation == 0.5
    # 16 lanes of generation 4 carry 31.5 GB/s each way.
    assert reading.pcie == pytest.approx(1.0)
    assert not reading.is_throttled


@pytest.mark.parametrize(
    ("reason", "is_throttled"),
    [
        (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, True),
        (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, True),
        (pynvml.nvmlClocksThrottleReasonSwPowerCap, False),
        (pynvml.nvmlClocksThrottleReasonGpuIdle, False),
    ],
)
def test_only_heat_counts_as_throttling(reason: int, is_throttled: bool) -> None:
    assert Gpus(Nvml({"throttle": reason | 1})).read().is_throttled == is_throttled


def test_figures_that_a_gpu_does_not_have_are_unknown() -> None:
    absent = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    reading = Gpus(Nvml(dict.fromkeys(("busy", "used", "tx", "rx", "throttle"), absent))).read()
    assert reading == DeviceReading(temperature_c=60.0)


def test_machine_without_a_driver_has_no_gpus_and_is_asked_once_a_minute() -> None:
    now = 0.0
    nvml = Nvml({})
    nvml.has_driver = False
    gpus = Gpus(nvml, clock=lambda: now)
    assert gpus.read() == DeviceReading()
    nvml.has_driver = True
    now = 59.0
    assert gpus.read() == DeviceReading()
    now = 61.0
    assert gpus.read().temperature_c == 60.0


def test_lost_gpu_is_unknown_and_found_again() -> None:
    now = 0.0
    nvml = Nvml({})
    gpus = Gpus(nvml, clock=lambda: now)
    gpus.read()
    nvml.gpus[0]["degrees"] = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
    assert gpus.read() == DeviceReading()
    assert not nvml.is_open
    nvml.gpus[0]["degrees"] = 70
    now = 61.0
    assert gpus.read().temperature_c == 70.0


def test_this_machine_can_be_read() -> None:
    host = Host()
    assert host.read().utilisation is None
    reading = host.read()
    assert reading.utilisation is not None and 0 <= reading.utilisation <= 1
    assert reading.memory_pressure is not None and 0 < reading.memory_pressure < 1


@given(st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans()))
def test_only_plausible_numbers_are_readings(value: object) -> None:
    for read, low, high in ((share, 0.0, 1.0), (temperature, -50.0, 150.0)):
        number = read(value)
        assert number is None or (math.isfinite(number) and low <= number <= high)


def registry() -> tuple[CollectorRegistry, Histogram, Counter, Counter, Counter]:
    own = CollectorRegistry()
    gaps = Histogram(
        "mirror_gateway_inter_token_latency_seconds",
        "x",
        ["class", "tier"],
        buckets=(0.1, 0.2, 0.5, 1),
        registry=own,
    )
    drafted = Counter("mirror_worker_drafted_tokens", "x", ["class"], registry=own)
    accepted = Counter("mirror_worker_accepted_tokens", "x", ["class"], registry=own)
    restarts = Counter("mirror_pool_worker_restarts", "x", ["class"], registry=own)
    return own, gaps, drafted, accepted, restarts


def test_latency_and_rejection_are_those_of_the_last_seconds() -> None:
    own, gaps, drafted, accepted, restarts = registry()
    window = service.ServiceWindow()

    def scrape(now: float) -> None:
        window.add(now, service.parse(generate_latest(own).decode()))

    for tier in ("vip", "standard"):
        for _ in range(500):
            gaps.labels("cpu", tier).observe(0.9)
    drafted.labels("cpu").inc(1e6)
    restarts.labels("gpu").inc(5)
    scrape(0.0)
    assert window.reading(0.0).inter_token_p99_s is None, "what was before is not known to be slow"
    for _ in range(990):
        gaps.labels("gpu", "vip").observe(0.05)
    for _ in range(10):
        gaps.labels("gpu", "vip").observe(0.15)
    drafted.labels("cpu").inc(800)
    drafted.labels("gpu").inc(200)
    accepted.labels("gpu").inc(700)
    restarts.labels("gpu").inc(2)
    scrape(2.0)
    reading = window.reading(2.0)
    assert reading.inter_token_p99_s == pytest.approx(0.1)
    assert reading.rejection_rate == pytest.approx(0.3)
    assert reading.worker_restarts == {"gpu": 2.0}
    for second in range(4, 60, 2):
        scrape(float(second))
    quiet = window.reading(58.0)
    assert quiet.inter_token_p99_s is None
    assert quiet.rejection_rate is None
    assert quiet.worker_restarts == {"gpu": 2.0}
    assert window.reading(80.0).worker_restarts == {}, "the last scrape is too old"


def test_latest_latency_forgets_a_slow_phase_within_four_seconds() -> None:
    own, gaps, *_ = registry()
    window = service.ServiceWindow()
    seen = {}
    for second in range(0, 42, 2):
        for _ in range(200):
            gaps.labels("cpu", "vip").observe(0.9 if second <= 20 else 0.05)
        window.add(float(second), service.parse(generate_latest(own).decode()))
        seen[second] = window.reading(float(second))
    slow = [n for n, item in seen.items() if item.latest_p99_s and item.latest_p99_s > 0.5]
    assert slow[-1] == 22
    assert [n for n, item in seen.items() if (item.latest_usual_p99_s or 0) > 0.5] == slow
    assert max(n for n, item in seen.items() if (item.inter_token_p99_s or 0) > 0.5) == 28


def test_few_tokens_are_looked_at_for_longer_until_none_come() -> None:
    own, gaps, *_ = registry()
    window = service.ServiceWindow()
    seen = {}
    for second in range(0, 80, 2):
        for _ in range(10 if second < 40 else 0):
            gaps.labels("cpu", "vip").observe(0.3)
        window.add(float(second), service.parse(generate_latest(own).decode()))
        seen[second] = window.reading(float(second)).inter_token_p99_s
    assert seen[10] is None, "50 tokens are too few to tell"
    assert seen[38] == pytest.approx(0.497), "150 in half a minute are enough"
    assert [seen[second] for second in range(52, 80, 2)] == [None] * 14


@pytest.mark.parametrize(
    ("classes", "usual_s"),
    [
        ({}, None),
        ({"cpu": (99, 0.3)}, None),
        ({"cpu": (200, 0.3)}, 0.4997),
        ({"cpu": (200, 0.3), "gpu": (10_000, 0.05)}, 0.1),
        ({"cpu": (200, 0.3), "gpu": (10_000, 0.05), "tpu": (30_000, 0.15)}, 0.2),
        ({"cpu": (20_000, 0.3), "gpu": (10_000, 0.05)}, 0.4997),
        ({"cpu": (99, 0.05), "gpu": (100, 0.3)}, 0.4997),
    ],
)
def test_usual_p99_is_that_of_the_class_that_the_median_token_came_from(
    classes: dict[str, tuple[int, float]], usual_s: float | None
) -> None:
    bounds = (0.1, 0.2, 0.5, math.inf)
    gaps = {
        name: {bound: float(count * (gap_s <= bound)) for bound in bounds}
        for name, (count, gap_s) in classes.items()
    }
    assert service.usual_p99_s(gaps) == (None if usual_s is None else pytest.approx(usual_s, 0.02))


def test_every_series_that_is_read_is_one_that_is_declared() -> None:
    series = declared()
    assert [name for name in service.WANTED if name not in series] == []


def test_restarts_are_forgotten_after_ten_minutes() -> None:
    own, _, _, _, restarts = registry()
    window = service.ServiceWindow()
    restarts.labels("cpu").inc(0)
    for second in range(0, 1300, 2):
        if second == 100:
            restarts.labels("cpu").inc(4)
        window.add(float(second), service.parse(generate_latest(own).decode()))
        seen = window.reading(float(second)).worker_restarts["cpu"]
        assert seen == (4.0 if 100 <= second <= 690 else seen if second < 720 else 0.0)


@pytest.mark.parametrize(
    "text",
    ["mirror_worker_drafted_tokens_total{", 'mirror_pool_worker_restarts_total{class="cpu"} NaN\n'],
)
def test_scrape_that_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r".*"):
        service.parse(text)


@given(st.lists(st.floats(0, 3), min_size=100, max_size=300))
def test_quantile_lies_in_the_bucket_of_the_true_one(values: list[float]) -> None:
    bounds = [0.1, 0.2, 0.5, 1.0, 2.5, math.inf]
    counts = {bound: float(sum(value <= bound for value in values)) for bound in bounds}
    found = service.quantile(0.99, counts)
    true = sorted(values)[math.ceil(0.99 * len(values)) - 1]
    upper = next(bound for bound in bounds if true <= bound)
    lower = max((bound for bound in bounds if bound < upper), default=0.0)
    assert found is not None
    assert lower <= found <= upper
