// Attention of one tile over a paged cache, without copies. Included inside an ISA's namespace.
//
// A block holds, per KV head and chunk of 16 keys: lines of keys [unit][16 keys] and lines of values
// [key unit][16 dimensions], where a unit is four bytes: two bf16 of the contracted dimension, or
// one fp32. In an int8 cache a unit is two bytes, and 16 scales of the keys and of the values follow;
// a segment's chunks are widened to bf16 first, which holds them exactly. Scores come out 16 keys a line and values 16 dimensions a line, both without shuffles.
//
// Keys are taken in segments of 16 chunks by absolute position. Each segment is a complete softmax;
// segments are folded in order (Milakov, Gimelshein 2018; the split over threads is that of
// flash-decoding, Dao et al. 2023). So the result of a query follows from its position alone.
#pragma once

constexpr float kMinusInfinity = -__builtin_inff();
constexpr int kChunksPerSegment = kKeysPerSegment / kKeysPerChunk;
constexpr int kQueriesAtOnce = MIRROR_SET >= 2 ? 8 : 4;
constexpr int kLinesAtOnce = MIRROR_SET >= 2 ? 4 : 2;

// Keys and values are fetched this far ahead: the scores of a chunk take a third of the time that
// memory needs to answer.
constexpr int kChunksAhead = 4;

struct Scratch {
    int32_t* queries;  // [kMaxQueries / 8][units][8]
    float* scores;     // [kMaxQueries][kKeysPerSegment]
    uint8_t* weights;  // [kMaxQueries][kKeysPerSegment] bf16 or fp32
    float* values;     // [kMaxQueries][padded_dim]
    uint8_t* widened;  // [kChunksPerSegment] chunks of an int8 cache as bf16
    float maximum[kMaxQueries];
    float sum[kMaxQueries];
};

template <CacheFormat cache> FORCE const uint8_t* chunk_at(const AttentionTile& t, int chunk) {
    const int block = t.table[chunk / t.chunks_per_block];
    return t.cache + static_cast<size_t>(block) * t.block_bytes + t.head_offset +
           static_cast<size_t>(chunk % t.chunks_per_block) * chunk_bytes(cache, t.units);
}

FORCE int first_key(const AttentionTile& t, int chunk) {
    return chunk / t.chunks_per_block * t.block_size +
           chunk % t.chunks_per_block * kKeysPerChunk;
}

FORCE int chunk_of(const AttentionTile& t, int position) {
    return position / t.block_size * t.chunks_per_block +
           position % t.block_size / kKeysPerChunk;
}

struct Lanes {
    int low, high;
};

// The keys of a segment's chunks; found once, since their divisions cost as much as a chunk's scores.
struct Keys {
    int first[kChunksPerSegment];  // position of lane 0
    int count[kChunksPerSegment];  // lanes in use
    const uint8_t* data[kChunksPerSegment];  // lines of keys, then of values
    const float* scales[kChunksPerSegment];  // int8: of the keys, then of the values
};

// An int8 chunk's lines as bf16, without the scales.
FORCE void widen_chunk(const uint8_t* chunk, int units, uint8_t* out) {
    const int8_t* from = reinterpret_cast<const int8_t*>(chunk);
    uint16_t* to = reinterpret_cast<uint16_t*>(out);
    for (int i = 0; i < units * 64; i += 16) store_bf16(to + i, to_float(widen8(from + i)));
}

template <CacheFormat cache>
FORCE void find_keys(const AttentionTile& t, int begin, int end, uint8_t* widened, Keys* keys) {
    for (int chunk = begin; chunk < end; ++chunk) {
        const int at = chunk % kChunksPerSegment;
        const int left = t.block_size - chunk % t.chunks_per_block * kKeysPerChunk;
        keys->first[at] = first_key(t, chunk);
        keys->count[at] = left < kKeysPerChunk ? left : kKeysPerChunk;
        const uint8_t* chunk_data = chunk_at<cache>(t, chunk);
        keys->data[at] = chunk_data;
        if (cache != kCacheInt8) continue;
        uint8_t* out = widened + static_cast<size_t>(at) * t.units * 128;
        widen_chunk(chunk_data, t.units, out);
        keys->data[at] = out;
        keys->scales[at] =
            reinterpret_cast<const float*>(chunk_data + static_cast<size_t>(t.units) * 64);
    }
}

// Which lanes of a chunk the query at `position` sees.
FORCE Lanes visible(const Keys& keys, int at, int window, int position) {
    int high = position + 1 - keys.first[at];
    high = high < 0 ? 0 : high > keys.count[at] ? keys.count[at] : high;
    int low = window > 0 ? position + 1 - window - keys.first[at] : 0;
    low = low < 0 ? 0 : low > high ? high : low;
    return {low, high};
}

FORCE F keep_visible(F x, Lanes lanes, F fill) {
    if (lanes.low == 0 && lanes.high == kKeysPerChunk) return x;
    return keep(x, lanes.low, lanes.high, fill);
}

template <bool fp32> FORCE F dot_unit(F acc, const void* line, int32_t value) {
    return fp32 ? dot_fp32(acc, line, value) : dot_bf16(acc, line, value);
}

template <bool fp32, int queries>
static void chunk_scores(const uint8_t* keys, const int32_t* q, int units, float* out) {
    F sum[queries];
    for (int i = 0; i < queries; ++i) sum[i] = zero();
    for (int unit = 0; unit < units; ++unit) {
#pragma GCC unroll 8
        for (int i = 0; i < queries; ++i) {
            sum[i] = dot_unit<fp32>(sum[i], keys + 64 * unit, q[8 * unit + i]);
        }
    }
    for (int i = 0; i < queries; ++i) store(out + i * kKeysPerSegment, sum[i]);
}

template <bool fp32>
FORCE void scores_of(const uint8_t* keys, const int32_t* q, int units, int queries, float* out) {
    for (; queries > 0; queries -= kQueriesAtOnce) {
        switch (queries) {
            case 1: return chunk_scores<fp32, 1>(keys, q, units, out);
            case 2: return chunk_scores<fp32, 2>(keys, q, units, out);
            case 3: return chunk_scores<fp32, 3>(keys, q, units, out);
#if MIRROR_SET >= 2
            case 4: return chunk_scores<fp32, 4>(keys, q, units, out);
            case 5: return chunk_scores<fp32, 5>(keys, q, units, out);
            case 6: return chunk_scores<fp32, 6>(keys, q, units, out);
            case 7: return chunk_scores<fp32, 7>(keys, q, units, out);
#endif
            default: chunk_scores<fp32, kQueriesAtOnce>(keys, q, units, out);
        }
        q += kQueriesAtOnce;
        out += kQueriesAtOnce * kKeysPerSegment;
    }
}

// Softmax numerators of one query's scores; returns their sum.
template <CacheFormat cache>
FORCE float exponentials(const Keys& keys, int begin, int end, int window, int position,
                         float maximum, const float* scores, uint8_t* weights) {
    F sum = zero();
    const F top = set1(maximum);
    for (int chunk = begin; chunk < end; ++chunk) {
        const int at = chunk % kChunksPerSegment;
        const Lanes lanes = visible(keys, at, window, position);
        F p = zero();
        if (lanes.low < lanes.high) {
            p = keep_visible(exp2(sub(load(scores + at * kKeysPerChunk), top)), lanes, zero());
        }
        if (cache == kCacheFp32) {
            store(reinterpret_cast<float*>(weights) + at * kKeysPerChunk, p);
            sum = add(sum, p);
            continue;
        }
        const I rounded = to_bf16(p);
        sum = add(sum, floats(shift_left<16>(rounded)));
        uint16_t* to = reinterpret_cast<uint16_t*>(weights) + at * kKeysPerChunk;
        store_low16(to, rounded);
        if (cache == kCacheInt8 && lanes.low < lanes.high) {
            // The values' scales, here where they cost once a key instead of once a dimension.
            store_bf16(to, keep(mul(p, load(keys.scales[at] + kKeysPerChunk)), lanes.low,
                                lanes.high, zero()));
        }
    }
    return reduce_add(sum);
}

template <bool fp32, int queries, int lines>
static void weighted_values(const AttentionTile& t, const Keys& keys, int begin, int end, int line,
                            const uint8_t* weights, float* out) {
    constexpr int units = fp32 ? kKeysPerChunk : kKeysPerChunk / 2;
    constexpr size_t row = static_cast<size_t>(kKeysPerSegment) * (fp32 ? 4 : 2);
    const int lines_per_unit = t.padded_dim / 16;
    F sum[queries][lines];
    for (int i = 0; i < queries; ++i) {
        for (int j = 0; j < lines; ++j) sum[i][j] = zero();
    }
    for (int chunk = begin; chunk < end; ++chunk) {
        const uint8_t* values =
            keys.data[chunk % kChunksPerSegment] + static_cast<size_t>(t.units + line) * 64;
        const uint8_t* p = weights + static_cast<size_t>(chunk % kChunksPerSegment) * units * 4;
        for (int unit = 0; unit < units; ++unit) {
#pragma GCC unroll 4
            for (int i = 0; i < queries; ++i) {
                const int32_t weight = load32(p + i * row + 4 * unit);
#pragma GCC unroll 4
                for (int j = 0; j < lines; ++j) {
                    sum[i][j] = dot_unit<fp32>(sum[i][j], values + 64 * j, weight);
                }
            }
            values += static_cast<size_t>(lines_per_unit) * 64;
        }
    }
    for (int i = 0; i < queries; ++i) {
        for (int j = 0; j < lines; ++j) {
            store(out + static_cast<size_t>(i) * t.padded_dim + 16 * (line + j), sum[i][j]);
        }
    }
}

template <bool fp32, int queries>
FORCE void all_lines(const AttentionTile& t, const Keys& keys, int begin, int end,
                     const uint8_t* weights, float* out) {
    int line = 0;
    const int total = t.padded_dim / 16;
    for (; line + kLinesAtOnce <= total; line += kLinesAtOnce) {
        weighted_values<fp32, queries, kLinesAtOnce>(t, keys, begin, end, line, weights, out);
    }
    for (; line < total; ++line) {
        weighted_values<fp32, queries, 1>(t, keys, begin, end, line, weights, out);
    }
}

template <bool fp32>
FORCE void values_of(const AttentionTile& t, const Keys& keys, int begin, int end,
                     const Scratch& scratch) {
    constexpr int at_once = MIRROR_SET >= 2 ? 4 : 2;
    constexpr size_t row = static_cast<size_t>(kKeysPerSegment) * (fp32 ? 4 : 2);
    for (int q = 0; q < t.queries; q += at_once) {
        const uint8_t* weights = scratch.weights + row * q;
        float* out = scratch.values + static_cast<size_t>(q) * t.padded_dim;
        switch (t.queries - q) {
            case 1: all_lines<fp32, 1>(t, keys, begin, end, weights, out); break;
#if MIRROR_SET >= 2
            case 2: all_lines<fp32, 2>(t, keys, begin, end, weights, out); break;
            case 3: all_lines<fp32, 3>(t, keys, begin, end, weights, out); break;
#endif
            default: all_lines<fp32, at_once>(t, keys, begin, end, weights, out);
        }
    }
}

static void fold(const AttentionState& segment, int queries, int padded_dim,
                 AttentionState* state) {
    for (int q = 0; q < queries; ++q) {
        const float theirs = segment.maximum[q];
        if (theirs == kMinusInfinity) continue;  // the query sees nothing of the segment
        const float ours = state->maximum[q];
        const float top = ours > theirs ? ours : theirs;
        alignas(64) float shifts[16] = {ours - top, theirs - top};
        store(shifts, exp2(load(shifts)));
        const F before = set1(shifts[0]), after = set1(shifts[1]);
        state->maximum[q] = top;
        state->sum[q] = state->sum[q] * shifts[0] + segment.sum[q] * shifts[1];
        float* to = state->values + static_cast<size_t>(q) * padded_dim;
        const float* from = segment.values + static_cast<size_t>(q) * padded_dim;
        for (int i = 0; i < padded_dim; i += 16) {
            store(to + i, fma(load(from + i), after, mul(load(to + i), before)));
        }
    }
}

template <CacheFormat cache>
FORCE void segment(const AttentionTile& t, int index, Scratch& scratch) {
    constexpr bool fp32 = cache == kCacheFp32;
    const int last_row = (t.queries - 1) / t.heads;
    int begin = index * kChunksPerSegment;
    int end = begin + kChunksPerSegment;
    const int past = chunk_of(t, t.first_position + last_row) + 1;
    if (end > past) end = past;
    if (t.window > 0 && t.first_position + 1 > t.window) {
        const int first = chunk_of(t, t.first_position + 1 - t.window);
        if (begin < first) begin = first;
    }
    Keys keys;
    find_keys<cache>(t, begin, end, scratch.widened, &keys);
    alignas(64) float maxima[kMaxQueries * 16];
    for (int q = 0; q < t.queries; ++q) store(maxima + 16 * q, set1(kMinusInfinity));
    for (int chunk = begin; chunk < end; ++chunk) {
        const int at = chunk % kChunksPerSegment;
        if (cache != kCacheInt8 && chunk + kChunksAhead < end && t.queries <= 8) {
            const uint8_t* ahead = keys.data[at + kChunksAhead];
            for (int line = 0; line < 2 * t.units; ++line) prefetch2(ahead + 64 * line);
        }
        float* out = scratch.scores + at * kKeysPerChunk;
        for (int q = 0; q < t.queries; q += 8) {
            scores_of<fp32>(keys.data[at], scratch.queries + static_cast<size_t>(q) * t.units,
                            t.units, t.queries - q < 8 ? t.queries - q : 8,
                            out + q * kKeysPerSegment);
        }
        for (int row = 0, q = 0; row <= last_row; ++row) {
            const Lanes lanes = visible(keys, at, t.window, t.first_position + row);
            for (int head = 0; head < t.heads; ++head, ++q) {
                float* to = out + q * kKeysPerSegment;
                F score = mul(load(to), set1(t.scale));
                if (cache == kCacheInt8) score = mul(score, load(keys.scales[at]));
                score = keep_visible(score, lanes, set1(kMinusInfinity));
                store(to, score);
                store(maxima + 16 * q, max(load(maxima + 16 * q), score));
            }
        }
    }
    constexpr size_t row = static_cast<size_t>(kKeysPerSegment) * (fp32 ? 4 : 2);
    for (int q = 0; q < t.queries; ++q) {
        const float maximum = reduce_max(load(maxima + 16 * q));
        scratch.maximum[q] = maximum;
        scratch.sum[q] = exponentials<cache>(keys, begin, end, t.window,
                                            t.first_position + q / t.heads, maximum,
                                            scratch.scores + q * kKeysPerSegment,
                                            scratch.weights + row * q);
    }
    if (begin < end) values_of<fp32>(t, keys, begin, end, scratch);
}

FORCE void pack_queries(const AttentionTile& t, int32_t* out) {
    for (int q = 0; q < t.queries; ++q) {
        const uint8_t* from = t.query_rows[q / t.heads] +
                              static_cast<size_t>(q % t.heads) * t.units * 4;
        int32_t* to = out + static_cast<size_t>(q / 8) * t.units * 8 + q % 8;
        for (int unit = 0; unit < t.units; ++unit) to[8 * unit] = load32(from + 4 * unit);
    }
}

template <CacheFormat cache>
static void attend(const AttentionTile& t, Scratch& scratch, AttentionState* state) {
    pack_queries(t, scratch.queries);
    for (int q = 0; q < t.queries; ++q) {
        state->maximum[q] = kMinusInfinity;
        state->sum[q] = 0.0f;
    }
    const size_t size = static_cast<size_t>(t.queries) * t.padded_dim;
    for (size_t i = 0; i < size; ++i) state->values[i] = 0.0f;
    for (int index = t.segment_begin; index < t.segment_end; ++index) {
        segment<cache>(t, index, scratch);
        fold({scratch.maximum, scratch.sum, scratch.values}, t.queries, t.padded_dim, state);
    }
}

static void attention(const AttentionTile& t, CacheFormat cache, AttentionState* state,
                      uint8_t* memory) {
    Scratch scratch;
    const size_t dim = static_cast<size_t>(t.padded_dim);
    scratch.queries = reinterpret_cast<int32_t*>(memory);
    scratch.scores = reinterpret_cast<float*>(memory + kMaxQueries * dim * 4);
    scratch.weights = reinterpret_cast<uint8_t*>(scratch.scores + kMaxQueries * kKeysPerSegment);
    scratch.values = reinterpret_cast<float*>(scratch.weights + kMaxQueries * kKeysPerSegment * 4);
    scratch.widened = reinterpret_cast<uint8_t*>(scratch.values + kMaxQueries * dim);
    switch (cache) {
        case kCacheFp32: return attend<kCacheFp32>(t, scratch, state);
        case kCacheInt8: return attend<kCacheInt8>(t, scratch, state);
        default: return attend<kCacheBf16>(t, scratch, state);
    }
}
