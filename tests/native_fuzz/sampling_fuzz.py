"""Random calls of the sampling part: each gives a token of the vocabulary or raises one of the
errors it promises. `python -m tests.native_fuzz.sampling_fuzz SECONDS [SEED]`"""

from __future__ import annotations

import faulthandler
import sys
import time
from collections import Counter
from typing import Any

import numpy as np

if __name__ == "__main__":
    from tests.native_fuzz import sanitized  # noqa: F401
from mirror_sd import _native
from tests.native_fuzz.arrays import floats, perhaps

PROMISED = (TypeError, ValueError, _native.InvalidLogits)
INTEGERS = (0, 1, 2, 5, 63, 64, 65, 1000, -1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), 2**64)
REALS = (0.0, 1.0, 0.5, 1e-5, 9e-6, 5e-324, 1e300, 1e40, -1.0, float("nan"), float("inf"), -np.inf)


def integer(rng: np.random.Generator) -> Any:
    return INTEGERS[rng.integers(len(INTEGERS))]


def real(rng: np.random.Generator) -> Any:
    return float(rng.random()) if rng.random() < 0.7 else REALS[rng.integers(len(REALS))]


def tokens(rng: np.random.Generator, vocab: int) -> list[Any]:
    found: list[Any] = rng.integers(0, max(vocab, 1), rng.integers(0, 6)).tolist()
    if rng.random() < 0.1:
        found.append(integer(rng))
    return found


def one_chooser(rng: np.random.Generator, vocab: int) -> _native.Chooser:
    return _native.Chooser(
        temperature=real(rng),
        top_k=int(rng.integers(0, vocab + 2)) if rng.random() < 0.7 else integer(rng),
        top_p=real(rng),
        presence_penalty=real(rng) if rng.random() < 0.5 else 0.0,
        frequency_penalty=real(rng) if rng.random() < 0.5 else 0.0,
        seed=int(rng.integers(2**63)) if rng.random() < 0.9 else integer(rng),
        bias=[(token, real(rng)) for token in tokens(rng, vocab)] if rng.random() < 0.3 else [],
        stop_tokens=tokens(rng, vocab),
        completion=tokens(rng, vocab),
        isa=str(rng.choice([*_native.available_isas(), "", "sse9"])),
    )


def one_call(rng: np.random.Generator) -> str:
    vocab = int(rng.choice([0, 1, 2, 7, 63, 64, 65, 128, 500, 5000]))
    rows = int(rng.integers(0, 5))
    chooser = one_chooser(rng, vocab)
    for _ in range(4):
        match rng.integers(4):
            case 0:
                row = perhaps(rng, floats(rng, vocab))
                assert 0 <= chooser.choose(row, integer(rng)) < len(row)
            case 1:
                draft = tokens(rng, vocab)[: max(rows - 1, 0)]
                room = int(rng.integers(0, 6)) if rng.random() < 0.9 else integer(rng)
                logits = perhaps(rng, floats(rng, rows, vocab))
                chosen, accepted, ending = chooser.judge(logits, draft, integer(rng), room)
                assert all(0 <= token < logits.shape[1] for token in chosen)
                assert accepted <= min(len(draft), len(chosen)) and ending in (0, 1, 2)
            case 2:
                best = int(rng.integers(0, vocab + 2)) if rng.random() < 0.8 else integer(rng)
                token = int(rng.integers(0, vocab + 1)) if rng.random() < 0.9 else integer(rng)
                row = perhaps(rng, floats(rng, vocab))
                _, top = _native.token_logprob(row, token, best)
                assert len(top) == min(max(best, 0), len(row))
            case _:
                chooser.commit(integer(rng))
    return "returned"


def main() -> None:
    seconds = float(sys.argv[1])
    faulthandler.dump_traceback_later(4 * seconds + 120, exit=True)  # a call that hangs is an error
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 2**32
    print("seed", seed, flush=True)
    rng = np.random.default_rng(seed)
    ends: Counter[str] = Counter()
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            ends[one_call(rng)] += 1
        except PROMISED as error:
            ends[type(error).__name__] += 1
    print(dict(ends))
    # A fuzz in which all calls fail early would test nothing.
    assert min(ends[name] for name in ("returned", "TypeError", "ValueError")) > 10


if __name__ == "__main__":
    main()
