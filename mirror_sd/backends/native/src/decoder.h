// The forward of a decoder over a ragged batch and a paged cache.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "team.h"

namespace mirror {

struct Spec {
    int vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim, max_context;
    float rms_eps;
    float rope_scale;              // of the cosines and sines
    std::vector<float> frequencies;  // [head_dim / 2] radians per position
    std::vector<int> windows;      // per layer, 0 for full attention
    CacheFormat cache;
};

struct Layer {
    std::vector<float> attention_norm, mlp_norm, q_norm, k_norm;
    Matrix qkv, output, gate_up, down;
    std::vector<float> qkv_bias, output_bias;
};

// Views of the caller's arrays; see backends/protocol.py.
struct Batch {
    const int32_t* token_ids;
    const int32_t* positions;
    int tokens;
    const int32_t* offsets;
    std::vector<const int32_t*> tables;
    std::vector<int> table_lengths;
    const int32_t* logit_rows;
    int rows;
    // Number of layers after which the residual stream is kept, ascending, and where: [tokens][taps *
    // hidden_size].
    std::vector<int> taps;
    float* features = nullptr;
};

class Decoder {
public:
    Decoder(Spec spec, const KernelTable& kernels, int threads, const std::vector<int>& cores);

    const Spec& spec() const { return spec_; }
    const KernelTable& kernels() const { return kernels_; }
    int threads() const { return team_.size(); }
    Layer& layer(int index) { return layers_.at(static_cast<size_t>(index)); }
    Matrix& embedding() { return embedding_; }
    Matrix& head() { return head_; }
    std::vector<float>& final_norm() { return final_norm_; }

    // Throws std::invalid_argument if a weight is missing or has another shape than the spec's.
    void check_weights() const;
    size_t kv_bytes_per_block(int block_size) const;
    void allocate_kv(int blocks, int block_size);
    // logits: [batch.rows][vocab_size]. Throws std::invalid_argument and leaves the cache alone if
    // the batch is wrong.
    void forward(const Batch& batch, float* logits);

private:
    struct Tile {
        int sequence, first_row, rows;
    };
    struct AttentionTask {
        int tile, kv_head, segment_begin, segment_end;
        int slot;  // of the partial state, or -1 to finish the rows at once
    };
    struct Memory;
    using Phases = std::deque<Ranges>::iterator;  // a deque, since atomics cannot move

    void check(const Batch& batch) const;
    void plan(const Batch& batch);
    void set_tiles(const Batch& batch);
    static void fetch_lines(const void* from, size_t bytes);
    void fetch_inputs(const Tiles& x, Format format, int rows) const;
    void reserve(int tokens);
    void reserve_refinement(int rows);
    void run(int thread, const Batch& batch, float* logits);
    template <typename Work>
    void for_rows(int thread, int rows, Ranges& ranges, Ahead next, const Work& work);
    Ahead first_strips(int thread, const Matrix& matrix, const Ranges& tasks,
                       int strips_per_task) const;
    void run_layer(int thread, const Batch& batch, int index, Phases phases);
    int tap_after(const Batch& batch, int layers) const;
    void keep_features(const Batch& batch, int tap, int row) const;
    void embed(const Batch& batch, int row);
    void rotate_and_cache(const Batch& batch, int layer, int row);
    void fetch_slot(const Batch& batch, int layer, int row) const;
    void fetch_ahead(const Batch& batch, int layer, const AttentionTask& task) const;
    void attend(int thread, const Batch& batch, int layer, const AttentionTask& task);
    void finish_rows(const Tile& tile, int kv_head, const AttentionState& state);
    void join_segments(int row);
    AttentionState slot_state(int slot);
    void normalise_row(int thread, const std::vector<float>& weight, const float* x, int row,
                       Format format);
    bool is_refined() const { return head_.format == kInt8; }
    void normalise_logit_row(int thread, const Batch& batch, int row);
    void set_thresholds(int rows);
    void refine_strips(int task, int rows, float* logits) const;
    void run_head(int thread, const Batch& batch, float* logits);
    uint8_t* cache_of(int layer, int block) const;

    const Spec spec_;
    const KernelTable& kernels_;
    Team team_;
    std::vector<Layer> layers_;
    Matrix embedding_, head_;
    std::vector<float> final_norm_;

    // Sizes in floats (or cache units), padded so that vectors never run over.
    int hidden_, query_, inner_, qkv_stride_, padded_dim_, unit_size_, units_, heads_per_kv_;
    int blocks_ = 0, block_size_ = 0, chunks_per_block_ = 0;
    size_t block_bytes_ = 0;
    std::shared_ptr<uint8_t> cache_;

    std::shared_ptr<Memory> memory_;
    std::deque<Ranges> phases_;
    std::vector<Tile> tiles_;
    std::vector<int> tile_of_row_;
    std::vector<AttentionTask> tasks_;
    // Per tile and KV head: first slot and number of segments, if the tile is split.
    std::vector<int> first_slot_, segment_count_;
};

// The instruction sets this build has and this machine runs, best first.
std::vector<std::string> available_isas();
// Throws std::invalid_argument for one that is not available.
const KernelTable& kernels_named(const std::string& name);

}  // namespace mirror
