#include "draft_head.h"

#include <algorithm>
#include <numeric>

#include "packing.h"
#include "sampling.h"

namespace mirror {
namespace {

constexpr int kMostSteps = 1024;
// After those of the layer.
enum Phase { kTakeFeatures, kFuseFeatures, kJoin, kFuseInput, kFinalNorm, kHead, kChoose, kPhases };

int tile_for(int rows) {
    int tile = 1;
    while (tile < kTile && tile < rows) tile *= 2;
    return tile;
}

}  // namespace

DraftHead::DraftHead(Spec spec, int feature_size, std::vector<int32_t> token_ids, Decoder& target)
    : LayerStack(std::move(spec), target.kernels(), target.team(), kPhases),
      feature_size_(feature_size),
      token_ids_(std::move(token_ids)),
      embedding_(target.embedding()),
      sampling_(sampling_kernels(target.kernels().name)) {
    if (spec_.layers != 1) fail("a draft has one layer");
    if (spec_.hidden_size != target.spec().hidden_size ||
        spec_.vocab_size != target.spec().vocab_size) {
        fail("the draft has another hidden size or vocabulary than the target");
    }
    if (token_ids_.empty()) fail("the draft's vocabulary is empty");
    check_range("draft token", token_ids_.data(), static_cast<int>(token_ids_.size()),
                spec_.vocab_size);
    own_.resize(static_cast<size_t>(team_->size()));
    for (Own& own : own_) {
        const int widest = std::max(2 * hidden_, round_up(feature_size_, kGroup));
        own.inputs.resize(static_cast<size_t>(widest));
        own.maxima.resize(token_ids_.size() / kBlock + 1);
    }
}

void DraftHead::check_weights() const {
    check_layers();
    check_matrix("embedding", embedding_, spec_.vocab_size, spec_.hidden_size);
    check_matrix("fuse_features", fuse_features_, spec_.hidden_size, feature_size_);
    check_matrix("fuse_input", fuse_input_, spec_.hidden_size, 2 * hidden_);
    check_matrix("head", head_, static_cast<int>(token_ids_.size()), spec_.hidden_size);
    check_vector("embedding_norm", embedding_norm_, hidden_, false);
    check_vector("feature_norm", feature_norm_, hidden_, false);
    check_vector("final_norm", final_norm_, hidden_, false);
}

void DraftHead::check_steps(const DraftBatch& batch, int width) {
    ahead_.assign(batch.tables.size(), 0);
    for (size_t i = 0; i < ahead_.size(); ++i) {
        if (batch.steps[i] < 0 || batch.steps[i] > std::min(width, kMostSteps)) {
            fail(std::to_string(batch.steps[i]) + " steps, outside 0.." +
                 std::to_string(std::min(width, kMostSteps)));
        }
        ahead_[i] = std::max(0, batch.steps[i] - 1);  // nothing follows the last one
    }
}

Tiles DraftHead::tiles_of(int rows, int groups, Buffer<uint8_t>& values,
                          Buffer<float>& scales) const {
    const int widest = *std::max_element(kernels_.row_bytes, kernels_.row_bytes + kFormats);
    const size_t count = static_cast<size_t>(rows) * static_cast<size_t>(groups);
    values.resize(count * static_cast<size_t>(widest));
    scales.resize(count * kRowNumbers);
    return {values.data(), scales.data(), groups, kTile};
}

void DraftHead::reserve_draft(int tokens, int rows) {
    tokens = round_up(tokens, kTile);
    if (tokens > reserved_tokens_) {
        reserved_tokens_ = 0;  // until all of it is there: an allocation may fail half-way
        features_ = tiles_of(tokens, round_up(feature_size_, kGroup) / kGroup, feature_values_,
                             feature_scales_);
        inputs_ = tiles_of(tokens, 2 * hidden_ / kGroup, input_values_, input_scales_);
        fused_.resize(static_cast<size_t>(tokens) * hidden_);
        reserved_tokens_ = tokens;
    }
    if (rows > reserved_rows_) {
        reserved_rows_ = 0;
        const size_t count = static_cast<size_t>(rows);
        outputs_.resize(count * hidden_);
        logits_.resize(count * static_cast<size_t>(head_.strip_count()) * kStrip);
        choices_.resize(count);
        reserved_rows_ = rows;
    }
}

void DraftHead::draft(const DraftBatch& batch, int width, int32_t* tokens, float* probabilities) {
    const int sequences = static_cast<int>(batch.tables.size());
    check_steps(batch, width);
    check(batch, ahead_.data());
    reserve(batch.tokens);
    reserve_draft(batch.tokens, sequences);
    std::fill_n(tokens, static_cast<size_t>(sequences) * width, -1);
    std::fill_n(probabilities, static_cast<size_t>(sequences) * width, 0.0f);
    probability_.assign(static_cast<size_t>(sequences), 1.0f);
    Pass pass{&batch, batch.features, {}, {}};
    for (int i = 0; i < sequences; ++i) {
        if (batch.steps[i] == 0) continue;
        pass.rows.push_back(batch.offsets[i + 1] - 1);
        pass.sequences.push_back(i);
    }
    for (int depth = 0;; ++depth) {
        run_pass(batch, pass);
        const auto onward = keep_choices(batch, pass, depth, width, tokens, probabilities);
        if (onward.empty()) return;
        set_next(batch, onward, depth, width, tokens, pass);
    }
}

std::vector<int> DraftHead::keep_choices(const DraftBatch& batch, const Pass& pass, int depth,
                                         int width, int32_t* tokens, float* probabilities) {
    std::vector<int> onward;
    for (size_t row = 0; row < pass.rows.size(); ++row) {
        const size_t sequence = static_cast<size_t>(pass.sequences[row]);
        const DraftChoice& choice = choices_[row];
        if (choice.index < 0) continue;
        const float product = probability_[sequence] * choice.probability;
        if (!(product >= batch.floors[sequence])) continue;
        probability_[sequence] = product;
        const size_t at = sequence * static_cast<size_t>(width) + static_cast<size_t>(depth);
        tokens[at] = token_ids_[static_cast<size_t>(choice.index)];
        probabilities[at] = choice.probability;
        if (depth + 1 < batch.steps[sequence]) onward.push_back(static_cast<int>(row));
    }
    return onward;
}

// The tokens just drafted from these rows are the next pass.
void DraftHead::set_next(const DraftBatch& batch, const std::vector<int>& rows, int depth,
                         int width, const int32_t* tokens, Pass& pass) {
    std::vector<int> sequences;
    next_ids_.clear();
    next_positions_.clear();
    next_.tables.clear();
    for (const int row : rows) {
        const size_t sequence = static_cast<size_t>(pass.sequences[static_cast<size_t>(row)]);
        sequences.push_back(static_cast<int>(sequence));
        next_ids_.push_back(tokens[sequence * static_cast<size_t>(width) + static_cast<size_t>(depth)]);
        next_positions_.push_back(batch.positions[batch.offsets[sequence + 1] - 1] + depth + 1);
        next_.tables.push_back(batch.tables[sequence]);
    }
    next_offsets_.resize(rows.size() + 1);
    std::iota(next_offsets_.begin(), next_offsets_.end(), 0);
    next_.token_ids = next_ids_.data();
    next_.positions = next_positions_.data();
    next_.offsets = next_offsets_.data();
    next_.tokens = static_cast<int>(rows.size());
    sources_ = rows;
    pass.tokens = &next_;
    pass.features = nullptr;
    pass.sequences = std::move(sequences);
    pass.rows.resize(rows.size());
    std::iota(pass.rows.begin(), pass.rows.end(), 0);
}

void DraftHead::run_pass(const DraftBatch& batch, const Pass& pass) {
    const int tokens = pass.tokens->tokens, rows = static_cast<int>(pass.rows.size());
    plan(*pass.tokens, pass.rows.data(), rows);
    set_tiles(tokens, rows);
    features_.tile = inputs_.tile = tile_for(tokens);
    reset_phases(0, tokens, rows);
    const auto own = phases_.begin() + kPhasesPerLayer;
    own[kTakeFeatures].reset(tokens);
    own[kFuseFeatures].reset(fuse_features_.strip_count());
    own[kJoin].reset(tokens);
    own[kFuseInput].reset(fuse_input_.strip_count());
    own[kFinalNorm].reset(rows);
    own[kHead].reset(head_.strip_count());
    own[kChoose].reset(rows);
    team_->run([&](int thread) { run(thread, batch, pass); });
}

void DraftHead::run(int thread, const DraftBatch& batch, const Pass& pass) {
    const int rows = static_cast<int>(pass.rows.size());
    const auto own = phases_.begin() + kPhasesPerLayer;
    fuse(thread, pass);
    write_kv(thread, *pass.tokens, 0, [](int) {});
    if (rows == 0) return;
    finish_layer(thread, *pass.tokens, 0, {rows, pass.rows.data(), outputs_.data()});
    for_rows(thread, rows, own[kFinalNorm], first_strips(thread, head_, own[kHead], 1), [&](int row) {
        normalise_row(thread, final_norm_, outputs_.data() + static_cast<size_t>(row) * hidden_, row,
                      head_.format);
    });
    const Tiles& inputs = memory_->a;
    fetch_inputs(inputs, head_.format, rows);
    const size_t stride = static_cast<size_t>(head_.strip_count()) * kStrip;
    own[kHead].take(thread, [&](int strip) {
        kernels_.linear(head_, strip, inputs, rows, logits_.data(), stride, false, nullptr);
    });
    team_->barrier({}, [] {});
    own[kChoose].take(thread, [&](int row) {
        const size_t at = static_cast<size_t>(row);
        const size_t sequence = static_cast<size_t>(pass.sequences[at]);
        const int position = pass.tokens->positions[pass.rows[at]] + 1;
        choices_[at] = choose_draft(
            sampling_, logits_.data() + at * stride, token_ids_.size(), token_ids_.data(),
            {batch.temperatures[sequence], batch.seeds[sequence], static_cast<uint32_t>(position)},
            own_[static_cast<size_t>(thread)].maxima.data());
    });
}

// The residual stream that enters the layer.
void DraftHead::fuse(int thread, const Pass& pass) {
    const int tokens = pass.tokens->tokens;
    const size_t hidden = static_cast<size_t>(hidden_);
    const auto own = phases_.begin() + kPhasesPerLayer;
    if (pass.features != nullptr) {
        for_rows(thread, tokens, own[kTakeFeatures],
                 first_strips(thread, fuse_features_, own[kFuseFeatures], 1),
                 [&](int row) { take_features(thread, pass.features, row); });
        fetch_inputs(features_, fuse_features_.format, tokens);
        own[kFuseFeatures].take(thread, [&](int strip) {
            kernels_.linear(fuse_features_, strip, features_, tokens, fused_.data(), hidden, false,
                            nullptr);
        });
    }
    for_rows(thread, tokens, own[kJoin], first_strips(thread, fuse_input_, own[kFuseInput], 1),
             [&](int row) { join_inputs(thread, pass, row); });
    fetch_inputs(inputs_, fuse_input_.format, tokens);
    own[kFuseInput].take(thread, [&](int strip) {
        kernels_.linear(fuse_input_, strip, inputs_, tokens, memory_->x.data(), hidden, false,
                        nullptr);
    });
}

void DraftHead::take_features(int thread, const float* features, int row) {
    float* padded = own_[static_cast<size_t>(thread)].inputs.data();
    const size_t size = static_cast<size_t>(feature_size_);
    std::copy_n(features + static_cast<size_t>(row) * size, size, padded);
    std::fill(padded + size, padded + round_up(feature_size_, kGroup), 0.0f);
    kernels_.quantise(padded, row, features_, fuse_features_.format);
}

void DraftHead::join_inputs(int thread, const Pass& pass, int row) {
    float* joined = own_[static_cast<size_t>(thread)].inputs.data();
    const size_t at = static_cast<size_t>(row), hidden = static_cast<size_t>(hidden_);
    const float* state = pass.features != nullptr
                             ? fused_.data() + at * hidden
                             : outputs_.data() + static_cast<size_t>(sources_[at]) * hidden;
    fetch_lines(state, hidden * sizeof(float));
    std::fill(joined + spec_.hidden_size, joined + hidden, 0.0f);
    unpack_row(embedding_, pass.tokens->token_ids[row], joined);
    kernels_.normalise(joined, embedding_norm_.data(), spec_.hidden_size, spec_.rms_eps, joined);
    kernels_.normalise(state, feature_norm_.data(), spec_.hidden_size, spec_.rms_eps,
                       joined + hidden);
    kernels_.quantise(joined, row, inputs_, fuse_input_.format);
    set_angles(pass.tokens->positions[row], row);
}

}  // namespace mirror
