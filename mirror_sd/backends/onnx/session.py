"""A graph at work on a provider, with its paged caches in the provider's memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mirror_sd.backends.onnx.graph import BFLOAT, GraphBuilder
from mirror_sd.backends.onnx.providers import Provider, runtime_module
from mirror_sd.errors import ConfigError

# A provider that refuses a graph raises; its own report of several pages adds nothing.
_FATAL_ONLY = 4
_LONGEST_REASON = 600
_FAILURES = (
    *("Fail", "EPFail", "EngineError", "RuntimeException", "NotImplemented", "InvalidGraph"),
    "InvalidArgument",
)


class GraphSession:
    """The graph's inputs `cache.<i>` and outputs `written.<i>` are one memory, written in place."""

    def __init__(self, graph: GraphBuilder, provider: Provider, threads: int) -> None:
        """Raises `ConfigError` where the provider is there but cannot start."""
        self._runtime = runtime_module()
        self._device = provider.memory
        self._caches: list[Any] = []
        self._outputs: list[str] = []
        # The session reads them where they are.
        self._weights = [
            self._runtime.OrtValue.ortvalue_from_numpy_with_onnx_type(values, kind)
            if kind == BFLOAT
            else self._runtime.OrtValue.ortvalue_from_numpy(values)
            for values, kind in graph.weights.values()
        ]
        options = self._runtime.SessionOptions()
        options.log_severity_level = _FATAL_ONLY
        options.intra_op_num_threads = threads
        # Shapes differ from run to run, so that a plan of memory for one fits no other.
        options.enable_mem_pattern = False
        # Others want the cores, between runs the target, and threads that spin take them a slice
        # at a time: measured on two busy cores, a forward took four times as long.
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        options.add_external_initializers(list(graph.weights), self._weights)
        try:
            self._session = self._runtime.InferenceSession(
                graph.model().SerializeToString(), options, providers=list(provider.chain)
            )
        except _failures(self._runtime) as error:
            reason = " ".join(str(error).split())[:_LONGEST_REASON]
            raise ConfigError(
                f"ONNX Runtime cannot start on {provider.name!r}: {reason}"
            ) from error
        used = self._session.get_providers()
        if used[0] != provider.chain[0]:
            raise ConfigError(
                f"{provider.chain[0]} cannot start here, only {', '.join(used)}; {provider.install}"
            )
        self._binding = self._session.io_binding()

    def allocate(self, layers: int, shape: tuple[int, int]) -> None:
        """Zeros for each cache."""
        self._caches = [
            self._runtime.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32), self._device)
            for _ in range(layers)
        ]
        for layer, cache in enumerate(self._caches):
            self._binding.bind_ortvalue_input(f"cache.{layer}", cache)
        self._outputs = []

    def run(
        self, feeds: Mapping[str, NDArray[Any]], outputs: Sequence[str]
    ) -> list[NDArray[np.float32]]:
        """The outputs, of which the caches are not to be named."""
        for name, values in feeds.items():
            self._binding.bind_cpu_input(name, np.ascontiguousarray(values))
        if list(outputs) != self._outputs:
            self._outputs = list(outputs)
            self._binding.clear_binding_outputs()
            for layer, cache in enumerate(self._caches):
                self._binding.bind_ortvalue_output(f"written.{layer}", cache)
        for name in outputs:
            # Anew each time: what it is bound to has the shape of the last run.
            self._binding.bind_output(name, "cpu")
        self._session.run_with_iobinding(self._binding)
        return [value.numpy() for value in self._binding.get_outputs()[len(self._caches) :]]


def _failures(runtime: Any) -> tuple[type[Exception], ...]:
    """What a session raises that cannot be made; the runtime's own have no base of their own."""
    state = runtime.capi.onnxruntime_pybind11_state
    own = [getattr(state, name) for name in _FAILURES if hasattr(state, name)]
    return (RuntimeError, *own)
