"""The drafts that ship with the package: `<model>.<precision>.draft.safetensors`, with a card
`<model>.md` that tells how each was trained and what it reaches."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
SUFFIX = ".draft.safetensors"
# What `mirror-sd distil` exports for a class; a class without one of its own takes another's.
PRECISION_OF_CLASS = {"cpu": "int8", "gpu": "fp16", "tpu": "bf16"}


def find(model: str, device_class: str = "cpu", *, directory: Path = HERE) -> Path | None:
    """The shipped draft of a model by its name, None if there is none."""
    # The name is that of a file of the user's: compared, never made into a pattern or a path.
    found = {
        path.name.removesuffix(SUFFIX).rpartition(".")[2]: path
        for path in sorted(directory.glob(f"*{SUFFIX}"))
        if path.name.removesuffix(SUFFIX).rpartition(".")[0] == model
    }
    own = found.get(PRECISION_OF_CLASS.get(device_class, ""))
    return own or next(iter(found.values()), None)
