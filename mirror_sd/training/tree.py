"""What a small tree of drafts would bring over a chain, from the ranks of an evaluation.

A node of a tree is a path of ranks: (0, 1) is the draft's second choice after its first one. The
draft of a node was made after the very tokens on its path, so the ranks of the answer's tokens show
which path of any tree it would have followed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mirror_sd.training.evaluation import NOWHERE

Ranks = Sequence[NDArray[np.int8]]
Path = tuple[int, ...]


def best_tree(ranks: Ranks, nodes: int) -> set[Path]:
    """The static tree of so many nodes that most starts follow furthest. Its nodes hang together,
    as no path is followed more often than its beginning."""
    followed: Counter[Path] = Counter()
    for one in ranks:
        for start in range(one.shape[1]):
            path = _path(one, start)
            followed.update(path[:depth] for depth in range(1, len(path) + 1))
    ranked = sorted(followed, key=lambda path: (-followed[path], len(path), path))
    return set(ranked[:nodes])


def tokens_per_verify(ranks: Ranks, tree: set[Path]) -> float:
    """Tokens for each verify of the whole tree, over all answers."""
    rounds = tokens = 0
    for one in ranks:
        place, length = 0, one.shape[1]
        while place < length:
            path = _path(one, place)
            depth = 0
            while depth < len(path) and path[: depth + 1] in tree:
                depth += 1
            rounds += 1
            tokens += min(depth + 1, length - place)
            place += depth + 1
    return tokens / max(rounds, 1)


def chain(length: int) -> set[Path]:
    return {(0,) * depth for depth in range(1, length + 1)}


def _path(ranks: NDArray[np.int8], start: int) -> Path:
    """Ranks of the tokens from `start` on, as far as the draft has them among its choices."""
    depth, length = ranks.shape
    path: list[int] = []
    while len(path) < depth and start + len(path) < length:
        rank = int(ranks[len(path), start + len(path)])
        if rank == NOWHERE:
            break
        path.append(rank)
    return tuple(path)
