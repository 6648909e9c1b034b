// The functions that exist once per instruction set, and the layouts they share.
//
// Weights: strips of 16 outputs. A strip is a sequence of groups of 64 inputs:
//   u8:   16 lines of [16 outputs][4 inputs] bytes, [2 halves][16] scales in fp16, [16][2 halves]
//         offsets in bf16 (1152 bytes);
//         weight = (scale * (u - 128) + offset) * multiplier, `multiplier` one power of two a matrix
//   rotated: the same bytes; u - 128 are the codes of each half's 32 weights times a Hadamard matrix,
//         `offset` is what the half's weights have in common
//   bf16: 32 lines of [16 outputs][2 inputs] (2048 bytes)
//   fp32: 64 lines of [16 outputs] (4096 bytes)
// Activations: tiles of up to 16 rows, [tile][group][rows][group bytes], beside them [..][rows][4]
// numbers: the group's scale, the sums of its halves as two bf16, and (two integers) where the
// products' sums of the halves start.
#pragma once

#include <cstddef>
#include <cstdint>

namespace mirror {

constexpr int kGroup = 64;
constexpr int kHalf = 32;  // inputs that share a scale of the weights
constexpr int kStrip = 16;
constexpr int kTile = 16;
constexpr int kKeysPerChunk = 16;
constexpr int kKeysPerSegment = 256;
constexpr int kMaxQueries = 32;  // rows x heads of an attention tile

constexpr int kRowNumbers = 4;

// How a matrix multiplies: weights and activations together. kInt8 and kInt16 have 8-bit weights and
// activations of 8 and 16 bits. kRotated has 8 bits on both sides, but multiplies each half group
// by a Hadamard matrix first, weights when they are packed: then no input of a group stands out, and
// 8 bits hold it twice as well (Ashkboos et al., QuaRot, 2024). A group of 4-bit codes stays exact.
// A head in kInt8 is refined: the best strips of a row are computed again as in kInt16, which has the
// same weights (see Decoder::set_thresholds).
enum Format { kInt8 = 0, kInt16 = 1, kBf16 = 2, kFp32 = 3, kRotated = 4, kFormats = 5 };

// Number format of keys and values in the cache.
enum CacheFormat { kCacheBf16 = 0, kCacheFp32 = 1, kCacheInt8 = 2 };

// Bytes of 16 keys and values of one KV head; a unit is four bytes of a key as queries meet it.
constexpr size_t chunk_bytes(CacheFormat format, int units) {
    return static_cast<size_t>(units) * (format == kCacheInt8 ? 64 : 128) +
           (format == kCacheInt8 ? 128 : 0);
}

constexpr size_t strip_group_bytes(Format format) {
    return format == kBf16 ? 2048 : format == kFp32 ? 4096 : 1152;
}

// Rows of activations in the layout above.
struct Tiles {
    uint8_t* values;
    float* scales;
    int groups;
    int tile;  // rows of a tile: the fewest that hold the batch, so that they stay in the L1 cache
};

struct Matrix {
    const uint8_t* strips = nullptr;
    const float* bias = nullptr;  // [strips * 16] or none
    int outputs = 0;
    int inputs = 0;
    int groups = 0;  // of inputs
    float multiplier = 1.0f;
    Format format = kFp32;
    int strip_count() const { return (outputs + kStrip - 1) / kStrip; }
    size_t strip_bytes() const { return strip_group_bytes(format) * static_cast<size_t>(groups); }
};

// One attention tile: queries of one sequence and one KV head.
struct AttentionTile {
    const uint8_t* cache;      // of the layer
    const int32_t* table;      // block ids of the sequence
    size_t block_bytes;        // one block of one layer
    size_t head_offset;        // of the KV head within a block
    int chunks_per_block;
    int block_size;
    int units;                 // 64-byte lines of keys in a chunk: padded head_dim / unit size
    int head_dim;
    int padded_dim;
    int queries;               // <= kMaxQueries; query q belongs to row q / heads
    int heads;                 // query heads that share the KV head
    int first_position;        // of the first row
    int window;                // tokens a query sees, or 0 for all
    int segment_begin;         // segments of kKeysPerSegment keys
    int segment_end;
    float scale;               // of the scores, times log2(e)
    const uint8_t* const* query_rows;  // [rows] -> units of `heads` queries, padded_dim each
};

// Running softmax state of one query: maximum, sum, accumulated values.
struct AttentionState {
    float* maximum;  // [queries]
    float* sum;      // [queries]
    float* values;   // [queries][padded_dim]
};

struct KernelTable {
    const char* name;
    // Bytes of one group of activations of a row.
    int row_bytes[kFormats];

    // y[row][strip * 16 ...] (=, or += if `accumulate`) matrix x rows, `stride` floats a row.
    // largest: none, or [rows] for each row's largest output of the strip, -inf if all are NaN.
    void (*linear)(const Matrix&, int strip, const Tiles& x, int rows, float* y, size_t stride,
                   bool accumulate, float* largest);
    // y[strip * 16 ...] = matrix (kInt8) x one row of kInt16; meanwhile the weights of strip `next`
    // are fetched, if that is not `strip`.
    void (*refine)(const Matrix&, int strip, int next, const Tiles& x, int row, float* y);
    // One group of outputs of silu(gate) * up, quantised into `out` as group `task`. The matrix
    // holds strips of gate and up in turn.
    void (*gate_up)(const Matrix&, int task, const Tiles& x, int rows, const Tiles& out,
                    Format out_format);
    void (*normalise)(const float* x, const float* weight, int size, float eps, float* y);
    void (*quantise)(const float* x, int row, const Tiles& out, Format format);
    // scratch: at least attention_scratch_bytes.
    void (*attention)(const AttentionTile&, CacheFormat, AttentionState* state, uint8_t* scratch);
    // Folds segment states, in order, into `state`.
    void (*fold)(const AttentionState& segment, int queries, int padded_dim, AttentionState* state);
    // Norm (if `norm`) and rotary positions of one head in place; sizes in floats.
    void (*rotate_head)(float* head, int dim, const float* norm, float eps, const float* cosines,
                        const float* sines);
    // The head as `units` of the cache's number format, zero beyond `dim`.
    void (*store_units)(const float* head, int dim, int units, bool fp32, uint8_t* out);
    // One token's key and value of one KV head into lane `lane` of its chunk. `alone`: no later
    // token of the batch follows in the chunk.
    void (*store_kv)(const float* key, const float* value, int dim, int padded_dim, int lane,
                     bool alone, CacheFormat, uint8_t* chunk);
    uint64_t (*read)(const uint8_t* p, size_t bytes);
};

size_t attention_scratch_bytes(int padded_dim);

}  // namespace mirror
