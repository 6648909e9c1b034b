#include "layers.h"

#include <algorithm>
#include <cmath>

#include <sys/mman.h>

namespace mirror {
namespace {

constexpr int kStripsPerTask = 2 * kGroup / kStrip;  // of gate and up
constexpr size_t kAheadBytes = 64 << 10;
constexpr size_t kHugePage = size_t{2} << 20;

std::shared_ptr<uint8_t> map_zeroed(size_t bytes) {
    const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return {static_cast<uint8_t*>(p), [size](uint8_t* q) { munmap(q, size); }};
}

// The whole pages from `begin` to `end`; what shares a page with other memory stays.
void give_back(uint8_t* begin, uint8_t* end) {
    const uintptr_t page = 4096;
    const uintptr_t first = (reinterpret_cast<uintptr_t>(begin) + page - 1) / page * page;
    const uintptr_t last = reinterpret_cast<uintptr_t>(end) / page * page;
    if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
}

}  // namespace

void check_matrix(const char* name, const Matrix& matrix, int outputs, int inputs) {
    if (matrix.strips == nullptr) fail(std::string("the weights of ") + name + " are missing");
    if (matrix.outputs != outputs || matrix.inputs != inputs) {
        fail(std::string(name) + " is " + std::to_string(matrix.outputs) + " x " +
             std::to_string(matrix.inputs) + ", expected " + std::to_string(outputs) + " x " +
             std::to_string(inputs));
    }
}

void check_vector(const char* name, const std::vector<float>& vector, int size, bool optional) {
    if (vector.empty() && optional) return;
    if (vector.size() != static_cast<size_t>(size)) {
        fail(std::string(name) + " has " + std::to_string(vector.size()) + " values, expected " +
             std::to_string(size));
    }
}

LayerStack::LayerStack(Spec spec, const KernelTable& kernels, std::shared_ptr<Team> team,
                       int extra_phases)
    : spec_(std::move(spec)),
      kernels_(kernels),
      team_(std::move(team)),
      layers_(static_cast<size_t>(spec_.layers)) {
    heads_per_kv_ = spec_.heads / spec_.kv_heads;
    if (heads_per_kv_ > kMaxQueries) {
        fail("more than " + std::to_string(kMaxQueries) + " query heads share a KV head");
    }
    hidden_ = round_up(spec_.hidden_size, kGroup);
    query_ = round_up(spec_.heads * spec_.head_dim, kGroup);
    inner_ = round_up(spec_.intermediate_size, kGroup);
    qkv_stride_ = round_up((spec_.heads + 2 * spec_.kv_heads) * spec_.head_dim, kStrip);
    padded_dim_ = round_up(spec_.head_dim, kStrip);
    unit_size_ = spec_.cache == kCacheFp32 ? 1 : 2;
    units_ = padded_dim_ / unit_size_;
    const int threads = team_->size();
    memory_ = std::make_shared<Memory>();
    memory_->threads.resize(static_cast<size_t>(threads));
    for (auto& own : memory_->threads) {
        own.row.resize(static_cast<size_t>(std::max(hidden_, query_)));
        own.scratch.resize(attention_scratch_bytes(padded_dim_));
        own.state.resize(static_cast<size_t>(kMaxQueries) * (2 + padded_dim_));
    }
    const int phases = spec_.layers * kPhasesPerLayer + extra_phases;
    for (int i = 0; i < phases; ++i) phases_.emplace_back(threads);
}

void LayerStack::check_layers() const {
    const int query = spec_.heads * spec_.head_dim;
    const int qkv = query + 2 * spec_.kv_heads * spec_.head_dim;
    for (const Layer& layer : layers_) {
        check_matrix("qkv", layer.qkv, qkv, spec_.hidden_size);
        check_matrix("output", layer.output, spec_.hidden_size, query);
        check_matrix("gate_up", layer.gate_up, 2 * inner_, spec_.hidden_size);
        check_matrix("down", layer.down, spec_.hidden_size, spec_.intermediate_size);
        check_vector("attention_norm", layer.attention_norm, hidden_, false);
        check_vector("mlp_norm", layer.mlp_norm, hidden_, false);
        check_vector("q_norm", layer.q_norm, spec_.head_dim, true);
        check_vector("k_norm", layer.k_norm, spec_.head_dim, true);
        check_vector("qkv_bias", layer.qkv_bias, qkv_stride_, true);
        check_vector("output_bias", layer.output_bias, round_up(spec_.hidden_size, kStrip), true);
    }
}

size_t LayerStack::kv_bytes_per_block(int block_size) const {
    const size_t chunks = static_cast<size_t>(round_up(block_size, kKeysPerChunk) / kKeysPerChunk);
    return chunks * chunk_bytes(spec_.cache, units_) * static_cast<size_t>(spec_.kv_heads) *
           static_cast<size_t>(spec_.layers);
}

void LayerStack::allocate_kv(int blocks, int block_size) {
    if (blocks < 1 || block_size < 1) {
        fail("cannot allocate " + std::to_string(blocks) + " blocks of " +
             std::to_string(block_size) + " tokens");
    }
    const size_t per_block = kv_bytes_per_block(block_size);
    size_t bytes;
    if (__builtin_mul_overflow(per_block, static_cast<size_t>(blocks), &bytes) ||
        bytes > SIZE_MAX / 2) {
        throw std::bad_alloc();
    }
    cache_ = map_zeroed(bytes);  // may throw: the sizes follow only then
    block_bytes_ = per_block / static_cast<size_t>(spec_.layers);
    chunks_per_block_ = round_up(block_size, kKeysPerChunk) / kKeysPerChunk;
    blocks_ = blocks;
    block_size_ = block_size;
}

void LayerStack::discard_kv(const int32_t* blocks, int count) {
    check_range("KV block", blocks, count, blocks_);
    for (int i = 1; i < count; ++i) {
        if (blocks[i] <= blocks[i - 1]) fail("KV blocks must ascend");
    }
    for (int layer = 0; layer < spec_.layers; ++layer) {
        for (int begin = 0, end = 0; begin < count; begin = end) {
            for (end = begin + 1; end < count && blocks[end] == blocks[end - 1] + 1;) ++end;
            give_back(cache_of(layer, blocks[begin]),
                      cache_of(layer, blocks[end - 1]) + block_bytes_);
        }
    }
}

void LayerStack::check(const Tokens& batch, const int32_t* ahead) const {
    if (blocks_ == 0) fail("allocate_kv must come before the first forward");
    const int sequences = static_cast<int>(batch.tables.size());
    check_range("token id", batch.token_ids, batch.tokens, spec_.vocab_size);
    check_range("position", batch.positions, batch.tokens, spec_.max_context);
    if (sequences < 1 || batch.offsets[0] != 0 || batch.offsets[sequences] != batch.tokens) {
        fail("sequence offsets must run from 0 to " + std::to_string(batch.tokens));
    }
    for (int i = 0; i < sequences; ++i) {
        const int begin = batch.offsets[i], end = batch.offsets[i + 1];
        if (end <= begin || end > batch.tokens) fail("every sequence must have a token");
        for (int row = begin + 1; row < end; ++row) {
            if (batch.positions[row] != batch.positions[row - 1] + 1) {
                fail("positions must be consecutive within a sequence");
            }
        }
        const int last = batch.positions[end - 1];
        const int more = ahead == nullptr ? 0 : ahead[i];
        if (more < 0 || more > spec_.max_context - 1 - last) {
            fail(std::to_string(more) + " tokens after position " + std::to_string(last) +
                 " in a context of " + std::to_string(spec_.max_context));
        }
        const int needed = (last + more) / block_size_ + 1;
        const size_t at = static_cast<size_t>(i);
        if (batch.table_lengths[at] < needed) {
            fail("block table " + std::to_string(i) + " has " +
                 std::to_string(batch.table_lengths[at]) + " blocks, needs " +
                 std::to_string(needed));
        }
        check_range("block of table " + std::to_string(i), batch.tables[at], needed, blocks_);
    }
}

void LayerStack::reserve(int tokens) {
    Memory& m = *memory_;
    const int rows = round_up(tokens, kTile);
    if (rows <= m.tokens) return;
    m.tokens = 0;  // until all of it is there: an allocation may fail half-way
    const size_t count = static_cast<size_t>(rows);
    m.x.resize(count * hidden_);
    m.qkv.resize(count * qkv_stride_);
    m.mixed.resize(count * query_);
    m.cosines.resize(count * spec_.head_dim / 2);
    m.sines.resize(count * spec_.head_dim / 2);
    m.queries.resize(count * spec_.heads * units_ * 4);
    const size_t widest = static_cast<size_t>(
        *std::max_element(kernels_.row_bytes, kernels_.row_bytes + kFormats));
    auto tiles = [&](int width, Buffer<uint8_t>& values, Buffer<float>& scales) {
        const int groups = width / kGroup;
        values.resize(count * groups * widest);
        scales.resize(count * groups * kRowNumbers);
        return Tiles{values.data(), scales.data(), groups, kTile};
    };
    m.a = tiles(hidden_, m.a_values, m.a_scales);
    m.b = tiles(query_, m.b_values, m.b_scales);
    m.c = tiles(inner_, m.c_values, m.c_scales);
    m.tokens = rows;
}

// What other threads have just written lies in their caches, a hundred nanoseconds away: ask for all
// of it at once instead of line by line.
void LayerStack::fetch_lines(const void* from, size_t bytes) {
    const char* p = static_cast<const char*>(from);
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 3);
}

void LayerStack::fetch_inputs(const Tiles& x, Format format, int rows) const {
    if (rows > kTile) return;  // not for a prompt's: they would push each other out
    const size_t slots = static_cast<size_t>(x.groups) * x.tile;
    fetch_lines(x.values, slots * kernels_.row_bytes[format]);
    fetch_lines(x.scales, slots * kRowNumbers * sizeof(float));
}

void LayerStack::set_tiles(int tokens, int rows) {
    const auto fewest = [](int count) {
        int tile = 1;
        while (tile < kTile && tile < count) tile *= 2;
        return tile;
    };
    memory_->a.tile = fewest(tokens);
    memory_->b.tile = memory_->c.tile = fewest(rows);
}

void LayerStack::reset_phases(int index, int tokens, int rows) {
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const auto phases = phases_of(index);
    phases[0].reset(tokens);
    phases[1].reset(layer.qkv.strip_count());
    phases[2].reset(tokens);
    phases[3].reset(static_cast<int>(tasks_.size()));
    phases[4].reset(rows);
    phases[5].reset(layer.output.strip_count());
    phases[6].reset(rows);
    phases[7].reset(layer.gate_up.strip_count() / kStripsPerTask);
    phases[8].reset(layer.down.strip_count());
}

// The first weights that a thread will read of a matrix whose tasks are `strips_per_task` strips.
Ahead LayerStack::first_strips(int thread, const Matrix& matrix, const Ranges& tasks,
                            int strips_per_task) const {
    const size_t bytes = matrix.strip_bytes();
    const size_t begin = static_cast<size_t>(tasks.begin_of(thread) * strips_per_task) * bytes;
    const size_t end = static_cast<size_t>(matrix.strip_count()) * bytes;
    return {matrix.strips + begin, matrix.strips + std::min(end, begin + kAheadBytes)};
}

void LayerStack::project_qkv(int thread, const Tokens& batch, int index) {
    Memory& m = *memory_;
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const auto phases = phases_of(index);
    fetch_inputs(m.a, layer.qkv.format, batch.tokens);
    phases[1].take(thread, [&](int strip) {
        kernels_.linear(layer.qkv, strip, m.a, batch.tokens, m.qkv.data(),
                        static_cast<size_t>(qkv_stride_), false, nullptr);
    });
    for_rows(thread, batch.tokens, phases[2], {},
             [&](int row) { rotate_and_cache(batch, index, row); });
}

void LayerStack::finish_layer(int thread, const Tokens& batch, int index, const Rows& to) {
    Memory& m = *memory_;
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const auto phases = phases_of(index);
    const size_t hidden = static_cast<size_t>(hidden_);
    phases[3].take(thread, [&](int task) {
        if (static_cast<size_t>(task) + 1 < tasks_.size()) {
            fetch_ahead(batch, index, tasks_[static_cast<size_t>(task) + 1]);
        }
        attend(thread, batch, index, tasks_[static_cast<size_t>(task)]);
    });
    for_rows(thread, to.count, phases[4], first_strips(thread, layer.output, phases[5], 1), [&](int i) {
        const int row = to.rows == nullptr ? i : to.rows[i];
        const float* mixed = m.mixed.data() + static_cast<size_t>(row) * query_;
        fetch_lines(mixed, static_cast<size_t>(query_) * sizeof(float));
        join_segments(row);
        kernels_.quantise(mixed, i, m.b, layer.output.format);
        if (to.rows != nullptr) std::copy_n(m.x.data() + row * hidden, hidden, to.x + i * hidden);
    });
    fetch_inputs(m.b, layer.output.format, to.count);
    phases[5].take(thread, [&](int strip) {
        kernels_.linear(layer.output, strip, m.b, to.count, to.x, hidden, true, nullptr);
    });
    for_rows(thread, to.count, phases[6],
             first_strips(thread, layer.gate_up, phases[7], kStripsPerTask), [&](int i) {
        normalise_row(thread, layer.mlp_norm, to.x + i * hidden, i, layer.gate_up.format);
    });
    fetch_inputs(m.a, layer.gate_up.format, to.count);
    phases[7].take(thread, [&](int task) {
        kernels_.gate_up(layer.gate_up, task, m.a, to.count, m.c, layer.down.format);
    });
    team_->barrier(first_strips(thread, layer.down, phases[8], 1), [] {});
    fetch_inputs(m.c, layer.down.format, to.count);
    phases[8].take(thread, [&](int strip) {
        kernels_.linear(layer.down, strip, m.c, to.count, to.x, hidden, true, nullptr);
    });
}

void LayerStack::normalise_row(int thread, const std::vector<float>& weight, const float* x, int row,
                            Format format) {
    float* y = memory_->threads[static_cast<size_t>(thread)].row.data();
    fetch_lines(x, static_cast<size_t>(hidden_) * sizeof(float));
    kernels_.normalise(x, weight.data(), spec_.hidden_size, spec_.rms_eps, y);
    kernels_.quantise(y, row, memory_->a, format);
}

// Cosines and sines of a row's position.
void LayerStack::set_angles(int position, int row) {
    Memory& m = *memory_;
    const int half = spec_.head_dim / 2;
    const float at = static_cast<float>(position);
    for (int i = 0; i < half; ++i) {
        const float angle = at * spec_.frequencies[static_cast<size_t>(i)];
        const size_t place = static_cast<size_t>(row) * half + i;
        m.cosines[place] = std::cos(angle) * spec_.rope_scale;
        m.sines[place] = std::sin(angle) * spec_.rope_scale;
    }
}

}  // namespace mirror
