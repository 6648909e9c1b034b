// The forward of the target: tokens in, logits and hidden states out.
#pragma once

#include <string>
#include <vector>

#include "layers.h"

namespace mirror {

// See backends/protocol.py.
struct Batch : Tokens {
    const int32_t* logit_rows;
    int rows;
    // Number of layers after which the residual stream is kept, ascending, and where: [tokens][taps *
    // hidden_size].
    std::vector<int> taps;
    float* features = nullptr;
};

class Decoder : public LayerStack {
public:
    Decoder(Spec spec, const KernelTable& kernels, int threads, const std::vector<int>& cores);

    Matrix& embedding() { return embedding_; }
    Matrix& head() { return head_; }
    std::vector<float>& final_norm() { return final_norm_; }

    // Throws std::invalid_argument if a weight is missing or has another shape than the spec's.
    void check_weights() const;
    // logits: [batch.rows][vocab_size]. Throws std::invalid_argument and leaves the cache alone if
    // the batch is wrong.
    void forward(const Batch& batch, float* logits);

private:
    struct Refinement {
        int rows = 0;
        Buffer<uint8_t> values;
        Buffer<float> scales;
        Tiles inputs{};                     // the head's inputs again, in 16 bits, a row a tile
        Buffer<float> largest, thresholds;  // [strips of the head][rows], [rows]
        std::vector<Buffer<float>> own;     // by thread: [rows] of the strips it computed
    };

    void check_outputs(const Batch& batch) const;
    int tap_after(const Batch& batch, int layers) const;
    void keep_features(const Batch& batch, int tap, int row) const;
    void reserve_refinement(int rows);
    void run(int thread, const Batch& batch, float* logits);
    void embed(const Batch& batch, int row);
    bool is_refined() const { return head_.format == kInt8; }
    void normalise_logit_row(int thread, const Batch& batch, int row);
    void set_thresholds(int rows);
    void refine_strips(int task, int rows, float* logits) const;
    void run_head(int thread, const Batch& batch, float* logits);

    Matrix embedding_, head_;
    std::vector<float> final_norm_;
    Refinement refinement_;
};

// The instruction sets this build has and this machine runs, best first.
std::vector<std::string> available_isas();
// Throws std::invalid_argument for one that is not available.
const KernelTable& kernels_named(const std::string& name);

}  // namespace mirror
