from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.openresty.stack import Edge


@contextmanager
def started(classes: tuple[str, ...]) -> Iterator[Edge]:
    # Not tmp_path: the path of a unix socket may have 107 bytes only.
    run_dir = Path(tempfile.mkdtemp(prefix="mirror-edge-"))
    edge = Edge(run_dir, classes=classes)
    try:
        edge.start()
        yield edge
    finally:
        edge.stop()
        shutil.rmtree(run_dir)


@pytest.fixture(scope="module")
def running_edge() -> Iterator[Edge]:
    with started(("cpu",)) as edge:
        yield edge


@pytest.fixture(scope="module")
def wide_edge() -> Iterator[Edge]:
    """In front of all three device classes."""
    with started(("cpu", "gpu", "tpu")) as edge:
        yield edge


@pytest.fixture
def edge(running_edge: Edge) -> Edge:
    """The module's edge with all gateways up and none avoided as lately failed."""
    dead = [gateway for gateway in running_edge.gateways if not gateway.is_alive]
    for gateway in dead:
        gateway.start()
    if dead:
        time.sleep(1.05)
    return running_edge
