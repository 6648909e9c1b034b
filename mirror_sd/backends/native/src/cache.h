// One token's queries, keys and values: norm, rotary positions, and into the cache. Included inside
// an ISA's namespace. The layout of the cache is described in attention.h.
#pragma once

static void rotate_head(float* head, int dim, const float* norm, float eps, const float* cosines,
                        const float* sines) {
    const int half = dim / 2;
    if (norm) {
        F sum = zero();
        int i = 0;
        for (; i + 16 <= dim; i += 16) sum = fma(load(head + i), load(head + i), sum);
        float total = reduce_add(sum);
        for (; i < dim; ++i) total += head[i] * head[i];
        const float scale = 1.0f / __builtin_sqrtf(total / static_cast<float>(dim) + eps);
        for (i = 0; i < dim; ++i) head[i] = head[i] * scale * norm[i];
    }
    // Plain loops: without contraction the vector form of the compiler has the same bits.
    for (int i = 0; i < half; ++i) {
        const float first = head[i], second = head[i + half];
        head[i] = first * cosines[i] - second * sines[i];
        head[i + half] = second * cosines[i] + first * sines[i];
    }
}

FORCE void store_bf16_row(const float* x, int count, uint16_t* y) {
    int i = 0;
    for (; i + 16 <= count; i += 16) store_bf16(y + i, load(x + i));
    if (i == count) return;
    alignas(64) float last[16] = {};
    for (int j = i; j < count; ++j) last[j - i] = x[j];
    store_bf16(y + i, load(last));  // y has room for whole vectors
}

static void store_units(const float* head, int dim, int units, bool fp32, uint8_t* out) {
    if (!fp32) {
        store_bf16_row(head, dim, reinterpret_cast<uint16_t*>(out));
        return;
    }
    float* to = reinterpret_cast<float*>(out);
    for (int i = 0; i < units; ++i) to[i] = i < dim ? head[i] : 0.0f;
}

static void store_kv_fp32(const float* key, const float* value, int dim, int padded_dim, int lane,
                          uint8_t* chunk) {
    float* keys = reinterpret_cast<float*>(chunk) + lane;
    float* values = reinterpret_cast<float*>(chunk) +
                    static_cast<size_t>(padded_dim) * kKeysPerChunk +
                    static_cast<size_t>(lane) * padded_dim;
    for (int i = 0; i < dim; ++i) {
        keys[16 * i] = key[i];
        values[i] = value[i];
    }
}

// Codes of one key or value, 127 for its largest; returns the scale.
FORCE float quantise_head(const float* head, int dim, int8_t* codes) {
    int32_t top = 0;
    for (int i = 0; i < dim; ++i) {
        const int32_t magnitude = load32(head + i) & 0x7fffffff;
        top = magnitude > top ? magnitude : top;
    }
    float largest;
    __builtin_memcpy(&largest, &top, 4);
    // A scale that is no number says so to every query that looks at the token.
    if (top >= 0x7f800000) largest = __builtin_nanf("");
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    for (int i = 0; i < dim; i += 16) {
        alignas(64) float lanes[16] = {};
        for (int j = i; j < i + 16 && j < dim; ++j) lanes[j - i] = head[j];
        store_low8(codes + i, round(mul(load(lanes), set1(inverse))));
    }
    return largest / 127.0f;
}

static void store_kv_int8(const float* key, const float* value, int dim, int padded_dim, int lane,
                          uint8_t* chunk) {
    alignas(64) int8_t codes[512];
    const size_t half = static_cast<size_t>(padded_dim) * kKeysPerChunk;
    float* scales = reinterpret_cast<float*>(chunk + 2 * half);
    scales[lane] = quantise_head(key, dim, codes);
    for (int i = 0; i < dim; ++i) {
        chunk[i / 2 * 32 + lane * 2 + i % 2] = static_cast<uint8_t>(codes[i]);
    }
    scales[kKeysPerChunk + lane] = quantise_head(value, dim, codes);
    uint8_t* values = chunk + half + static_cast<size_t>(lane / 2) * padded_dim * 2 + lane % 2;
    for (int i = 0; i < dim; ++i) values[2 * i] = static_cast<uint8_t>(codes[i]);
}

FORCE void store_finite_kv(const float* key, const float* value, int dim, int padded_dim, int lane,
                           bool alone, CacheFormat cache, uint8_t* chunk) {
    if (cache == kCacheFp32) return store_kv_fp32(key, value, dim, padded_dim, lane, chunk);
    if (cache == kCacheInt8) return store_kv_int8(key, value, dim, padded_dim, lane, chunk);
    alignas(64) uint16_t halves[512];
    store_bf16_row(key, dim, halves);
    int32_t* keys = reinterpret_cast<int32_t*>(chunk) + lane;
    for (int unit = 0; unit < dim / 2; ++unit) keys[16 * unit] = load32(halves + 2 * unit);
    uint16_t* values = reinterpret_cast<uint16_t*>(chunk) +
                       static_cast<size_t>(padded_dim) * kKeysPerChunk +
                       static_cast<size_t>(lane / 2) * padded_dim * 2;
    store_bf16_row(value, dim, halves);
    if (lane % 2 == 0 && alone) {
        // Whole words can be written as vectors.
        int32_t* pairs = reinterpret_cast<int32_t*>(values);
        for (int i = 0; i < dim; ++i) pairs[i] = halves[i];
        return;
    }
    values += lane % 2;
    for (int i = 0; i < dim; ++i) values[2 * i] = halves[i];
}

// In bf16 as well.
FORCE bool all_finite(const float* x, int count) {
    uint32_t wrong = 0;
    for (int i = 0; i < count; ++i) wrong |= (static_cast<uint32_t>(load32(x + i)) << 1) >= 0xfeff0000u;
    return wrong == 0;
}

// A value that a query does not see is read with weight zero, be it of a later row or what an earlier
// user of the block left; only finite ones then add nothing. So a value that is not finite is stored
// as zero with a key of NaN: the queries that do see it have a score of NaN.
static void store_kv(const float* key, const float* value, int dim, int padded_dim, int lane,
                     bool alone, CacheFormat cache, uint8_t* chunk) {
    if (all_finite(value, dim)) {
        store_finite_kv(key, value, dim, padded_dim, lane, alone, cache, chunk);
        return;
    }
    float nan_key[512], zeros[512] = {};
    for (int i = 0; i < dim; ++i) nan_key[i] = __builtin_nanf("");
    store_finite_kv(nan_key, zeros, dim, padded_dim, lane, alone, cache, chunk);
}
