"""The first half of a run: what the target answers, and what a draft learns from it, on disk."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from mirror_sd import engine as engines
from mirror_sd import model_store
from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.config import Config
from mirror_sd.engine import Engine
from mirror_sd.engine_backend import create_backend
from mirror_sd.errors import ConfigError
from mirror_sd.offline import load_tokenizer
from mirror_sd.training import answers, features, prompt_file, prompts
from mirror_sd.training.answers import Answer
from mirror_sd.training.dataset import Dataset
from mirror_sd.training.features import TargetHead
from mirror_sd.training.plan import Plan, fingerprint
from mirror_sd.training.progress import Reporter
from mirror_sd.training.prompts import Conversation
from mirror_sd.uir import program as programs
from mirror_sd.uir import tokenizer_files
from mirror_sd.uir.draft_file import tokenizer_digest
from mirror_sd.uir.model_spec import ModelSpec
from mirror_sd.uir.precision_plan import PrecisionPlan

MARK = "mark.json"
_SECONDS = "seconds"
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16


@dataclass(frozen=True, slots=True)
class Target:
    """The model that the draft is for. `name`: of its files, by which a server looks for the draft.
    `mark`: tells it, and how it computes its answers, from others."""

    name: str
    spec: ModelSpec
    head: TargetHead
    tokenizer: Tokenizer
    tokenizer_digest: str
    mark: str

    @classmethod
    def of(cls, config: Config, scratch: Path) -> Target:
        """Raises `ModelError`."""
        files = model_store.resolve(config.model.path)
        program = programs.load(files, PrecisionPlan.of("fp32"))
        tokenizer_files.export(files, scratch / "tokenizer")
        digest = tokenizer_digest(scratch / "tokenizer" / tokenizer_files.TOKENIZER)
        return cls(
            files.name,
            program.spec,
            TargetHead.of(program),
            load_tokenizer(config),
            digest,
            fingerprint(_contents(files.path), digest, *_computation(config)),
        )


def _contents(path: Path) -> str:
    """A digest of a model's files, of parts of the large ones: a finetune has the sizes and the
    names of its parent."""
    files = sorted(part for part in path.iterdir() if part.is_file()) if path.is_dir() else [path]
    digest = sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as content:
            for part in range(_SAMPLES):
                content.seek(max(size - _SAMPLE_BYTES, 0) * part // (_SAMPLES - 1))
                digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _computation(config: Config) -> tuple[str, ...]:
    """What the settings say of how answers are computed."""
    pool = next(iter(config.pools.values()))
    return (pool.engine, pool.device, pool.precision, config.engine.kv_precision)


def collect(
    config: Config,
    target: Target,
    plan: Plan,
    data: Path | None,
    out: Path,
    reporter: Reporter,
    *,
    may_make: bool = True,
) -> tuple[Dataset, dict[str, Any]]:
    """(what to train on; its `mark`, `facts` about it, the `seconds` that it took). What `out` has
    of it already is not made again.

    Raises `ConfigError` for data that cannot be read, and where they are not there and may not be
    made; `UnsupportedModel` where the model does not give its hidden states.
    """
    asked = _asked(data, plan.seed)
    taps = plan.train.taps or features.default_taps(target.spec.num_layers)
    if max(taps) > target.spec.num_layers:
        raise ConfigError(
            f"--taps names layer {max(taps)}; {target.name} has {target.spec.num_layers}"
        )
    mark = fingerprint(
        target.mark,
        asdict(plan.data),
        plan.seed,
        taps,
        plan.train.draft_vocab,
        _digest(asked),
    )
    directory = out / "data"
    file = directory / MARK
    found = _mark_of(file)
    if found != mark:
        if not may_make:
            raise ConfigError(
                f"{out} has no data of these options: give the model, data and sizes of its run"
            )
        if found is not None:
            reporter.say(f"{out} holds a run of another model, data or sizes: it is made anew")
            (directory / _SECONDS).unlink(missing_ok=True)
        directory.mkdir(parents=True, exist_ok=True)
        # A run that is cut short from here on has no data of any options.
        file.unlink(missing_ok=True)
        with _counted(directory / _SECONDS):
            made = _answers_and_features(config, target, plan, asked, taps, out, reporter)
            facts = _facts(made, Dataset(directory), taps)
        document = {"mark": mark, "facts": facts, "seconds": _spent(directory / _SECONDS)}
        partial_file = file.with_suffix(".partial")
        partial_file.write_text(json.dumps(document), encoding="utf-8")
        partial_file.replace(file)
    return Dataset(directory), json.loads(file.read_text(encoding="utf-8"))


@contextmanager
def _counted(file: Path) -> Iterator[None]:
    """Add the seconds of what is done within to those in `file`, however it ends."""
    begin = time.monotonic()
    try:
        yield
    finally:
        file.write_text(f"{_spent(file) + time.monotonic() - begin}\n", encoding="utf-8")


def _spent(file: Path) -> float:
    try:
        return float(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return 0.0


def _asked(data: Path | None, seed: int) -> list[Conversation]:
    if data is None:
        return prompts.bundled(seed)
    found = prompt_file.read(data)
    # Where not all are wanted, they are not those that the file begins with.
    random.Random(f"{seed}:prompts").shuffle(found)
    return found


def _mark_of(file: Path) -> str | None:
    """What the data beside it depend on; None where they are not there, or not whole."""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["mark"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _digest(asked: list[Conversation]) -> str:
    text = json.dumps([(prompt.messages, prompt.origin) for prompt in asked])
    return sha256(text.encode()).hexdigest()


def _answers_and_features(
    config: Config,
    target: Target,
    plan: Plan,
    asked: list[Conversation],
    taps: tuple[int, ...],
    out: Path,
    reporter: Reporter,
) -> list[Answer]:
    device_class = next(iter(config.pools))
    backend = create_backend(config, device_class)
    engine = engines.build_on(backend, config, device_class)
    made = _answers(engine, target, plan, asked, out, reporter)
    stop = answers.stop_tokens(target.tokenizer)
    vocabulary = features.draft_vocabulary(
        made, plan.train.draft_vocab, target.spec.vocab_size, stop
    )
    stats = engine.stats()
    total = sum(len(answer.tokens) for answer in made)
    with reporter.stage("hidden states", total) as advance:
        features.record(
            backend,
            target.head,
            made,
            vocabulary,
            taps,
            out / "data",
            num_blocks=stats.kv_blocks_free + stats.kv_blocks_used,
            block_size=config.engine.block_size,
            advance=partial(_plain, advance),
        )
    return made


def _answers(
    engine: Engine,
    target: Target,
    plan: Plan,
    asked: list[Conversation],
    out: Path,
    reporter: Reporter,
) -> list[Answer]:
    tokenizer, stop = target.tokenizer, answers.stop_tokens(target.tokenizer)
    wanted = answers.question_tasks(tokenizer, plan.data, plan.seed)
    with reporter.stage("questions", len(wanted)) as advance:
        own = answers.answer(
            engine, target.mark, wanted, stop, out / "questions.jsonl", partial(_plain, advance)
        )
    texts = answers.questions(tokenizer, own)
    wanted = answers.tasks(tokenizer, asked, texts, plan.data, plan.seed, reporter.say)
    with reporter.stage("answers", len(wanted)) as advance:
        return answers.answer(
            engine, target.mark, wanted, stop, out / "answers.jsonl", partial(_plain, advance)
        )


def _plain(advance: Any, done: int) -> None:
    advance(done, "")


def _facts(made: list[Answer], dataset: Dataset, taps: tuple[int, ...]) -> dict[str, Any]:
    """Counts for the report; `coverage`: share of the held-out answers' tokens that the draft
    vocabulary has."""
    trained = dataset.conversations(held_out=False)
    held_out = dataset.conversations(held_out=True)
    known = set(dataset.vocabulary.tolist())
    said = [t for a in made if a.is_held_out for t in a.tokens[a.prompt_length :]]
    return {
        "conversations": len(trained),
        "answer_tokens": dataset.answer_tokens(trained),
        "held_out_conversations": len(held_out),
        "held_out_answer_tokens": dataset.answer_tokens(held_out),
        "tokens": int(dataset.offsets[-1]),
        "taps": list(taps),
        "draft_vocab": len(dataset.vocabulary),
        "coverage": round(sum(t in known for t in said) / max(len(said), 1), 4),
    }
