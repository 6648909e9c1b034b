"""The target's own answers: what a draft has to foresee, and all that it is trained on.

Each answer is a function of its prompt, seed and temperature alone, whatever ran beside it, so a
run that was cut short goes on as if it had not been.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path

from mirror_sd.api.tokenizer import Tokenizer
from mirror_sd.engine import Engine
from mirror_sd.errors import ConfigError, InternalError
from mirror_sd.messages import Chunk, Failed, Finished, SamplingParams, Submit
from mirror_sd.training.plan import DataPlan, fingerprint
from mirror_sd.training.prompt_file import language
from mirror_sd.training.prompts import Conversation

HELD_OUT_OF = 12
_QUESTION_TEMPERATURE = 1.0
_QUESTION_TOP_P = 0.95
Advance = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt to be continued; `origin`: what it must be held out by."""

    prompt: tuple[int, ...]
    lang: str
    origin: str
    is_held_out: bool
    temperature: float
    seed: int
    max_tokens: int
    top_p: float = 1.0

    def key(self, model: str) -> str:
        """A digest of all that the answer depends on. `model`: one of the model, and of how it
        computes."""
        return fingerprint(
            model, self.prompt, self.temperature, self.seed, self.max_tokens, self.top_p
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """`tokens` holds the prompt, the answer, and the stop token where it ended by itself."""

    tokens: tuple[int, ...]
    prompt_length: int
    lang: str
    is_held_out: bool
    is_whole: bool


def tasks(
    tokenizer: Tokenizer,
    prompts: Sequence[Conversation],
    questions: Sequence[str],
    plan: DataPlan,
    seed: int,
    say: Callable[[str], None],
) -> list[Task]:
    """The held-out prompts, greedy, then the others: greedy and sampled ones mixed by `seed`.

    Where there are fewer prompts than answers wanted, they are answered again, sampled. `say` is
    told how many were too long. Raises `ConfigError` where nothing is left to train on, or to
    evaluate on.
    """
    origins = sorted({prompt.origin for prompt in prompts})
    random.Random(f"{seed}:held out").shuffle(origins)
    apart = set(origins[: max(len(origins) // HELD_OUT_OF, 1)] if len(origins) > 1 else ())
    own = [
        Conversation(({"role": "user", "content": text},), language(text), "own", f"asked:{index}")
        for index, text in enumerate(questions)
    ]
    held_out = [prompt for prompt in prompts if prompt.origin in apart]
    trained = [prompt for prompt in prompts if prompt.origin not in apart]
    room = _Room(tokenizer, plan)
    made = room.fitting(held_out, plan.held_out, is_held_out=True)
    first = room.fitting(trained, plan.answers, is_held_out=False)
    fresh = _merged(first, room.fitting(own, len(own), is_held_out=False))[: plan.answers]
    if not fresh:
        raise ConfigError(f"there is no prompt to train on of at most {room}")
    if not made:
        raise ConfigError(
            "there is nothing to hold out for the evaluation: at least two conversations are"
            f" needed, with prompts of at most {room}"
        )
    if room.left_out:
        say(f"left out: {room.left_out} of {room.read} prompts, of more than {room}")
    wanted: list[Task] = []
    again = 0
    while len(wanted) < plan.answers:
        part = fresh[: plan.answers - len(wanted)]
        wanted.extend(_varied(task, plan, seed, again) for task in part)
        again += 1
    return made + wanted


def _merged(first: Sequence[Task], second: Sequence[Task]) -> list[Task]:
    """Both in order, the second spread evenly among the first."""
    ranked = [
        ((i + 0.5) / len(part), item) for part in (first, second) for i, item in enumerate(part)
    ]
    return [item for _, item in sorted(ranked, key=lambda pair: pair[0])]


def _varied(task: Task, plan: DataPlan, seed: int, again: int) -> Task:
    """Greedy or sampled: by the prompt alone, so that more prompts do not change its answer."""
    rng = random.Random(f"{seed}:{again}:{task.prompt}")
    is_sampled = rng.random() < plan.sampled_share or again > 0
    temperature = plan.temperature if is_sampled else 0.0
    return replace(task, temperature=temperature, seed=rng.getrandbits(32))


class _Room:
    """For prompts; as text it is the most tokens of one, and what sets it. Counts the prompts that
    were `read`, and of them those `left_out`."""

    def __init__(self, tokenizer: Tokenizer, plan: DataPlan) -> None:
        self.read = self.left_out = 0
        self._tokenizer, self._plan = tokenizer, plan
        self._context = tokenizer.facts.max_context
        self._tokens = min(plan.prompt_tokens, self._context - plan.answer_tokens - 1)

    def __str__(self) -> str:
        if self._tokens == self._plan.prompt_tokens:
            return f"{self._tokens} tokens (--prompt-tokens)"
        return (
            f"{self._tokens} tokens (the context of {self._context} less --answer-tokens"
            f" {self._plan.answer_tokens})"
        )

    def fitting(
        self, prompts: Sequence[Conversation], limit: int, *, is_held_out: bool
    ) -> list[Task]:
        """Greedy tasks of the first `limit` prompts that are not too long."""
        made: list[Task] = []
        length = self._plan.answer_tokens
        for prompt in prompts:
            if len(made) == limit:
                break
            self.read += 1
            turns = [(m["role"], m["content"]) for m in prompt.messages]
            ids = tuple(self._tokenizer.encode_chat(turns))
            if len(ids) > self._tokens:
                self.left_out += 1
                continue
            made.append(Task(ids, prompt.lang, prompt.origin, is_held_out, 0.0, 0, length))
        return made


def question_tasks(tokenizer: Tokenizer, plan: DataPlan, seed: int) -> list[Task]:
    """The target goes on from the head of a user turn: it asks itself."""
    one, other = (tokenizer.encode_chat([("user", text)]) for text in ("1", "A"))
    head = next(i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return [
        Task(
            tuple(one[:head]),
            "",
            f"question:{index}",
            False,
            _QUESTION_TEMPERATURE,
            seed + index,
            plan.question_tokens,
            _QUESTION_TOP_P,
        )
        for index in range(plan.self_asked)
    ]


def questions(tokenizer: Tokenizer, made: Sequence[Answer]) -> list[str]:
    """The texts of those that ended by themselves, none twice."""
    texts = (tokenizer.decode(a.tokens[a.prompt_length :]).strip() for a in made if a.is_whole)
    return list(dict.fromkeys(text for text in texts if text))


def answer(
    engine: Engine,
    model: str,
    wanted: Sequence[Task],
    stop: tuple[int, ...],
    file: Path,
    advance: Advance,
) -> list[Answer]:
    """Answers in the order of `wanted`. Each is kept in `file` once it is there; those that the
    file has already of this `model` (see `Task.key`) are not made again. `stop`: the token that
    ends a turn, then any others. Raises `InternalError` where the engine fails."""
    done = _read(file)
    keys = [task.key(model) for task in wanted]
    todo = {key: task for key, task in zip(keys, wanted, strict=True) if key not in done}
    advance(len(wanted) - len(todo))
    with file.open("a", encoding="utf-8") as log:
        for key, made in _generate(engine, todo, stop):
            done[key] = made
            log.write(json.dumps({"key": key, **asdict(made)}) + "\n")
            advance(1)
    return [_as_wanted(done[key], task) for key, task in zip(keys, wanted, strict=True)]


def _as_wanted(made: Answer, task: Task) -> Answer:
    return replace(made, lang=task.lang, is_held_out=task.is_held_out)


def _generate(
    engine: Engine, todo: Mapping[str, Task], stop: tuple[int, ...]
) -> Iterator[tuple[str, Answer]]:
    """(key, answer) of each, as they come."""
    tokens: dict[str, list[int]] = {}
    waiting = iter(todo.items())
    while True:
        for key, task in islice(waiting, engine.slots - len(tokens)):
            tokens[key] = []
            engine.add(_submit(engine, task, key, stop))
        if not tokens:
            return
        for output in engine.step():
            key = output.request_id
            if isinstance(output, Failed):
                raise InternalError(f"the target failed at an answer: {output.message}")
            if isinstance(output, Chunk):
                tokens[key].extend(output.tokens)
            else:
                yield key, _finished(todo[key], tokens.pop(key), output, stop)


def _submit(engine: Engine, task: Task, key: str, stop: tuple[int, ...]) -> Submit:
    params = SamplingParams(
        max_tokens=task.max_tokens,
        seed=task.seed,
        temperature=task.temperature,
        top_p=task.top_p,
        stop_token_ids=stop,
        speculation=False,
    )
    return Submit(request_id=key, model=engine.model_name, prompt=task.prompt, params=params)


def _finished(task: Task, tokens: list[int], end: Finished, stop: tuple[int, ...]) -> Answer:
    is_whole = end.reason == "stop" and bool(stop)
    ending = stop[:1] if is_whole else ()
    return Answer(
        (*task.prompt, *tokens, *ending), len(task.prompt), task.lang, task.is_held_out, is_whole
    )


def stop_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that end an answer, the one that the chat template writes first."""
    stop = tokenizer.facts.eos_token_ids
    chat = tokenizer.encode_chat([("user", "1"), ("assistant", "A"), ("user", "1")])
    return tuple(sorted(stop, key=lambda token: token not in chat))


def _read(file: Path) -> dict[str, Answer]:
    """What a run that was cut short has left; a last line without an end is dropped.

    Raises `ConfigError` where the file is damaged otherwise.
    """
    if not file.exists():
        return {}
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        file.write_bytes(whole)
    found = {}
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            entry = json.loads(line)
            key = entry.pop("key")
            found[key] = Answer(**{**entry, "tokens": tuple(entry["tokens"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(
                f"{file}, line {number} is damaged: {error!r}; without that line its answer is"
                " made again"
            ) from error
    return found
