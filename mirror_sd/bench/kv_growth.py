"""What the growth of one stream's keys and values costs, token by token, in torch on the CPU.

Ways, each in a process of its own (`python -m mirror_sd.bench.kv_growth`):

    paged           blocks of a `BlockPool`, written in the torch back end's cache
    concatenated    each layer's tensors concatenated with the new token's, a new cache for each
                    token: the old one is held until all layers are done, as by a forward that is
                    given `past_key_values` and returns them
    layer_by_layer  the same, but a layer's old tensors are dropped before the next layer's are made
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from mirror_sd import allocator
from mirror_sd.bench.peer_drivers.session import serve
from mirror_sd.bench.peer_process import PeerProcess
from mirror_sd.errors import InternalError
from mirror_sd.memory.block_pool import BlockPool

WAYS = ("concatenated", "layer_by_layer", "paged")
BLOCK_SIZE = 16
MB = 2**20
_TIMEOUT_S = 600.0


def variables(choice: allocator.Choice) -> dict[str, str]:
    """Of a child that shall run on this malloc, whatever this process runs on.

    Raises `ConfigError` where jemalloc is asked for and is not there.
    """
    plain = {
        name: value
        for name, value in os.environ.items()
        if name not in ("LD_PRELOAD", "MALLOC_CONF")
    }
    return {"LD_PRELOAD": "", "MALLOC_CONF": "", **allocator.environment(choice, plain)}


def measure(model: str, length: int, threads: int, rounds: int) -> dict[str, Any]:
    """Grow the cache of `length` tokens of the model in all ways, on glibc and on jemalloc.

    `allocation_speedup`, `peak_saving` (%): of paged against concatenated, the less favourable
    malloc of those that are there. Both are medians over `rounds`.
    """
    from mirror_sd import model_store
    from mirror_sd.uir.program import read_spec

    spec = read_spec(model_store.resolve(model))
    shape = {"layers": spec.num_layers, "heads": spec.num_kv_heads, "width": spec.head_dim}
    names: list[allocator.Choice] = ["glibc"]
    if allocator.find_jemalloc() is not None:
        names.append("jemalloc")
    found: dict[tuple[str, str], list[Mapping[str, float]]] = {}
    for _ in range(rounds):
        for name in names:
            for way in WAYS:
                told = _in_a_process(name, threads, {"way": way, "length": length, **shape})
                found.setdefault((name, way), []).append(told)
    growth = [_row(name, found) for name in names]
    report: dict[str, Any] = {
        "allocation_speedup": min(row["allocation_speedup"] for row in growth),
        "peak_saving": min(row["peak_saving"] for row in growth),
        "growth": growth,
    }
    if "jemalloc" not in names:
        report["jemalloc"] = f"not found; {allocator.HOW_TO_INSTALL}"
    return report


def _in_a_process(
    name: allocator.Choice, threads: int, asked: Mapping[str, Any]
) -> Mapping[str, float]:
    command = [sys.executable, "-m", "mirror_sd.bench.kv_growth"]
    with PeerProcess(command, threads, variables(name)) as process:
        told: dict[str, Any] = process.call("grow", timeout_s=_TIMEOUT_S, threads=threads, **asked)
    if told["allocator"] != name:
        raise InternalError(f"the process runs on {told['allocator']}, not on {name}")
    return told


def _row(name: str, found: Mapping[tuple[str, str], list[Mapping[str, float]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"allocator": name}
    for way in WAYS:
        for key in ("seconds", "peak_mb"):
            row[f"{way}_{key}"] = round(median(told[key] for told in found[name, way]), 4)
    for prefix, way in (("", "concatenated"), ("layer_", "layer_by_layer")):
        speedup = row[f"{way}_seconds"] / row["paged_seconds"]
        saving = 100 * (1 - row["paged_peak_mb"] / row[f"{way}_peak_mb"])
        row[f"{prefix}allocation_speedup"] = round(speedup, 2)
        row[f"{prefix}peak_saving"] = round(saving, 1)
    return row


def grow(
    way: str, length: int, layers: int, heads: int, width: int, threads: int
) -> dict[str, float | str]:
    """Runs in the child. `seconds` of allocating, copying and writing for `length` tokens, one
    after the other, in fp32; `peak_mb`: the most memory resident beyond what was before."""
    import torch

    torch.set_num_threads(threads)
    new = torch.randn(1, 2 * heads, width)
    with torch.inference_mode():
        _GROW[way](new, 2, layers)  # torch's own first allocations are not the cache's
        before = _reset_peak()
        begin = time.perf_counter()
        _GROW[way](new, length, layers)
        seconds = time.perf_counter() - begin
    return {
        "seconds": seconds,
        "peak_mb": (_peak() - before) / MB,
        "allocator": allocator.running() or "unknown",
    }


def _reset_peak() -> int:
    """The memory resident now, from which on the peak counts."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak()


def _peak() -> int:
    peak = allocator.peak_bytes()
    if peak is None:
        raise InternalError("/proc does not tell the peak memory of this process")
    return peak


def _paged(new: Any, length: int, layers: int) -> None:
    import torch

    from mirror_sd.backends.torch_cache import zeros

    blocks = -(-length // BLOCK_SIZE)
    pool, table = BlockPool(blocks), []
    shape = (layers, blocks * BLOCK_SIZE, *new.shape[1:])
    cache = zeros(shape, new.dtype, torch.device("cpu"))
    for position in range(length):
        if position % BLOCK_SIZE == 0:
            table.append(pool.allocate())
        slots = torch.tensor([table[-1] * BLOCK_SIZE + position % BLOCK_SIZE])
        for layer in cache:
            layer.index_copy_(0, slots, new)


def _concatenated(new: Any, length: int, layers: int) -> None:
    import torch

    keys, values = new.chunk(2, dim=1)
    past = tuple((keys[:0], values[:0]) for _ in range(layers))
    for _ in range(length):
        past = tuple((torch.cat([k, keys]), torch.cat([v, values])) for k, v in past)


def _layer_by_layer(new: Any, length: int, layers: int) -> None:
    import torch

    keys, values = new.chunk(2, dim=1)
    past = [(keys[:0], values[:0]) for _ in range(layers)]
    for _ in range(length):
        for layer in range(layers):
            k, v = past[layer]
            past[layer] = (torch.cat([k, keys]), torch.cat([v, values]))


_GROW = {"paged": _paged, "concatenated": _concatenated, "layer_by_layer": _layer_by_layer}


if __name__ == "__main__":
    serve({"grow": grow})
