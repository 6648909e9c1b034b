// The passes over a row of logits, compiled once for each instruction set. All give the same bits.
#pragma once

#include <cstddef>
#include <cstdint>

#include "elementary.h"

namespace mirror {

// Tokens are handled in blocks of this many; the last block of a row may be shorter.
constexpr size_t kBlock = 64;

// What turns a logit into a score: x / divisor - offset, in double. It preserves order.
struct Scale {
    double divisor;
    double offset;
};

static inline double score_of(Scale scale, float logit) {
    return static_cast<double>(logit) / scale.divisor - scale.offset;
}

struct SamplingKernels {
    const char* name;

    // The maximum of each block into `maxima`; true if there is a NaN anywhere.
    bool (*block_maxima)(const float* row, size_t vocab, float* maxima);

    // Sum over the row of exp(score - peak), where no score exceeds `peak`.
    double (*sum_of_weights)(const float* row, size_t vocab, Scale scale, double peak);

    // Scores of the block at `block`; bit i is set where score i >= threshold.
    uint64_t (*scores_at_least)(const float* block, size_t count, Scale scale, double threshold,
                                double* scores);

    // Bit i is set where logit i / temperature + Gumbel noise of token first + i may reach `lead`;
    // now and then also where it does not. `first` is a multiple of 4, `words` gets the uniform
    // words of the block. No score may exceed `lead` by more than a few tens.
    uint64_t (*may_reach)(const float* block, size_t count, double temperature, double lead,
                          PhiloxKey key, uint32_t position, uint32_t first, uint32_t* words);
};

}  // namespace mirror
