"""What the CPU can multiply natively."""

from __future__ import annotations

from pathlib import Path

BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def has_bf16_products(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether bf16 dot products run in hardware; False where /proc/cpuinfo cannot tell."""
    try:
        lines = cpuinfo.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return False
    flags = next((line for line in lines if line.startswith("flags")), "")
    return not BF16_FLAGS.isdisjoint(flags.split())
