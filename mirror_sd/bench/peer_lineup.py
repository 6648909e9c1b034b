"""Who is measured: the peers that an interpreter has, the forms of the model they need, and us."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mirror_sd.bench.peer_process import PeerFailed, PeerProcess, engine_command, peer_command
from mirror_sd.errors import ConfigError
from mirror_sd.model_store import ModelFiles, cache_dir

FAMILIES = ("transformers", "llamacpp", "openvino")
OURS = "mirror-sd"
HF_TOKENS, LLAMACPP_TOKENS, OPENVINO_TOKENS = 5, 2, 5  # drafted: what each one's guide advises
PREPARE_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Contestant:
    """`command` starts its process, `options` are what its `load` is given beside the streams."""

    name: str
    family: str
    command: Sequence[str]
    options: dict[str, Any] = field(default_factory=dict)
    drafts: bool = False

    @property
    def takes_several(self) -> bool:
        """Whether it can run several prompts at once."""
        return not self.drafts or self.family in (OURS, "openvino")


@dataclass(frozen=True, slots=True)
class _Peer:
    name: str
    family: str
    form: str
    lookup: int = 0


def _known(file_type: str | None) -> list[_Peer]:
    """All peers for a model; `file_type` is that of a GGUF file, such as `q4_1`."""
    llamacpp = [] if file_type is None else list(dict.fromkeys([file_type, "q8_0", "bf16"]))
    return [
        _Peer("transformers-bf16", "transformers", "transformers"),
        _Peer("transformers-bf16-lookup", "transformers", "transformers", HF_TOKENS),
        *(_Peer(f"llamacpp-{kind}", "llamacpp", kind) for kind in llamacpp),
        *(
            _Peer(f"llamacpp-{kind}-lookup", "llamacpp", kind, LLAMACPP_TOKENS)
            for kind in llamacpp
            if kind == "q8_0"
        ),
        _Peer("openvino-int8", "openvino", "openvino"),
        _Peer("openvino-int8-lookup", "openvino", "openvino", OPENVINO_TOKENS),
    ]


@dataclass(slots=True)
class Lineup:
    """`versions` by family; `absent` rows say why a peer is not measured."""

    contestants: list[Contestant] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    absent: list[dict[str, str]] = field(default_factory=list)


def ours(
    precisions: Sequence[str], drafters: Sequence[str], pool: str, overrides: Sequence[str]
) -> list[Contestant]:
    """Our engine in each precision with each drafter."""
    return [
        Contestant(
            name=f"{OURS}-{precision}" + ("" if drafter == "off" else f"-{drafter}"),
            family=OURS,
            command=engine_command(),
            options={
                "overrides": [
                    f"pools.{pool}.precision={precision}",
                    *(() if drafter == "off" else (f"speculation.drafter={drafter}",)),
                    *overrides,
                ],
                "drafter": drafter,
            },
            drafts=drafter != "off",
        )
        for precision in precisions
        for drafter in drafters
    ]


def peers(
    python: Path,
    files: ModelFiles,
    *,
    wanted: Sequence[str],
    context: int,
    threads: int,
    report: Callable[[str], None],
) -> Lineup:
    """The wanted peers (empty: all) that `python` can import, with the model in their forms.

    Making a form takes up to a minute; it is kept in the cache. Raises `ConfigError` where a
    wanted peer is not known.
    """
    known = _known(_file_type(files))
    names = [peer.name for peer in known]
    unknown = sorted(set(wanted) - set(names))
    if unknown:
        raise ConfigError(f"no peer {unknown[0]!r} for this model; there are {', '.join(names)}")
    lineup = Lineup()
    forms = _Forms(files, python, threads, report)
    reasons: dict[str, str] = {}
    for family in FAMILIES:
        if any(peer.family == family for peer in known if not wanted or peer.name in wanted):
            _probe(family, python, threads, lineup, reasons)
    for peer in known:
        if wanted and peer.name not in wanted:
            continue
        try:
            if peer.family in reasons:
                raise PeerFailed(reasons[peer.family])
            model = forms.path(peer.form)
        except PeerFailed as error:
            lineup.absent.append({"peer": peer.name, "reason": error.message})
            continue
        options = {"family": peer.family, "model": str(model), "lookup": peer.lookup}
        if peer.family == "llamacpp":
            options["context"] = context
        lineup.contestants.append(
            Contestant(
                peer.name, peer.family, peer_command(python), options, drafts=peer.lookup > 0
            )
        )
    return lineup


def transformers_model(files: ModelFiles, threads: int, report: Callable[[str], None]) -> Path:
    """The model as a directory that transformers reads with the interpreter of this process.

    Raises `PeerFailed`.
    """
    return _Forms(files, Path(sys.executable), threads, report).path("transformers")


def _probe(
    family: str, python: Path, threads: int, lineup: Lineup, reasons: dict[str, str]
) -> None:
    try:
        with PeerProcess(peer_command(python), threads) as process:
            lineup.versions[family] = process.call("versions", family=family)
    except PeerFailed as error:
        reasons[family] = error.message


class _Forms:
    """Makes each form once, whole or not at all."""

    def __init__(
        self, files: ModelFiles, python: Path, threads: int, report: Callable[[str], None]
    ) -> None:
        self._files = files
        self._python = python
        self._threads = threads
        self._report = report
        status = (files.path / "config.json" if files.path.is_dir() else files.path).stat()
        key = f"{files.path.absolute()} {status.st_size} {status.st_mtime_ns}"
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        self._cache = cache_dir() / "peers" / f"{files.name}-{digest}"
        self._failed: dict[str, PeerFailed] = {}

    def path(self, form: str) -> Path:
        """Where a form is: `transformers`, `openvino` or a type of GGUF file."""
        is_given = form == (
            "transformers" if self._files.path.is_dir() else _file_type(self._files)
        )
        if is_given:
            return self._files.path
        if form == "transformers":
            return self._made(form, "transformers", self._files.path)
        if form == "openvino":
            return self._made(form, "openvino", self.path("transformers"))
        return self._made(f"{form}.gguf", "llamacpp", self._files.path, quantisation=form)

    def _made(self, name: str, kind: str, source: Path, **options: str) -> Path:
        target = self._cache / name
        if target.exists():
            return target
        if name in self._failed:
            raise self._failed[name]
        self._report(f"preparing {target}")
        scratch = self._cache / f".new-{name}"
        try:
            self._cache.mkdir(parents=True, exist_ok=True)
            with PeerProcess(peer_command(self._python), self._threads) as process:
                process.call(
                    "prepare",
                    PREPARE_TIMEOUT_S,
                    kind=kind,
                    source=str(source),
                    target=str(scratch),
                    **options,
                )
            scratch.rename(target)
        except PeerFailed as error:
            self._failed[name] = error
            raise
        except OSError as error:
            self._failed[name] = PeerFailed(f"cannot keep {target}: {error.strerror}")
            raise self._failed[name] from error
        finally:
            if scratch.is_dir():
                shutil.rmtree(scratch)
            elif scratch.exists():
                scratch.unlink()
        return target


def _file_type(files: ModelFiles) -> str | None:
    """The quantisation of a GGUF file, as `q4_1`; None for a directory."""
    if files.format != "gguf":
        return None
    from gguf.constants import LlamaFileType

    from mirror_sd.uir.gguf_file import GgufFile

    stated = GgufFile(files.path).metadata.get("general.file_type")
    try:
        return str(LlamaFileType(stated).name).removeprefix("MOSTLY_").lower()
    except ValueError:
        return "gguf"
