"""Puts the build with sanitizers in the place of `mirror_sd._native`.

Imported first (pytest: `-p tests.native_fuzz.sanitized`); the file's path is in
MIRROR_SD_SANITIZED. The sanitizers' runtime must have been preloaded.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys

import mirror_sd

NAME = "mirror_sd._native"
path = os.environ["MIRROR_SD_SANITIZED"]
loader = importlib.machinery.ExtensionFileLoader(NAME, path)
spec = importlib.util.spec_from_file_location(NAME, path, loader=loader)
assert spec is not None
native = importlib.util.module_from_spec(spec)
loader.exec_module(native)
sys.modules[NAME] = native
mirror_sd._native = native  # type: ignore[attr-defined]
