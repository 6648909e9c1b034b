// From a row of logits to a token: the chain of mirror_sd/speculative/sampler.py, in one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sampling_kernels.h"

namespace mirror {

// The target gave NaN or infinity where a token must be chosen.
struct InvalidLogits : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// Rows of logits, one after the other.
struct LogitRows {
    const float* data;
    size_t rows;
    size_t vocab;

    const float* row(size_t index) const { return data + index * vocab; }
};

struct ChooserParams {
    double temperature;
    int64_t top_k;  // <= 0: off
    double top_p;   // >= 1: off
    float presence_penalty;
    float frequency_penalty;
    uint64_t seed;
    std::vector<std::pair<int64_t, float>> bias;
    std::vector<int64_t> stop_tokens;
};

enum class Ending { kNone, kStop, kLength };

struct Judgement {
    std::vector<int64_t> tokens;
    size_t accepted = 0;
    Ending ending = Ending::kNone;
};

// The name of an instruction set, empty for the one of MIRROR_SD_ISA or else the best of this CPU.
// Throws std::invalid_argument.
const SamplingKernels& sampling_kernels(const std::string& isa);

// Chooses the tokens of one sequence. Calls from several threads take turns.
class Chooser {
public:
    // Throws std::invalid_argument.
    Chooser(ChooserParams params, const std::vector<int64_t>& completion, const std::string& isa);

    // Count an accepted token.
    void commit(int64_t token);

    // The token at absolute `position`. Throws InvalidLogits, std::invalid_argument.
    int64_t choose(const float* row, size_t vocab, uint32_t position);

    // See mirror_sd.speculative.verifier.verify. Throws as `choose` does; what the rows before
    // the one at fault chose is then committed.
    Judgement judge(const LogitRows& logits, const std::vector<int64_t>& draft, uint32_t position,
                    int64_t room);

private:
    int64_t choose_locked(const float* row, size_t vocab, uint32_t position);
    void commit_locked(int64_t token);
    const float* adjusted(const float* row, size_t vocab);

    const ChooserParams params_;
    const SamplingKernels& kernels_;
    const bool greedy_, penalised_;
    std::unordered_map<int64_t, int64_t> counts_;
    std::vector<float> row_;
    std::mutex mutex_;
};

struct Logprob {
    double logprob;
    std::vector<std::pair<int64_t, double>> top;
};

// log softmax of the row at `token` and at the `best` most probable. Throws InvalidLogits,
// std::invalid_argument.
Logprob token_logprob(const float* row, size_t vocab, int64_t token, int64_t best,
                      const std::string& isa);

}  // namespace mirror
