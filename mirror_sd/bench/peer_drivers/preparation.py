"""The forms of one model that the peers read. All come from the same weights."""

from __future__ import annotations

import ctypes
import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .llamacpp_peer import silence


def transformers_directory(source: str, target: str) -> None:
    """A GGUF file as a Hugging Face directory in fp32, dequantised by transformers itself."""
    torch: Any = importlib.import_module("torch")
    transformers: Any = importlib.import_module("transformers")
    file = Path(source)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    # The weights are plain floats now; a packed form would be slower.
    if hasattr(loaded.config, "quantization_config"):
        del loaded.config.quantization_config
    plain = type(loaded)(loaded.config)
    plain.load_state_dict(loaded.state_dict())
    plain.tie_weights()
    plain.save_pretrained(target)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(target)


def llamacpp_file(source: str, target: str, quantisation: str) -> None:
    """A GGUF file of another type, such as `q8_0` or `bf16`, by llama.cpp's own quantiser."""
    lib: Any = importlib.import_module("llama_cpp")
    silence(lib)
    params = lib.llama_model_quantize_default_params()
    params.ftype = getattr(lib, f"LLAMA_FTYPE_MOSTLY_{quantisation.upper()}")
    params.allow_requantize = True
    if lib.llama_model_quantize(source.encode(), target.encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp could not write {target}")


def openvino_directory(source: str, target: str) -> None:
    """A Hugging Face directory as an OpenVINO model with int8 weights, by optimum's exporter."""
    command = Path(sys.executable).with_name("optimum-cli")
    if not command.exists():
        raise RuntimeError(f"{command} is missing: install optimum-intel[openvino]")
    options = ["--task", "text-generation-with-past", "--weight-format", "int8"]
    done = subprocess.run(
        [str(command), "export", "openvino", "--model", source, *options, target],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip() or "no message").splitlines()[-1])


FORMS: dict[str, Callable[..., None]] = {
    "transformers": transformers_directory,
    "llamacpp": llamacpp_file,
    "openvino": openvino_directory,
}
