from __future__ import annotations

from pathlib import Path

import pytest

try:
    from mirror_sd import _native  # noqa: F401

    IS_BUILT = True
except ImportError:
    IS_BUILT = False


class LeftOut(pytest.Module):
    def collect(self) -> list[pytest.Item]:
        pytest.skip("the C++ extension is not built", allow_module_level=True)


def pytest_pycollect_makemodule(
    module_path: Path, parent: pytest.Collector
) -> pytest.Module | None:
    return None if IS_BUILT else LeftOut.from_parent(parent, path=module_path)
