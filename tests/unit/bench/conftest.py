from __future__ import annotations

import pytest

from mirror_sd import model_store
from mirror_sd.errors import ModelError
from mirror_sd.model_store import ModelFiles

DEFAULT = "smollm2-135m-instruct"


@pytest.fixture(scope="session")
def default_model() -> ModelFiles:
    try:
        return model_store.resolve(DEFAULT)
    except ModelError:
        return model_store.pull(DEFAULT, print)
