// A draft of one layer on the target's hidden states: see uir/draft_file.py for what it computes and
// backends/protocol.py for what it is asked.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder.h"
#include "draft_choice.h"

namespace mirror {

struct DraftBatch : Tokens {
    const float* features;  // [tokens][feature_size]
    const int32_t* steps;
    const float* floors;
    const float* temperatures;
    const uint64_t* seeds;
};

// Works on the threads of its target, so that two teams never contend for the cores, and looks
// tokens up in the target's embedding.
class DraftHead : public LayerStack {
public:
    // spec: of one layer, with the target's vocabulary and hidden size. token_ids: the target's id of
    // each token of the draft's own vocabulary.
    DraftHead(Spec spec, int feature_size, std::vector<int32_t> token_ids, Decoder& target);

    Matrix& fuse_features() { return fuse_features_; }
    Matrix& fuse_input() { return fuse_input_; }
    Matrix& head() { return head_; }
    std::vector<float>& embedding_norm() { return embedding_norm_; }
    std::vector<float>& feature_norm() { return feature_norm_; }
    std::vector<float>& final_norm() { return final_norm_; }
    int feature_size() const { return feature_size_; }

    // Throws std::invalid_argument if a weight is missing or has another shape. Both halves of the
    // inputs of `fuse_input` are padded to whole groups.
    void check_weights() const;
    // tokens, probabilities: [sequences][width], width no less than the largest step. Throws
    // std::invalid_argument and leaves the cache alone if the batch is wrong.
    void draft(const DraftBatch& batch, int width, int32_t* tokens, float* probabilities);

private:
    // What one run of the team computes.
    struct Pass {
        const Tokens* tokens;
        const float* features;  // [tokens], or none: a token follows a row of the pass before it
        std::vector<int> rows;       // of the tokens, that are drafted from
        std::vector<int> sequences;  // of the caller, by row
    };
    struct Own {  // of a thread
        Buffer<float> inputs, maxima;
    };

    void check_steps(const DraftBatch& batch, int width);
    void reserve_draft(int tokens, int rows);
    Tiles tiles_of(int rows, int groups, Buffer<uint8_t>& values, Buffer<float>& scales) const;
    void run_pass(const DraftBatch& batch, const Pass& pass);
    void run(int thread, const DraftBatch& batch, const Pass& pass);
    void fuse(int thread, const Pass& pass);
    void take_features(int thread, const float* features, int row);
    void join_inputs(int thread, const Pass& pass, int row);
    // Writes what the pass has chosen, and returns the rows that go on.
    std::vector<int> keep_choices(const DraftBatch& batch, const Pass& pass, int depth, int width,
                                  int32_t* tokens, float* probabilities);
    void set_next(const DraftBatch& batch, const std::vector<int>& rows, int depth, int width,
                  const int32_t* tokens, Pass& pass);

    const int feature_size_;
    const std::vector<int32_t> token_ids_;
    const Matrix embedding_;  // the target's
    Matrix fuse_features_, fuse_input_, head_;
    std::vector<float> embedding_norm_, feature_norm_, final_norm_;
    const SamplingKernels& sampling_;

    int reserved_tokens_ = 0, reserved_rows_ = 0;
    Buffer<uint8_t> feature_values_, input_values_;
    Buffer<float> feature_scales_, input_scales_;
    Tiles features_{}, inputs_{};
    Buffer<float> fused_;    // [tokens][hidden]
    Buffer<float> outputs_;  // [rows][hidden] of the layer
    Buffer<float> logits_;   // [rows][draft vocabulary, whole strips]
    std::vector<Own> own_;
    std::vector<DraftChoice> choices_;   // by row
    std::vector<int32_t> ahead_;         // by sequence
    std::vector<float> probability_;     // by sequence, of all that was drafted
    std::vector<int> sources_;           // of each token, a row of the pass before
    std::vector<int32_t> next_ids_, next_positions_, next_offsets_;
    Tokens next_{};
};

}  // namespace mirror
