"""Blocks that are given up give their memory back to the system, and no other block's."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mirror_sd.backends.protocol import RaggedBatch
from tests.unit.backends.native.models import BF16, ODD, native

ROOT = Path(__file__).resolve().parents[4]
BLOCK, COUNT = 16, 24
SPEC = replace(ODD, windows=(None, None))


def batch(tokens, start, table):
    ids = np.asarray(tokens, dtype=np.int32)
    return RaggedBatch(
        token_ids=ids,
        positions=np.arange(start, start + len(ids), dtype=np.int32),
        sequence_offsets=np.array([0, len(ids)], dtype=np.int32),
        block_tables=(np.asarray(table, dtype=np.int32),),
        logit_rows=np.array([len(ids) - 1], dtype=np.int32),
    )


def test_neighbours_of_discarded_blocks_keep_their_content():
    kept, given_up = [1, 4, 7, 12], [0, 2, 3, 5, 6, 8, 9, 10, 11, 13]
    ids = np.arange(len(kept) * BLOCK) % SPEC.vocab_size
    backends = [native(SPEC, BF16) for _ in range(2)]
    for backend in backends:
        backend.allocate_kv(COUNT, BLOCK)
        backend.forward(batch(ids[:-1], 0, kept))
        other = [block for block in given_up if block < COUNT]
        backend.forward(batch(np.ones(len(other) * BLOCK), 0, other))
    backends[1].discard_kv(given_up[::-1])
    plain, after = (b.forward(batch(ids[-1:], len(ids) - 1, kept)).copy() for b in backends)
    np.testing.assert_array_equal(plain, after)
    # And a discarded one is as good as new.
    again = [b.forward(batch(ids[:40], 0, given_up[:3])).copy() for b in backends]
    np.testing.assert_array_equal(*again)


@pytest.mark.parametrize("blocks", [[-1], [COUNT], [3, COUNT + 5]])
def test_blocks_that_are_not_there_are_refused(blocks):
    backend = native(SPEC, BF16)
    with pytest.raises(ValueError, match="KV block"):
        backend.discard_kv(blocks)
    backend.allocate_kv(COUNT, BLOCK)
    with pytest.raises(ValueError, match="KV block"):
        backend.discard_kv(blocks)
    backend.discard_kv([])


def test_memory_goes_back_to_the_system():
    code = """
        import numpy as np, psutil
        from tests.unit.backends.native.test_native_discard import SPEC, batch
        from tests.unit.backends.native.models import BF16, native
        def held():
            return psutil.Process().memory_info().rss
        backend = native(SPEC, BF16)
        block = 256
        size = backend.kv_bytes_per_block(block)
        count = 64 * 2**20 // size
        backend.allocate_kv(count, block)
        before = held()
        for first in range(0, count - 8, 8):
            table = list(range(first, first + 8))
            backend.forward(batch(np.ones(8 * block), 0, table))
        full = held()
        backend.discard_kv(range(count))
        print((full - before) / 2**20, (held() - before) / 2**20)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    full, left = map(float, done.stdout.split())
    assert full > 50 and left < 10
