"""A trained head as a file, and the check that the file is worth what its fp32 parent is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mirror_sd.training.draft_model import DraftModel
from mirror_sd.uir import draft_file
from mirror_sd.uir.draft_file import MATRICES, DraftProgram, Precision

# Of the acceptance of the fp32 parent, what an export may lose.
MOST_LOST = 0.02


def program(model: DraftModel, vocabulary: NDArray[np.int32], precision: Precision) -> DraftProgram:
    """The head as it is now, to be written in that precision."""
    with torch.inference_mode():
        weights = {name: w.float().cpu().numpy() for name, w in model.weights("fp32").items()}
    return DraftProgram(replace(model.spec, precision=precision), vocabulary, weights)


def load(model: DraftModel, path: Path) -> None:
    """Give the model the weights that the file holds. Raises `ModelError`."""
    found = draft_file.read(path)
    with torch.no_grad():
        for name, values in found.weights.items():
            tensor = torch.tensor(values)
            if name == "fuse_features":
                scale = model.feature_scale.cpu()
                tensor = torch.where(scale > 0, tensor / scale, 0.0)
            getattr(model, name).copy_(tensor)
    assert set(MATRICES) <= set(found.weights)
