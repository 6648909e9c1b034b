#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include <sys/mman.h>

#include "packing.h"

namespace mirror {
namespace {

// Rows up to which a row phase is done by the thread that arrives last: a second barrier costs more.
constexpr int kSerialRows = 2;
constexpr int kPhasesPerLayer = 9;
constexpr int kStripsPerTask = 2 * kGroup / kStrip;  // of gate and up
constexpr int kMaxAttentionRows = 8;
constexpr int kStripsPerRefinement = 32;
// Of an int8 head, a row's strips with a logit within this many nats of the largest are computed again
// with 16-bit activations: 5 are 47 of 3,072 strips on plain text. One less or more changed the KL by
// a tenth and the time of 16 rows by half to one percent (docs/decisions/0005).
constexpr float kRefinedNats = 5.0f;
constexpr int kBlocksAhead = 4;
constexpr size_t kAheadBytes = 64 << 10;
constexpr size_t kHugePage = size_t{2} << 20;

int round_up(int value, int multiple) { return (value + multiple - 1) / multiple * multiple; }

std::shared_ptr<uint8_t> map_zeroed(size_t bytes) {
    const size_t size = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    void* p = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    return {static_cast<uint8_t*>(p), [size](uint8_t* q) { munmap(q, size); }};
}

// Zeroed memory at a cache line: a strip's outputs fill lines that no other thread writes.
template <typename T> class Buffer {
public:
    void resize(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64 + 64;
        void* p = std::aligned_alloc(64, bytes);
        if (p == nullptr) throw std::bad_alloc();
        std::memset(p, 0, bytes);
        memory_.reset(static_cast<T*>(p));
        size_ = count;
    }
    T* data() const { return memory_.get(); }
    size_t size() const { return size_; }
    T& operator[](size_t i) const { return memory_.get()[i]; }

private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t size_ = 0;
};

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

void check_range(const std::string& what, const int32_t* values, int count, int end) {
    for (int i = 0; i < count; ++i) {
        if (values[i] < 0 || values[i] >= end) {
            fail(what + " " + std::to_string(values[i]) + " is outside 0.." +
                 std::to_string(end - 1));
        }
    }
}

}  // namespace

// Buffers of one forward; rows are padded to whole tiles.
struct Decoder::Memory {
    int tokens = 0;
    Buffer<float> x, qkv, mixed, cosines, sines;
    Buffer<uint8_t> queries;
    Buffer<uint8_t> a_values, b_values, c_values;
    Buffer<float> a_scales, b_scales, c_scales;
    Tiles a{}, b{}, c{};  // inputs of: QKV, gate and up, head; output projection; down
    int refined_rows = 0;
    Buffer<uint8_t> refined_values;
    Buffer<float> refined_scales;
    Tiles refined{};                    // the head's inputs again, in 16 bits, a row a tile
    Buffer<float> largest, thresholds;  // [strips of the head][rows], [rows]
    Buffer<float> slots;
    struct PerThread {
        Buffer<float> row;
        Buffer<float> largest;  // [rows] of the strips this thread computed
        Buffer<uint8_t> scratch;
        Buffer<float> state;
    };
    std::vector<PerThread> threads;
};

size_t attention_scratch_bytes(int padded_dim) {
    const size_t dim = static_cast<size_t>(padded_dim);
    const size_t widened = kKeysPerSegment * dim * 4;  // 16 keys and values, two bytes a number
    return kMaxQueries * (dim * 4 + kKeysPerSegment * 4 + kKeysPerSegment * 4 + dim * 4) + widened;
}

Decoder::Decoder(Spec spec, const KernelTable& kernels, int threads, const std::vector<int>& cores)
    : spec_(std::move(spec)),
      kernels_(kernels),
      team_(threads, cores),
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
    memory_ = std::make_shared<Memory>();
    memory_->threads.resize(static_cast<size_t>(threads));
    for (auto& own : memory_->threads) {
        own.row.resize(static_cast<size_t>(std::max(hidden_, query_)));
        own.scratch.resize(attention_scratch_bytes(padded_dim_));
        own.state.resize(static_cast<size_t>(kMaxQueries) * (2 + padded_dim_));
    }
    for (int i = 0; i < spec_.layers * kPhasesPerLayer + 4; ++i) phases_.emplace_back(threads);
}

void Decoder::check_weights() const {
    auto matrix = [](const char* name, const Matrix& m, int outputs, int inputs) {
        if (m.strips == nullptr) fail(std::string("the weights of ") + name + " are missing");
        if (m.outputs != outputs || m.inputs != inputs) {
            fail(std::string(name) + " is " + std::to_string(m.outputs) + " x " +
                 std::to_string(m.inputs) + ", expected " + std::to_string(outputs) + " x " +
                 std::to_string(inputs));
        }
    };
    auto vector = [](const char* name, const std::vector<float>& v, int size, bool optional) {
        if (v.empty() && optional) return;
        if (v.size() != static_cast<size_t>(size)) {
            fail(std::string(name) + " has " + std::to_string(v.size()) + " values, expected " +
                 std::to_string(size));
        }
    };
    const int query = spec_.heads * spec_.head_dim;
    const int qkv = query + 2 * spec_.kv_heads * spec_.head_dim;
    for (const Layer& layer : layers_) {
        matrix("qkv", layer.qkv, qkv, spec_.hidden_size);
        matrix("output", layer.output, spec_.hidden_size, query);
        matrix("gate_up", layer.gate_up, 2 * inner_, spec_.hidden_size);
        matrix("down", layer.down, spec_.hidden_size, spec_.intermediate_size);
        vector("attention_norm", layer.attention_norm, hidden_, false);
        vector("mlp_norm", layer.mlp_norm, hidden_, false);
        vector("q_norm", layer.q_norm, spec_.head_dim, true);
        vector("k_norm", layer.k_norm, spec_.head_dim, true);
        vector("qkv_bias", layer.qkv_bias, qkv_stride_, true);
        vector("output_bias", layer.output_bias, round_up(spec_.hidden_size, kStrip), true);
    }
    matrix("embedding", embedding_, spec_.vocab_size, spec_.hidden_size);
    matrix("head", head_, spec_.vocab_size, spec_.hidden_size);
    vector("final_norm", final_norm_, hidden_, false);
}

size_t Decoder::kv_bytes_per_block(int block_size) const {
    const size_t chunks = static_cast<size_t>(round_up(block_size, kKeysPerChunk) / kKeysPerChunk);
    return chunks * chunk_bytes(spec_.cache, units_) * static_cast<size_t>(spec_.kv_heads) *
           static_cast<size_t>(spec_.layers);
}

void Decoder::allocate_kv(int blocks, int block_size) {
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

uint8_t* Decoder::cache_of(int layer, int block) const {
    return cache_.get() +
           (static_cast<size_t>(layer) * static_cast<size_t>(blocks_) + static_cast<size_t>(block)) *
               block_bytes_;
}

void Decoder::check(const Batch& batch) const {
    if (blocks_ == 0) fail("allocate_kv must come before the first forward");
    for (size_t i = 0; i < batch.taps.size(); ++i) {
        if (batch.taps[i] <= (i > 0 ? batch.taps[i - 1] : 0) || batch.taps[i] > spec_.layers) {
            fail("tapped layers must ascend within 1.." + std::to_string(spec_.layers));
        }
    }
    const int sequences = static_cast<int>(batch.tables.size());
    check_range("token id", batch.token_ids, batch.tokens, spec_.vocab_size);
    check_range("position", batch.positions, batch.tokens, spec_.max_context);
    check_range("logit row", batch.logit_rows, batch.rows, batch.tokens);
    for (int i = 1; i < batch.rows; ++i) {
        if (batch.logit_rows[i] <= batch.logit_rows[i - 1]) fail("logit rows must ascend");
    }
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
        const int needed = batch.positions[end - 1] / block_size_ + 1;
        const size_t at = static_cast<size_t>(i);
        if (batch.table_lengths[at] < needed) {
            fail("block table " + std::to_string(i) + " has " +
                 std::to_string(batch.table_lengths[at]) + " blocks, needs " +
                 std::to_string(needed));
        }
        check_range("block of table " + std::to_string(i), batch.tables[at], needed, blocks_);
    }
}

void Decoder::reserve(int tokens) {
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

void Decoder::reserve_refinement(int rows) {
    Memory& m = *memory_;
    if (rows <= m.refined_rows) return;
    m.refined_rows = 0;  // as in `reserve`
    const size_t count = static_cast<size_t>(rows);
    const size_t groups = static_cast<size_t>(hidden_ / kGroup);
    m.refined_values.resize(count * groups * kernels_.row_bytes[kInt16]);
    m.refined_scales.resize(count * groups * kRowNumbers);
    m.refined = {m.refined_values.data(), m.refined_scales.data(), hidden_ / kGroup, 1};
    m.largest.resize(count * static_cast<size_t>(head_.strip_count()));
    m.thresholds.resize(count);
    for (auto& own : m.threads) own.largest.resize(count);
    m.refined_rows = rows;
}

void Decoder::plan(const Batch& batch) {
    const int rows_per_tile =
        std::max(1, std::min(kMaxAttentionRows, kMaxQueries / heads_per_kv_));
    tiles_.clear();
    tasks_.clear();
    tile_of_row_.assign(static_cast<size_t>(batch.tokens), 0);
    for (int i = 0; i < static_cast<int>(batch.tables.size()); ++i) {
        for (int row = batch.offsets[i]; row < batch.offsets[i + 1]; row += rows_per_tile) {
            const int rows = std::min(rows_per_tile, batch.offsets[i + 1] - row);
            for (int j = 0; j < rows; ++j) {
                tile_of_row_[static_cast<size_t>(row + j)] = static_cast<int>(tiles_.size());
            }
            tiles_.push_back({i, row, rows});
        }
    }
    const int count = static_cast<int>(tiles_.size()) * spec_.kv_heads;
    const bool scarce = count < 4 * team_.size();
    first_slot_.assign(static_cast<size_t>(count), -1);
    segment_count_.assign(static_cast<size_t>(count), 0);
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

void Decoder::forward(const Batch& batch, float* logits) {
    check(batch);
    reserve(std::max(batch.tokens, batch.rows));
    if (is_refined()) reserve_refinement(batch.rows);
    plan(batch);
    set_tiles(batch);
    const int strips = head_.strip_count();
    for (int i = 0; i < spec_.layers; ++i) {
        const Layer& layer = layers_[static_cast<size_t>(i)];
        const auto phases = phases_.begin() + i * kPhasesPerLayer;
        phases[0].reset(batch.tokens);
        phases[1].reset(layer.qkv.strip_count());
        phases[2].reset(batch.tokens);
        phases[3].reset(static_cast<int>(tasks_.size()));
        phases[4].reset(batch.tokens);
        phases[5].reset(layer.output.strip_count());
        phases[6].reset(batch.tokens);
        phases[7].reset(layer.gate_up.strip_count() / kStripsPerTask);
        phases[8].reset(layer.down.strip_count());
    }
    const auto last = phases_.begin() + spec_.layers * kPhasesPerLayer;
    last[0].reset(batch.tokens);
    last[1].reset(batch.rows);
    last[2].reset(batch.rows > 0 ? strips : 0);
    const int refinements = round_up(strips, kStripsPerRefinement) / kStripsPerRefinement;
    last[3].reset(batch.rows > 0 ? refinements : 0);
    team_.run([&](int thread) { run(thread, batch, logits); });
    const int tap = tap_after(batch, spec_.layers);
    for (int row = 0; tap >= 0 && row < batch.tokens; ++row) keep_features(batch, tap, row);
}

// Which tap the residual stream after so many layers is, or -1.
int Decoder::tap_after(const Batch& batch, int layers) const {
    const auto found = std::find(batch.taps.begin(), batch.taps.end(), layers);
    return found == batch.taps.end() ? -1 : static_cast<int>(found - batch.taps.begin());
}

void Decoder::keep_features(const Batch& batch, int tap, int row) const {
    const size_t hidden = static_cast<size_t>(spec_.hidden_size);
    const float* x = memory_->x.data() + static_cast<size_t>(row) * hidden_;
    const size_t at = static_cast<size_t>(row) * batch.taps.size() + static_cast<size_t>(tap);
    std::copy_n(x, hidden, batch.features + at * hidden);
}

// What other threads have just written lies in their caches, a hundred nanoseconds away: ask for all
// of it at once instead of line by line.
void Decoder::fetch_lines(const void* from, size_t bytes) {
    const char* p = static_cast<const char*>(from);
    for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 3);
}

void Decoder::fetch_inputs(const Tiles& x, Format format, int rows) const {
    if (rows > kTile) return;  // not for a prompt's: they would push each other out
    const size_t slots = static_cast<size_t>(x.groups) * x.tile;
    fetch_lines(x.values, slots * kernels_.row_bytes[format]);
    fetch_lines(x.scales, slots * kRowNumbers * sizeof(float));
}

void Decoder::set_tiles(const Batch& batch) {
    int tile = 1;
    while (tile < kTile && tile < std::max(batch.tokens, batch.rows)) tile *= 2;
    for (Tiles* tiles : {&memory_->a, &memory_->b, &memory_->c}) tiles->tile = tile;
}

template <typename Work>
void Decoder::for_rows(int thread, int rows, Ranges& ranges, Ahead next, const Work& work) {
    if (rows <= kSerialRows) {
        team_.barrier(next, [&] {
            for (int row = 0; row < rows; ++row) work(row);
        });
        return;
    }
    team_.barrier({}, [] {});
    ranges.take(thread, work);
    team_.barrier(next, [] {});
}

// The first weights that a thread will read of a matrix whose tasks are `strips_per_task` strips.
Ahead Decoder::first_strips(int thread, const Matrix& matrix, const Ranges& tasks,
                            int strips_per_task) const {
    const size_t bytes = matrix.strip_bytes();
    const size_t begin = static_cast<size_t>(tasks.begin_of(thread) * strips_per_task) * bytes;
    const size_t end = static_cast<size_t>(matrix.strip_count()) * bytes;
    return {matrix.strips + begin, matrix.strips + std::min(end, begin + kAheadBytes)};
}

void Decoder::run(int thread, const Batch& batch, float* logits) {
    const auto last = phases_.begin() + spec_.layers * kPhasesPerLayer;
    for_rows(thread, batch.tokens, last[0], {}, [&](int row) { embed(batch, row); });
    for (int i = 0; i < spec_.layers; ++i) {
        run_layer(thread, batch, i, phases_.begin() + i * kPhasesPerLayer);
    }
    for_rows(thread, batch.rows, last[1], first_strips(thread, head_, last[2], 1),
             [&](int row) { normalise_logit_row(thread, batch, row); });
    run_head(thread, batch, logits);
}

void Decoder::normalise_logit_row(int thread, const Batch& batch, int row) {
    Memory& m = *memory_;
    const float* x = m.x.data() + static_cast<size_t>(batch.logit_rows[row]) * hidden_;
    normalise_row(thread, final_norm_, x, row, head_.format);
    if (!is_refined()) return;
    kernels_.quantise(m.threads[static_cast<size_t>(thread)].row.data(), row, m.refined, kInt16);
}

void Decoder::run_head(int thread, const Batch& batch, float* logits) {
    Memory& m = *memory_;
    const auto last = phases_.begin() + spec_.layers * kPhasesPerLayer;
    const size_t stride = static_cast<size_t>(spec_.vocab_size);
    const int rows = batch.rows;
    if (!is_refined()) {
        last[2].take(thread, [&](int strip) {
            kernels_.linear(head_, strip, m.a, rows, logits, stride, false, nullptr);
        });
        return;
    }
    float* own = m.threads[static_cast<size_t>(thread)].largest.data();
    std::fill_n(own, rows, -INFINITY);
    last[2].take(thread, [&](int strip) {
        float* largest = m.largest.data() + static_cast<size_t>(strip) * rows;
        kernels_.linear(head_, strip, m.a, rows, logits, stride, false, largest);
        for (int row = 0; row < rows; ++row) own[row] = std::max(own[row], largest[row]);
    });
    team_.barrier({}, [&] { set_thresholds(rows); });
    last[3].take(thread, [&](int task) { refine_strips(task, rows, logits); });
}

// By the last thread to have done its strips.
void Decoder::set_thresholds(int rows) {
    Memory& m = *memory_;
    for (int row = 0; row < rows; ++row) {
        float top = -INFINITY;
        for (const auto& own : m.threads) top = std::max(top, own.largest[row]);
        // A row of NaN stays as it is.
        m.thresholds[row] = top == -INFINITY ? INFINITY : top - kRefinedNats;
    }
}

// Which strips of a row are refined, and their new values, depend on the row alone.
void Decoder::refine_strips(int task, int rows, float* logits) const {
    const Memory& m = *memory_;
    const float* thresholds = m.thresholds.data();
    const int end = std::min((task + 1) * kStripsPerRefinement, head_.strip_count());
    int strips[kStripsPerRefinement], count = 0;
    for (int strip = task * kStripsPerRefinement; strip < end; ++strip) {
        const float* largest = m.largest.data() + static_cast<size_t>(strip) * rows;
        int reached = 0;
        for (int row = 0; row < rows; ++row) reached += largest[row] >= thresholds[row];
        if (reached > 0) strips[count++] = strip;
    }
    for (int i = 0; i < count; ++i) {
        const int strip = strips[i];
        int next = strips[std::min(i + 1, count - 1)];
        const float* largest = m.largest.data() + static_cast<size_t>(strip) * rows;
        for (int row = 0; row < rows; ++row) {
            if (!(largest[row] >= thresholds[row])) continue;
            kernels_.refine(head_, strip, next, m.refined, row,
                            logits + static_cast<size_t>(row) * spec_.vocab_size);
            next = strip;
        }
    }
}

void Decoder::run_layer(int thread, const Batch& batch, int index, Phases phases) {
    Memory& m = *memory_;
    const Layer& layer = layers_[static_cast<size_t>(index)];
    const int tokens = batch.tokens;
    const size_t hidden = static_cast<size_t>(hidden_);
    const int tap = tap_after(batch, index);
    for_rows(thread, tokens, phases[0], first_strips(thread, layer.qkv, phases[1], 1), [&](int row) {
        fetch_slot(batch, index, row);
        if (tap >= 0) keep_features(batch, tap, row);
        normalise_row(thread, layer.attention_norm, m.x.data() + row * hidden, row,
                      layer.qkv.format);
    });
    fetch_inputs(m.a, layer.qkv.format, tokens);
    phases[1].take(thread, [&](int strip) {
        kernels_.linear(layer.qkv, strip, m.a, tokens, m.qkv.data(),
                        static_cast<size_t>(qkv_stride_), false, nullptr);
    });
    for_rows(thread, tokens, phases[2], {}, [&](int row) { rotate_and_cache(batch, index, row); });
    phases[3].take(thread, [&](int task) {
        if (static_cast<size_t>(task) + 1 < tasks_.size()) {
            fetch_ahead(batch, index, tasks_[static_cast<size_t>(task) + 1]);
        }
        attend(thread, batch, index, tasks_[static_cast<size_t>(task)]);
    });
    for_rows(thread, tokens, phases[4], first_strips(thread, layer.output, phases[5], 1), [&](int row) {
        fetch_lines(m.mixed.data() + static_cast<size_t>(row) * query_,
                    static_cast<size_t>(query_) * sizeof(float));
        join_segments(row);
        kernels_.quantise(m.mixed.data() + static_cast<size_t>(row) * query_, row, m.b,
                          layer.output.format);
    });
    fetch_inputs(m.b, layer.output.format, tokens);
    phases[5].take(thread, [&](int strip) {
        kernels_.linear(layer.output, strip, m.b, tokens, m.x.data(), hidden, true, nullptr);
    });
    for_rows(thread, tokens, phases[6], first_strips(thread, layer.gate_up, phases[7], kStripsPerTask), [&](int row) {
        normalise_row(thread, layer.mlp_norm, m.x.data() + row * hidden, row,
                      layer.gate_up.format);
    });
    fetch_inputs(m.a, layer.gate_up.format, tokens);
    phases[7].take(thread, [&](int task) {
        kernels_.gate_up(layer.gate_up, task, m.a, tokens, m.c, layer.down.format);
    });
    team_.barrier(first_strips(thread, layer.down, phases[8], 1), [] {});
    fetch_inputs(m.c, layer.down.format, tokens);
    phases[8].take(thread, [&](int strip) {
        kernels_.linear(layer.down, strip, m.c, tokens, m.x.data(), hidden, true, nullptr);
    });
}

void Decoder::normalise_row(int thread, const std::vector<float>& weight, const float* x, int row,
                            Format format) {
    float* y = memory_->threads[static_cast<size_t>(thread)].row.data();
    fetch_lines(x, static_cast<size_t>(hidden_) * sizeof(float));
    kernels_.normalise(x, weight.data(), spec_.hidden_size, spec_.rms_eps, y);
    kernels_.quantise(y, row, memory_->a, format);
}

void Decoder::embed(const Batch& batch, int row) {
    Memory& m = *memory_;
    unpack_row(embedding_, batch.token_ids[row], m.x.data() + static_cast<size_t>(row) * hidden_);
    const int half = spec_.head_dim / 2;
    const float position = static_cast<float>(batch.positions[row]);
    for (int i = 0; i < half; ++i) {
        const float angle = position * spec_.frequencies[static_cast<size_t>(i)];
        const size_t at = static_cast<size_t>(row) * half + i;
        m.cosines[at] = std::cos(angle) * spec_.rope_scale;
        m.sines[at] = std::sin(angle) * spec_.rope_scale;
    }
}

void Decoder::rotate_and_cache(const Batch& batch, int index, int row) {
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
    const int sequence = tiles_[static_cast<size_t>(tile_of_row_[static_cast<size_t>(row)])].sequence;
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
void Decoder::fetch_slot(const Batch& batch, int layer, int row) const {
    const int sequence = tiles_[static_cast<size_t>(tile_of_row_[static_cast<size_t>(row)])].sequence;
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
void Decoder::fetch_ahead(const Batch& batch, int layer, const AttentionTask& task) const {
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

AttentionState Decoder::slot_state(int slot) {
    float* at = memory_->slots.data() +
                static_cast<size_t>(slot) * kMaxQueries * static_cast<size_t>(2 + padded_dim_);
    return {at, at + kMaxQueries, at + 2 * kMaxQueries};
}

void Decoder::attend(int thread, const Batch& batch, int layer, const AttentionTask& task) {
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

void Decoder::finish_rows(const Tile& tile, int kv_head, const AttentionState& state) {
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
void Decoder::join_segments(int row) {
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
