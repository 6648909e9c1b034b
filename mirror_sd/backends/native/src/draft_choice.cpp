#include "draft_choice.h"

#include <algorithm>
#include <cmath>

namespace mirror {
namespace {

// Of mirror_sd/speculative/src/sampling.cpp: below it the choice is greedy.
constexpr double kGreedyBelow = 1e-5;
// A token this far below the lead has one chance in 22,000 to be drawn, and is not looked at.
constexpr double kReach = 10.0;

// argmax of score + noise, noise as the target will draw with.
size_t noisy_best(const SamplingKernels& kernels, const float* row, size_t count,
                  const int32_t* token_ids, const Drawing& drawing, const float* maxima,
                  size_t best) {
    const Scale scale{drawing.temperature, 0.0};
    const PhiloxKey key{static_cast<uint32_t>(drawing.seed),
                        static_cast<uint32_t>(drawing.seed >> 32)};
    const auto noise = [&](size_t index) {
        return gumbel(key, drawing.position, static_cast<uint32_t>(token_ids[index]));
    };
    double lead = score_of(scale, row[best]) + noise(best);
    double scores[kBlock];
    for (size_t first = 0, block = 0; first < count; first += kBlock, ++block) {
        if (score_of(scale, maxima[block]) < lead - kReach) continue;
        uint64_t mask = kernels.scores_at_least(row + first, std::min(kBlock, count - first), scale,
                                                lead - kReach, scores);
        for (; mask != 0; mask &= mask - 1) {
            const size_t i = static_cast<size_t>(__builtin_ctzll(mask));
            const double score = scores[i] + noise(first + i);
            if (score > lead || (score == lead && first + i < best)) lead = score, best = first + i;
        }
    }
    return best;
}

}  // namespace

DraftChoice choose_draft(const SamplingKernels& kernels, const float* row, size_t count,
                         const int32_t* token_ids, const Drawing& drawing, float* maxima) {
    const bool has_nan = kernels.block_maxima(row, count, maxima);
    const float* largest = std::max_element(maxima, maxima + (count + kBlock - 1) / kBlock);
    if (has_nan || !std::isfinite(*largest)) return {-1, 0.0f};
    const size_t first = static_cast<size_t>(largest - maxima) * kBlock;
    size_t index = static_cast<size_t>(std::find(row + first, row + count, *largest) - row);
    const bool greedy = !(drawing.temperature >= kGreedyBelow) || std::isinf(drawing.temperature);
    const Scale scale{greedy ? 1.0 : static_cast<double>(drawing.temperature), 0.0};
    const double peak = score_of(scale, *largest);
    if (!greedy) index = noisy_best(kernels, row, count, token_ids, drawing, maxima, index);
    const double total = kernels.sum_of_weights(row, count, scale, peak);
    const double weight = exp_of_nonpositive(score_of(scale, row[index]) - peak);
    return {static_cast<int>(index), static_cast<float>(weight / total)};
}

}  // namespace mirror
