"""Which KV blocks a draft head's own keys and values cover, and the feature at their ends."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class HeadBlocks:
    """By block id of the target's pool. A block is whole when the head has taken in all its tokens,
    in the sequence that published it; who shares the block can then draft from it. The feature of
    its last token goes with the first token of the block after it.

    `width`: of a feature. Memory for features is taken as blocks are used.
    """

    def __init__(self, num_blocks: int, width: int) -> None:
        self._whole = bytearray(num_blocks)
        self._features: NDArray[np.float32] = np.zeros((num_blocks, width), dtype=np.float32)

    def forget(self, block: int) -> None:
        self._whole[block] = 0

    def mark(self, block: int) -> None:
        self._whole[block] = 1

    def whole_run(self, table: Sequence[int]) -> int:
        """Length of the run of whole blocks that `table` begins with."""
        for index, block in enumerate(table):
            if not self._whole[block]:
                return index
        return len(table)

    def keep_feature(self, block: int, feature: NDArray[np.float32]) -> None:
        self._features[block] = feature

    def last_feature(self, block: int) -> NDArray[np.float32]:
        """[width] of the last token of a whole block."""
        feature: NDArray[np.float32] = self._features[block]
        return feature
