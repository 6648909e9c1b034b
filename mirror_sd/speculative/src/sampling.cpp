#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>

namespace mirror {

std::vector<std::string> available_isas();  // best first
const SamplingKernels& sampling_kernels_portable();
#ifdef MIRROR_HAVE_AVX2
const SamplingKernels& sampling_kernels_avx2();
#endif
#ifdef MIRROR_HAVE_AVX512
const SamplingKernels& sampling_kernels_avx512();
#endif
#ifdef MIRROR_HAVE_AVX512_VNNI
const SamplingKernels& sampling_kernels_avx512_vnni();
#endif

namespace {

// Below it logits are so far apart that noise decides nothing, and dividing by it overflows.
constexpr double kGreedyBelow = 1e-5;
// -log(-log(u)) of the largest u, rounded up: no cell's noise exceeds it.
constexpr double kMaxGumbel = 22.9;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Candidate {
    double score;
    int64_t token;
};

// No candidate is worse.
constexpr Candidate kWorst{-kInfinity, std::numeric_limits<int64_t>::max()};

bool is_better(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.token < b.token);
}

// A row with the maxima of its blocks: most questions need to look into few of the blocks.
class Row {
public:
    Row(const float* logits, size_t vocab, const SamplingKernels& kernels)
        : logits_(logits), vocab_(vocab), kernels_(kernels), maxima_((vocab + kBlock - 1) / kBlock) {
        const bool has_nan = kernels.block_maxima(logits, vocab, maxima_.data());
        const auto peak = std::max_element(maxima_.begin(), maxima_.end());
        const size_t first = static_cast<size_t>(peak - maxima_.begin()) * kBlock;
        const float* at = has_nan ? std::find_if(logits, logits + vocab, [](float x) { return x != x; })
                                  : std::find(logits + first, logits + vocab, *peak);
        best_ = at - logits;
        if (!std::isfinite(*at)) {
            throw InvalidLogits("logit " + text_of(*at) + " at token " + std::to_string(best_));
        }
    }

    const float* logits() const { return logits_; }
    size_t vocab() const { return vocab_; }
    const SamplingKernels& kernels() const { return kernels_; }
    const std::vector<float>& maxima() const { return maxima_; }
    // The lowest index of the maximum, which is finite.
    int64_t best() const { return best_; }

    // The best by score, where unequal logits may have equal scores.
    Candidate best_candidate(Scale scale) const {
        const Candidate best = candidate(scale, best_);
        if (scale.divisor < 1e100) return best;  // no quotient is rounded to 0
        int64_t token = 0;
        while (score_of(scale, logits_[token]) != best.score) ++token;
        return {best.score, token};
    }

    Candidate candidate(Scale scale, int64_t token) const {
        return {score_of(scale, logits_[token]), token};
    }

    // visit(first token, count) for each block whose maximum's score is at least `threshold()`.
    template <typename Threshold, typename Visit>
    void blocks_at_least(Scale scale, Threshold threshold, Visit visit) const {
        for (size_t block = 0; block < maxima_.size(); ++block) {
            if (score_of(scale, maxima_[block]) < threshold()) continue;
            const size_t first = block * kBlock;
            visit(first, std::min(kBlock, vocab_ - first));
        }
    }

private:
    static std::string text_of(float x) {
        return x != x ? "nan" : x > 0 ? "inf" : "-inf";
    }

    const float* logits_;
    size_t vocab_;
    const SamplingKernels& kernels_;
    std::vector<float> maxima_;
    int64_t best_;
};

template <typename Visit>
void each_bit(uint64_t mask, Visit visit) {
    for (; mask != 0; mask &= mask - 1) visit(static_cast<size_t>(__builtin_ctzll(mask)));
}

// All tokens whose score is at least `threshold`, by index.
std::vector<Candidate> at_least(const Row& row, Scale scale, double threshold) {
    std::vector<Candidate> found;
    double scores[kBlock];
    row.blocks_at_least(scale, [&] { return threshold; }, [&](size_t first, size_t count) {
        const uint64_t mask = row.kernels().scores_at_least(row.logits() + first, count, scale,
                                                            threshold, scores);
        each_bit(mask, [&](size_t i) {
            found.push_back({scores[i], static_cast<int64_t>(first + i)});
        });
    });
    return found;
}

void keep_best(std::vector<Candidate>& candidates, size_t count) {
    if (count >= candidates.size()) return;
    std::nth_element(candidates.begin(), candidates.begin() + count - 1, candidates.end(), is_better);
    candidates.resize(count);
}

// The `count` >= 1 best tokens, best first.
std::vector<Candidate> largest(const Row& row, Scale scale, size_t count) {
    count = std::min(count, row.vocab());
    double threshold = -kInfinity;
    if (count <= row.maxima().size()) {
        // That many blocks have a token which is at least the count-th largest maximum.
        std::vector<float> maxima = row.maxima();
        std::nth_element(maxima.begin(), maxima.begin() + count - 1, maxima.end(), std::greater<>());
        threshold = score_of(scale, maxima[count - 1]);
    }
    std::vector<Candidate> found = at_least(row, scale, threshold);
    keep_best(found, count);
    std::sort(found.begin(), found.end(), is_better);
    return found;
}

// exp(score - peak) of each; a run of equal scores is computed once.
std::vector<double> weights_of(const std::vector<Candidate>& candidates, double peak) {
    std::vector<double> weights;
    weights.reserve(candidates.size());
    for (size_t i = 0; i < candidates.size(); ++i) {
        const bool repeats = i > 0 && candidates[i].score == candidates[i - 1].score;
        weights.push_back(repeats ? weights.back()
                                  : exp_of_nonpositive(candidates[i].score - peak));
    }
    return weights;
}

double sum_of(const std::vector<double>& weights) {
    double sum = 0.0;
    for (const double weight : weights) sum += weight;
    return sum;
}

// The last of the shortest prefix of sorted `ordered` with probability >= top_p, where the tokens
// before it have the weight `before` and all have `total`; its end if no prefix has.
Candidate last_of_prefix(const std::vector<Candidate>& ordered, double peak, double top_p,
                         double before, double total) {
    const std::vector<double> weights = weights_of(ordered, peak);
    for (size_t i = 0; i < ordered.size(); ++i) {
        before += weights[i];
        if (before / total >= top_p) return ordered[i];
    }
    return ordered.back();
}

// As `last_of_prefix`, of candidates by index. If they are many, only those near the nucleus's end
// are sorted: with the scores in bins it is known in which bin the end lies.
Candidate last_of_nucleus(std::vector<Candidate> candidates, const std::vector<double>& weights,
                          double peak, double top_p, double total) {
    constexpr size_t few = 1024, bins = 2048;
    double before = 0.0;
    if (candidates.size() > few) {
        double low = peak;
        for (const Candidate& candidate : candidates) {
            if (candidate.score > -kInfinity) low = std::min(low, candidate.score);
        }
        double width = std::min(peak - low, 64.0) / (bins - 1);
        if (!(width > 0.0)) width = 1.0;
        std::vector<uint16_t> bin_of(candidates.size());
        std::vector<double> mass(bins);
        for (size_t i = 0; i < candidates.size(); ++i) {
            const double depth = std::min((peak - candidates[i].score) / width, bins - 1.0);
            bin_of[i] = static_cast<uint16_t>(depth);
            mass[bin_of[i]] += weights[i];
        }
        size_t bin = 0;
        while (bin < bins - 1 && (before + mass[bin]) / total < top_p) before += mass[bin++];
        size_t kept = 0;
        for (size_t i = 0; i < candidates.size(); ++i) {
            if (bin_of[i] == bin) candidates[kept++] = candidates[i];
        }
        candidates.resize(kept);
    }
    if (candidates.empty()) return kWorst;
    if (!std::is_sorted(candidates.begin(), candidates.end(), is_better)) {
        std::sort(candidates.begin(), candidates.end(), is_better);
    }
    return last_of_prefix(candidates, peak, top_p, before, total);
}

// The worst token that top-k and top-p leave.
Candidate cutoff(const Row& row, Scale scale, int64_t top_k, double top_p) {
    const double peak = row.best_candidate(scale).score;
    if (top_k > 0 && static_cast<uint64_t>(top_k) < row.vocab()) {
        const std::vector<Candidate> kept = largest(row, scale, static_cast<size_t>(top_k));
        if (top_p >= 1.0) return kept.back();
        return last_of_prefix(kept, peak, top_p, 0.0, sum_of(weights_of(kept, peak)));
    }
    if (top_p >= 1.0) return kWorst;
    const double total = row.kernels().sum_of_weights(row.logits(), row.vocab(), scale, peak);
    for (const double depth : {4.0, 10.0, kInfinity}) {
        std::vector<Candidate> top = at_least(row, scale, peak - depth);
        const std::vector<double> weights = weights_of(top, peak);
        // Sums in another order differ by less than this margin.
        if (depth == kInfinity || sum_of(weights) / total >= top_p + 1e-9) {
            return last_of_nucleus(std::move(top), weights, peak, top_p, total);
        }
    }
    return kWorst;  // not reached
}

// argmax of score + noise over the tokens not worse than `worst`, ties to the lower token.
int64_t noisy_argmax(const Row& row, Scale scale, const Candidate& worst, PhiloxKey key,
                     uint32_t position) {
    const auto noisy = [&](Candidate candidate) {
        candidate.score += gumbel(key, position, static_cast<uint32_t>(candidate.token));
        return candidate;
    };
    Candidate lead = noisy(row.best_candidate(scale));
    uint32_t words[kBlock];
    const auto threshold = [&] {
        const double slack = std::fabs(lead.score) * 0x1p-50;
        return std::max(worst.score, lead.score - kMaxGumbel - slack);
    };
    row.blocks_at_least(scale, threshold, [&](size_t first, size_t count) {
        const uint64_t mask =
            row.kernels().may_reach(row.logits() + first, count, scale.divisor, lead.score, key,
                                    position, static_cast<uint32_t>(first), words);
        each_bit(mask, [&](size_t i) {
            Candidate candidate = row.candidate(scale, static_cast<int64_t>(first + i));
            if (is_better(worst, candidate)) return;
            candidate.score += gumbel_of(words[i]);
            if (is_better(candidate, lead)) lead = candidate;
        });
    });
    return lead.token;
}

void check_vocab(size_t vocab) {
    if (vocab == 0) throw std::invalid_argument("logits of an empty vocabulary");
    if (vocab > std::numeric_limits<uint32_t>::max() / 2) {
        throw std::invalid_argument("a vocabulary of " + std::to_string(vocab) + " is too large");
    }
}

}  // namespace

const SamplingKernels& sampling_kernels(const std::string& isa) {
    const char* forced = std::getenv("MIRROR_SD_ISA");
    const std::vector<std::string> available = available_isas();
    std::string name = isa;
    if (name.empty() && forced != nullptr) name = forced;
    if (name.empty()) name = available.front();
    if (std::find(available.begin(), available.end(), name) == available.end()) {
        std::string known;
        for (const std::string& one : available) known += (known.empty() ? "" : ", ") + one;
        throw std::invalid_argument("instruction set '" + name + "' is not one of " + known);
    }
#ifdef MIRROR_HAVE_AVX512_VNNI
    if (name == "avx512_vnni") return sampling_kernels_avx512_vnni();
#endif
#ifdef MIRROR_HAVE_AVX512
    if (name == "avx512") return sampling_kernels_avx512();
#endif
#ifdef MIRROR_HAVE_AVX2
    if (name == "avx2") return sampling_kernels_avx2();
#endif
    return sampling_kernels_portable();
}

Chooser::Chooser(ChooserParams params, const std::vector<int64_t>& completion,
                 const std::string& isa)
    : params_(std::move(params)),
      kernels_(sampling_kernels(isa)),
      greedy_(params_.temperature < kGreedyBelow),
      penalised_(params_.presence_penalty != 0 || params_.frequency_penalty != 0) {
    if (!std::isfinite(params_.temperature)) {
        throw std::invalid_argument("the temperature is not a finite number");
    }
    if (std::isnan(params_.top_p)) throw std::invalid_argument("top_p is not a number");
    for (const int64_t token : completion) commit_locked(token);
}

void Chooser::commit(int64_t token) {
    const std::lock_guard<std::mutex> lock(mutex_);
    commit_locked(token);
}

int64_t Chooser::choose(const float* row, size_t vocab, uint32_t position) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return choose_locked(row, vocab, position);
}

Judgement Chooser::judge(const LogitRows& logits, const std::vector<int64_t>& draft,
                         uint32_t position, int64_t room) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (logits.rows < draft.size() + 1) {
        throw std::invalid_argument(std::to_string(logits.rows) + " rows of logits for a draft of " +
                                    std::to_string(draft.size()));
    }
    if (room < 1) throw std::invalid_argument("no room for a token");
    Judgement done;
    for (size_t row = 0; row <= draft.size(); ++row) {
        const int64_t token = choose_locked(logits.row(row), logits.vocab,
                                            position + static_cast<uint32_t>(row));
        const auto& stops = params_.stop_tokens;
        if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
            done.ending = Ending::kStop;
            break;
        }
        done.tokens.push_back(token);
        commit_locked(token);
        const bool matches = row < draft.size() && draft[row] == token;
        done.accepted += matches;
        if (static_cast<int64_t>(done.tokens.size()) == room) {
            done.ending = Ending::kLength;
            break;
        }
        if (!matches) break;
    }
    return done;
}

void Chooser::commit_locked(int64_t token) {
    if (penalised_) ++counts_[token];
}

int64_t Chooser::choose_locked(const float* logits, size_t vocab, uint32_t position) {
    check_vocab(vocab);
    const Row row(adjusted(logits, vocab), vocab, kernels_);
    if (greedy_) return row.best();
    const Scale scale{params_.temperature, 0.0};
    const PhiloxKey key{static_cast<uint32_t>(params_.seed),
                        static_cast<uint32_t>(params_.seed >> 32)};
    return noisy_argmax(row, scale, cutoff(row, scale, params_.top_k, params_.top_p), key,
                        position);
}

const float* Chooser::adjusted(const float* logits, size_t vocab) {
    if (params_.bias.empty() && counts_.empty()) return logits;
    row_.assign(logits, logits + vocab);
    const auto at = [&](int64_t token) -> float& {
        if (token < 0 || static_cast<uint64_t>(token) >= vocab) {
            throw std::invalid_argument("token " + std::to_string(token) +
                                        " is outside the vocabulary of " + std::to_string(vocab));
        }
        return row_[static_cast<size_t>(token)];
    };
    for (const auto& [token, bias] : params_.bias) at(token) += bias;
    for (const auto& [token, count] : counts_) {
        float& logit = at(token);
        logit -= params_.presence_penalty;
        logit -= params_.frequency_penalty * static_cast<float>(count);
    }
    return row_.data();
}

Logprob token_logprob(const float* logits, size_t vocab, int64_t token, int64_t best,
                      const std::string& isa) {
    check_vocab(vocab);
    if (token < 0 || static_cast<uint64_t>(token) >= vocab) {
        throw std::invalid_argument("token " + std::to_string(token) +
                                    " is outside the vocabulary of " + std::to_string(vocab));
    }
    const SamplingKernels& kernels = sampling_kernels(isa);
    const Row row(logits, vocab, kernels);
    const double peak = logits[row.best()];
    const double total = kernels.sum_of_weights(logits, vocab, {1.0, 0.0}, peak);
    const Scale scale{1.0, peak + log_of_positive(total)};
    Logprob result{row.candidate(scale, token).score, {}};
    if (best > 0) {
        for (const Candidate& one : largest(row, scale, static_cast<size_t>(best))) {
            result.top.emplace_back(one.token, one.score);
        }
    }
    return result;
}

}  // namespace mirror
