// Which token a draft proposes from a row of its logits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sampling_kernels.h"

namespace mirror {

// How a sequence draws its tokens; see backends/protocol.py.
struct Drawing {
    float temperature;
    uint64_t seed;
    uint32_t position;  // of the token to be drawn
};

struct DraftChoice {
    int index;          // into the row, or -1 if the logits are no numbers
    float probability;  // by softmax at the temperature; at 1 for a greedy choice
};

// token_ids: what the target calls each token of the row. maxima: room for one number a block.
DraftChoice choose_draft(const SamplingKernels& kernels, const float* row, size_t count,
                         const int32_t* token_ids, const Drawing& drawing, float* maxima);

}  // namespace mirror
