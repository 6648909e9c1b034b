// What a layer does with keys and values: into the cache, and attention over it.
#include <algorithm>
#include <cmath>

#include "layers.h"

namespace mirror {
namespace {

constexpr int kMaxAttentionRows = 8;
constexpr int kBlocksAhead = 4;

}  // namespace

size_t attention_scratch_bytes(int padded_dim) {
    const size_t dim = static_cast<size_t>(padded_dim);
    const size_t widened = kKeysPerSegment * dim * 4;  // 16 keys and values, two bytes a number
    return kMaxQueries * (dim * 4 + kKeysPerSegment * 4 + kKeysPerSegment * 4 + dim * 4) + widened;
}

uint8_t* LayerStack::cache_of(int layer, int block) const {
    return cache_.get() +
           (static_cast<size_t>(layer) * static_cast<size_t>(blocks_) + static_cast<size_t>(block)) *
               block_bytes_;
}

void LayerStack::plan(const Tokens& batch, const int* rows, int count) {
    sequence_of_row_.assign(static_cast<size_t>(batch.tokens), 0);
    for (int i = 0; i < static_cast<int>(batch.tables.size()); ++i) {
        std::fill(sequence_of_row_.begin() + batch.offsets[i],
                  sequence_of_row_.begin() + batch.offsets[i + 1], i);
    }
    plan_tiles(batch, rows, count);
    const int heads = static_cast<int>(tiles_.size()) * spec_.kv_heads;
    const bool scarce = heads < 4 * team_->size();
    first_slot_.assign(static_cast<size_t>(heads), -1);
    segment_count_.assign(static_cast<size_t>(heads), 0);
    tasks_.clear();
    int slots = 0;
    for (int tile = 0; tile < static_cast<int>(tiles_.size()); ++tile) {
        const Tile& t = tiles_[static_cast<size_t>(tile)];
        const int last = batch.positions[t.first_row + t.rows - 1];
        const int chunk = last / block_size_ * chunks_per_block_ + last % block_size_ / kKeysPerChunk;
        const int segments = chunk * kKeysPerChunk / kKeysPerSegment + 1;
        for (int head = 0; head < spec_.kv_heads; ++head) {
            const size_t at = static_cast<size_t>(tile * spec_.kv_heads + head);
            segment_count_[at] = segments;
            if (!scarce || segments == 1) {
                tasks_.push_back({tile, head, 0, segments, -1});
                continue;
            }
            first_slot_[at] = slots;
            for (int s = 0; s < segments; ++s) tasks_.push_back({tile, head, s, s + 1, slots++});
        }
    }
    const size_t slot_floats = static_cast<size_t>(kMaxQueries) * (2 + padded_dim_);
    if (memory_->slots.size() < slots * slot_floats) memory_->slots.resize(slots * slot_floats);
}

// Rows of one sequence that follow each other share a tile.
void LayerStack::plan_tiles(const Tokens& batch, const int* rows, int count) {
    const int most = std::max(1, std::min(kMaxAttentionRows, kMaxQueries / heads_per_kv_));
    tiles_.clear();
    tile_of_row_.assign(static_cast<size_t>(batch.tokens), 0);
    for (int i = 0; i < count; ++i) {
        const int row = rows == nullptr ? i : rows[i];
        const int sequence = sequence_of_row_[static_cast<size_t>(row)];
        if (!tiles_.empty() && tiles_.back().sequence == sequence && tiles_.back().rows < most &&
            tiles_.back().first_row + tiles_.back().rows == row) {
            ++tiles_.back().rows;
        } else {
            tiles_.push_back({sequence, row, 1});
        }
        tile_of_row_[static_cast<size_t>(row)] = static_cast<int>(tiles_.size()) - 1;
    }
}

void LayerStack::rotate_and_cache(const Tokens& batch, int index, int row) {
    Memory& m = *memory_;
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int dim = spec_.head_dim, half = dim / 2;
    float* qkv = m.qkv.data() + static_cast<size_t>(row) * qkv_stride_;
    fetch_lines(qkv, static_cast<size_t>(qkv_stride_) * sizeof(float));
    const float* cosines = m.cosines.data() + static_cast<size_t>(row) * half;
    const float* sines = m.sines.data() + static_cast<size_t>(row) * half;
    const size_t unit_bytes = static_cast<size_t>(units_) * 4;
    uint8_t* queries = m.queries.data() + static_cast<size_t>(row) * spec_.heads * unit_bytes;
    for (int head = 0; head < spec_.heads + spec_.kv_heads; ++head) {
        float* v = qkv + static_cast<size_t>(head) * dim;
        const std::vector<float>& norm = head < spec_.heads ? layer.q_norm : layer.k_norm;
        kernels_.rotate_head(v, dim, norm.empty() ? nullptr : norm.data(), spec_.rms_eps, cosines,
                             sines);
        if (head >= spec_.heads) continue;
        kernels_.store_units(v, dim, units_, spec_.cache == kCacheFp32,
                             queries + static_cast<size_t>(head) * unit_bytes);
    }
    const int sequence = sequence_of_row_[static_cast<size_t>(row)];
    const int position = batch.positions[row];
    const int slot = position % block_size_;
    const bool alone = row + 1 == batch.offsets[sequence + 1];
    uint8_t* block = cache_of(
        index, batch.tables[static_cast<size_t>(sequence)][position / block_size_]);
    for (int head = 0; head < spec_.kv_heads; ++head) {
        const size_t chunk = static_cast<size_t>(head * chunks_per_block_ + slot / kKeysPerChunk);
        const float* key = qkv + static_cast<size_t>(spec_.heads + head) * dim;
        const float* value = key + static_cast<size_t>(spec_.kv_heads) * dim;
        kernels_.store_kv(key, value, dim, padded_dim_, slot % kKeysPerChunk, alone,
                          spec_.cache, block + chunk * chunk_bytes(spec_.cache, units_));
    }
}

// Asks for the lines that a row's key and value will be written to: a key touches one line for each
// two of its dimensions, and waiting for them took as long as a third of the attention.
void LayerStack::fetch_slot(const Tokens& batch, int layer, int row) const {
    const int sequence = sequence_of_row_[static_cast<size_t>(row)];
    const int position = batch.positions[row];
    const int slot = position % block_size_;
    const uint8_t* block = cache_of(
        layer, batch.tables[static_cast<size_t>(sequence)][position / block_size_]);
    const size_t bytes = chunk_bytes(spec_.cache, units_);
    const size_t key_bytes = static_cast<size_t>(units_) * (spec_.cache == kCacheInt8 ? 32 : 64);
    const size_t row_bytes = key_bytes / static_cast<size_t>(kKeysPerChunk / unit_size_);
    for (int head = 0; head < spec_.kv_heads; ++head) {
        const uint8_t* chunk =
            block + static_cast<size_t>(head * chunks_per_block_ + slot / kKeysPerChunk) * bytes;
        for (size_t at = 0; at < key_bytes; at += 64) __builtin_prefetch(chunk + at, 1, 2);
        const uint8_t* values =
            chunk + key_bytes + static_cast<size_t>(slot % kKeysPerChunk / unit_size_) * row_bytes;
        for (size_t at = 0; at < row_bytes; at += 64) __builtin_prefetch(values + at, 1, 2);
    }
}

// Asks for the first chunks of a task while the one before it is computed.
void LayerStack::fetch_ahead(const Tokens& batch, int layer, const AttentionTask& task) const {
    const Tile& tile = tiles_[static_cast<size_t>(task.tile)];
    const int32_t* table = batch.tables[static_cast<size_t>(tile.sequence)];
    const int last = batch.positions[tile.first_row + tile.rows - 1] / block_size_;
    const int first = task.segment_begin * kKeysPerSegment / kKeysPerChunk / chunks_per_block_;
    const size_t head_bytes =
        static_cast<size_t>(chunks_per_block_) * chunk_bytes(spec_.cache, units_);
    const size_t wanted = std::min<size_t>(head_bytes, 16384);
    for (int i = first; i <= std::min(last, first + kBlocksAhead - 1); ++i) {
        const uint8_t* at =
            cache_of(layer, table[i]) + static_cast<size_t>(task.kv_head) * head_bytes;
        for (size_t line = 0; line < wanted; line += 64) __builtin_prefetch(at + line, 0, 2);
    }
}

AttentionState LayerStack::slot_state(int slot) {
    float* at = memory_->slots.data() +
                static_cast<size_t>(slot) * kMaxQueries * static_cast<size_t>(2 + padded_dim_);
    return {at, at + kMaxQueries, at + 2 * kMaxQueries};
}

void LayerStack::attend(int thread, const Tokens& batch, int layer, const AttentionTask& task) {
    Memory& m = *memory_;
    auto& own = m.threads[static_cast<size_t>(thread)];
    const Tile& tile = tiles_[static_cast<size_t>(task.tile)];
    const uint8_t* rows[kMaxAttentionRows];
    const size_t head_bytes = static_cast<size_t>(units_) * 4;
    for (int i = 0; i < tile.rows; ++i) {
        rows[i] = m.queries.data() +
                  (static_cast<size_t>(tile.first_row + i) * spec_.heads +
                   static_cast<size_t>(task.kv_head) * heads_per_kv_) * head_bytes;
    }
    AttentionTile t;
    t.cache = cache_of(layer, 0);
    t.table = batch.tables[static_cast<size_t>(tile.sequence)];
    t.block_bytes = block_bytes_;
    t.head_offset = static_cast<size_t>(task.kv_head) * chunks_per_block_ *
                    chunk_bytes(spec_.cache, units_);
    t.chunks_per_block = chunks_per_block_;
    t.block_size = block_size_;
    t.units = units_;
    t.head_dim = spec_.head_dim;
    t.padded_dim = padded_dim_;
    t.queries = tile.rows * heads_per_kv_;
    t.heads = heads_per_kv_;
    t.first_position = batch.positions[tile.first_row];
    t.window = spec_.windows[static_cast<size_t>(layer)];
    t.segment_begin = task.segment_begin;
    t.segment_end = task.segment_end;
    t.scale = 1.44269504f / std::sqrt(static_cast<float>(spec_.head_dim));
    t.query_rows = rows;
    float* state = own.state.data();
    AttentionState into = task.slot >= 0
                              ? slot_state(task.slot)
                              : AttentionState{state, state + kMaxQueries, state + 2 * kMaxQueries};
    kernels_.attention(t, spec_.cache, &into, own.scratch.data());
    if (task.slot < 0) finish_rows(tile, task.kv_head, into);
}

void LayerStack::finish_rows(const Tile& tile, int kv_head, const AttentionState& state) {
    const size_t dim = static_cast<size_t>(spec_.head_dim);
    for (int q = 0; q < tile.rows * heads_per_kv_; ++q) {
        const size_t row = static_cast<size_t>(tile.first_row + q / heads_per_kv_);
        const size_t head = static_cast<size_t>(kv_head * heads_per_kv_ + q % heads_per_kv_);
        float* to = memory_->mixed.data() + row * query_ + head * dim;
        const float* from = state.values + static_cast<size_t>(q) * padded_dim_;
        for (size_t i = 0; i < dim; ++i) to[i] = from[i] / state.sum[q];
    }
}

// The split segments of one row, in order, folded as an undivided task folds them.
void LayerStack::join_segments(int row) {
    const int index = tile_of_row_[static_cast<size_t>(row)];
    const Tile& tile = tiles_[static_cast<size_t>(index)];
    for (int head = 0; head < spec_.kv_heads; ++head) {
        const size_t at = static_cast<size_t>(index * spec_.kv_heads + head);
        if (first_slot_[at] < 0) continue;
        const int first = (row - tile.first_row) * heads_per_kv_;
        const size_t offset = static_cast<size_t>(first) * padded_dim_;
        AttentionState total = slot_state(first_slot_[at]);
        total = {total.maximum + first, total.sum + first, total.values + offset};
        for (int s = 1; s < segment_count_[at]; ++s) {
            const AttentionState part = slot_state(first_slot_[at] + s);
            kernels_.fold({part.maximum + first, part.sum + first, part.values + offset},
                          heads_per_kv_, padded_dim_, &total);
        }
        finish_rows({tile.sequence, row, 1}, head, total);
    }
}

}  // namespace mirror
