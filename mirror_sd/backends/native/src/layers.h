// Layers of a decoder over a ragged batch and a paged cache: what the target and its draft share.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "buffers.h"
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
struct Tokens {
    const int32_t* token_ids;
    const int32_t* positions;
    int tokens;
    const int32_t* offsets;
    std::vector<const int32_t*> tables;
    std::vector<int> table_lengths;
};

// A matrix or vector of the right shape, or std::invalid_argument that names it.
void check_matrix(const char* name, const Matrix& matrix, int outputs, int inputs);
void check_vector(const char* name, const std::vector<float>& vector, int size, bool optional);

// One batch at a time goes through. A layer first writes the keys and values of all tokens, then
// computes the outputs of the rows that go on from there: all, or those of a list.
class LayerStack {
public:
    LayerStack(Spec spec, const KernelTable& kernels, std::shared_ptr<Team> team, int extra_phases);

    const Spec& spec() const { return spec_; }
    const KernelTable& kernels() const { return kernels_; }
    const std::shared_ptr<Team>& team() const { return team_; }
    Layer& layer(int index) { return layers_.at(static_cast<size_t>(index)); }

    size_t kv_bytes_per_block(int block_size) const;
    void allocate_kv(int blocks, int block_size);
    // Gives the memory of these blocks, ascending, back to the system; they are zero from now on.
    void discard_kv(const int32_t* blocks, int count);
    int block_size() const { return block_size_; }
    int blocks() const { return blocks_; }

protected:
    static constexpr int kPhasesPerLayer = 9;

    struct Tile {
        int sequence, first_row, rows;
    };
    struct AttentionTask {
        int tile, kv_head, segment_begin, segment_end;
        int slot;  // of the partial state, or -1 to finish the rows at once
    };
    struct Memory {
        int tokens = 0;
        Buffer<float> x, qkv, mixed, cosines, sines;  // rows are padded to whole tiles
        Buffer<uint8_t> queries;
        Buffer<uint8_t> a_values, b_values, c_values;
        Buffer<float> a_scales, b_scales, c_scales;
        Tiles a{}, b{}, c{};  // inputs of: QKV, gate and up, head; output projection; down
        Buffer<float> slots;
        struct PerThread {
            Buffer<float> row;
            Buffer<uint8_t> scratch;
            Buffer<float> state;
        };
        std::vector<PerThread> threads;
    };
    // Rows that a layer computes the outputs of.
    struct Rows {
        int count;
        const int* rows;  // of the batch, ascending; none: all, in place
        float* x;         // [count][hidden], where their residual stream goes on
    };
    using Phases = std::deque<Ranges>::iterator;  // a deque, since atomics cannot move

    void check_layers() const;
    // Throws std::invalid_argument if the batch is wrong. ahead: [sequences] further tokens that
    // each table must hold after its last one, or none.
    void check(const Tokens& batch, const int32_t* ahead) const;
    void reserve(int tokens);
    // `rows` as in `Rows`.
    void plan(const Tokens& batch, const int* rows, int count);
    void reset_phases(int index, int tokens, int rows);
    // tokens: rows of a layer's inputs and of what is normed; rows: those it goes on with.
    void set_tiles(int tokens, int rows);

    template <typename Work>
    void for_rows(int thread, int rows, Ranges& ranges, Ahead next, const Work& work) {
        if (rows <= kSerialRows) {
            team_->barrier(next, [&] {
                for (int row = 0; row < rows; ++row) work(row);
            });
            return;
        }
        team_->barrier({}, [] {});
        ranges.take(thread, work);
        team_->barrier(next, [] {});
    }
    static void fetch_lines(const void* from, size_t bytes);
    void fetch_inputs(const Tiles& x, Format format, int rows) const;
    Ahead first_strips(int thread, const Matrix& matrix, const Ranges& tasks,
                       int strips_per_task) const;
    void normalise_row(int thread, const std::vector<float>& weight, const float* x, int row,
                       Format format);
    void set_angles(int position, int row);
    // `before(row)` is called by the thread that then normalises the row's residual stream.
    template <typename Before>
    void write_kv(int thread, const Tokens& batch, int index, Before before);
    void finish_layer(int thread, const Tokens& batch, int index, const Rows& rows);

    const Spec spec_;
    const KernelTable& kernels_;
    const std::shared_ptr<Team> team_;
    std::vector<Layer> layers_;
    // Sizes in floats (or cache units), padded so that vectors never run over.
    int hidden_, query_, inner_, qkv_stride_, padded_dim_, unit_size_, units_, heads_per_kv_;
    std::shared_ptr<Memory> memory_;
    std::deque<Ranges> phases_;  // of each layer, then the extra ones

private:
    // Rows up to which a row phase is done by the thread that arrives last: a second barrier costs
    // more.
    static constexpr int kSerialRows = 2;

    Phases phases_of(int index) { return phases_.begin() + index * kPhasesPerLayer; }
    void project_qkv(int thread, const Tokens& batch, int index);
    void rotate_and_cache(const Tokens& batch, int layer, int row);
    void fetch_slot(const Tokens& batch, int layer, int row) const;
    void fetch_ahead(const Tokens& batch, int layer, const AttentionTask& task) const;
    void plan_tiles(const Tokens& batch, const int* rows, int count);
    void attend(int thread, const Tokens& batch, int layer, const AttentionTask& task);
    void finish_rows(const Tile& tile, int kv_head, const AttentionState& state);
    void join_segments(int row);
    AttentionState slot_state(int slot);
    uint8_t* cache_of(int layer, int block) const;

    int blocks_ = 0, block_size_ = 0, chunks_per_block_ = 0;
    size_t block_bytes_ = 0;
    std::shared_ptr<uint8_t> cache_;
    std::vector<Tile> tiles_;
    std::vector<int> sequence_of_row_, tile_of_row_;
    std::vector<AttentionTask> tasks_;
    // Per tile and KV head: first slot and number of segments, if the tile is split.
    std::vector<int> first_slot_, segment_count_;
};

template <typename Before>
void LayerStack::write_kv(int thread, const Tokens& batch, int index, Before before) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const auto phases = phases_of(index);
    for_rows(thread, batch.tokens, phases[0], first_strips(thread, layer.qkv, phases[1], 1),
             [&](int row) {
                 fetch_slot(batch, index, row);
                 before(row);
                 normalise_row(thread, layer.attention_norm,
                               memory_->x.data() + static_cast<size_t>(row) * hidden_, row,
                               layer.qkv.format);
             });
    project_qkv(thread, batch, index);
}

}  // namespace mirror
