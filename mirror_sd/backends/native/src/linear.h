// Matrix products over strips of 16 outputs. Included inside an ISA's namespace.
//
// A row's sum is built the same way whatever the number of rows: per group of 64 inputs partial
// sums of their own, then a fused multiply-add into the row's accumulator, groups ascending.
// That is what makes a row independent of its batch, and it leaves enough independent chains (the
// groups) for one row to hide the latency of the products.
#pragma once

// Rows of a pass over a strip's weights: as many as the registers hold.
constexpr int kRowsAtOnce = MIRROR_SET >= 2 ? 8 : 2;

template <Format format, int rows> struct Products;

// `half` 0 or 1 of a group: integer sums of 32 products, from the row's start.
#if MIRROR_SET == 3
template <int rows> struct Products<kInt8, rows> {
    FORCE void sum_half(int half, const uint8_t* w, const uint8_t* x, const float* numbers,
                               I* sum) {
        for (int m = 0; m < rows; ++m) sum[m] = iset1(load32(numbers + kRowNumbers * m + 2 + half));
#pragma GCC unroll 8
        for (int line = 8 * half; line < 8 * half + 8; ++line) {
            const I weights = iload(w + 64 * line);
#pragma GCC unroll 8
            for (int m = 0; m < rows; ++m) {
                sum[m] = _mm512_dpbusd_epi32(sum[m], weights, iset1(load32(x + 64 * m + 4 * line)));
            }
        }
    }
};
template <int rows> struct Products<kInt16, rows> {
    FORCE void sum_half(int half, const uint8_t* w, const uint8_t* x, const float* numbers,
                               I* sum) {
        I low[rows];
        for (int m = 0; m < rows; ++m) {
            sum[m] = izero();
            low[m] = iset1(load32(numbers + kRowNumbers * m + 2 + half));
        }
#pragma GCC unroll 8
        for (int line = 8 * half; line < 8 * half + 8; ++line) {
            const I weights = iload(w + 64 * line);
#pragma GCC unroll 8
            for (int m = 0; m < rows; ++m) {
                const uint8_t* at = x + 128 * m + 4 * line;
                sum[m] = _mm512_dpbusd_epi32(sum[m], weights, iset1(load32(at)));
                low[m] = _mm512_dpbusd_epi32(low[m], weights, iset1(load32(at + 64)));
            }
        }
        for (int m = 0; m < rows; ++m) sum[m] = iadd(shift_left<8>(sum[m]), low[m]);
    }
};
#else
template <int rows> struct Products<kInt16, rows> {
    FORCE void sum_half(int half, const uint8_t* w, const uint8_t* x, const float* numbers,
                               I* sum) {
        for (int m = 0; m < rows; ++m) sum[m] = iset1(load32(numbers + kRowNumbers * m + 2 + half));
        for (int line = 8 * half; line < 8 * half + 8; ++line) {
            const I weights = iload(w + 64 * line);
            const I even = iand(weights, iset1(0x00ff00ff));
            const I odd = shift_right16<8>(weights);
#pragma GCC unroll 8
            for (int m = 0; m < rows; ++m) {
                const uint8_t* at = x + 128 * m + 8 * line;
                sum[m] = iadd(sum[m], madd16(even, iset1(load32(at))));
                sum[m] = iadd(sum[m], madd16(odd, iset1(load32(at + 4))));
            }
        }
    }
};
template <int rows> struct Products<kInt8, rows> : Products<kInt16, rows> {};
#endif

// Weights stream from memory in the first pass over a strip. How far ahead they are asked for, into the
// second-level cache, was measured on Zen 4: few rows want it close (their loads run ahead by
// themselves, and a far prefetch cost 30-50 %), many rows far (a near one leaves products and lines to
// add up). In the second pass the strip comes from the cache and memory would idle: fetch what the
// next strip needs.
template <int lines, int rows> FORCE void fetch(const uint8_t* w, const uint8_t* next) {
    constexpr size_t ahead = rows <= 2 ? 1152 : 4608;
    const uint8_t* from = next ? next : w + ahead;
    for (int line = 0; line < lines; ++line) prefetch2(from + 64 * line);
}

FORCE int smaller(int a, int b) { return a < b ? a : b; }

// One pass over a strip's weights.
struct Pass {
    const uint8_t* weights;
    const uint8_t* next;  // weights to fetch meanwhile, or none
    const uint8_t* x;     // first row in the first group
    const float* scales;  // of that row
    int groups;
    int tile;             // rows between two groups of a row
};

template <Format format, int rows> FORCE void integer_tile(const Pass& pass, F* y) {
    const uint8_t *w = pass.weights, *next = pass.next, *x = pass.x;
    const float* scales = pass.scales;
    const size_t x_step = static_cast<size_t>(pass.tile) * kRowBytes[format];
    const size_t scales_step = static_cast<size_t>(pass.tile) * kRowNumbers;
    for (int m = 0; m < rows; ++m) y[m] = zero();
    for (int group = 0; group < pass.groups; ++group) {
        fetch<18, rows>(w, next);
        if (next) next += 1152;
        I sum[rows];
        F part[rows];
        Products<format, rows>::sum_half(0, w, x, scales, sum);
        const F first = from_fp16(reinterpret_cast<const uint16_t*>(w + 1024));
#pragma GCC unroll 8
        for (int m = 0; m < rows; ++m) part[m] = mul(to_float(sum[m]), first);
        Products<format, rows>::sum_half(1, w, x, scales, sum);
        const F second = from_fp16(reinterpret_cast<const uint16_t*>(w + 1056));
#pragma GCC unroll 8
        for (int m = 0; m < rows; ++m) {
            const float* numbers = scales + kRowNumbers * m;
            part[m] = fma(to_float(sum[m]), second, part[m]);
            y[m] = fma(part[m], set1(numbers[0]), y[m]);
            y[m] = dot_bf16(y[m], w + 1088, load32(numbers + 1));
        }
        w += 1152;
        x += x_step;
        scales += scales_step;
    }
}

template <Format format, int rows> FORCE void float_tile(const Pass& pass, F* y) {
    const uint8_t *w = pass.weights, *next = pass.next, *x = pass.x;
    constexpr int lines = format == kBf16 ? 16 : 32;  // of half a group
    const size_t x_step = static_cast<size_t>(pass.tile) * kRowBytes[format];
    for (int m = 0; m < rows; ++m) y[m] = zero();
    for (int half = 0; half < 2 * pass.groups; ++half) {
        F sum[rows];
        for (int m = 0; m < rows; ++m) sum[m] = zero();
        fetch<lines, rows>(w, next);
        if (next) next += 64 * lines;
#pragma GCC unroll 16
        for (int line = 0; line < lines; ++line) {
#pragma GCC unroll 8
            for (int m = 0; m < rows; ++m) {
                const int32_t value = load32(x + kRowBytes[format] * m + 4 * line);
                sum[m] = format == kBf16 ? dot_bf16(sum[m], w + 64 * line, value)
                                         : dot_fp32(sum[m], w + 64 * line, value);
            }
        }
        for (int m = 0; m < rows; ++m) y[m] = add(y[m], sum[m]);
        w += 64 * lines;
        x += half % 2 == 0 ? static_cast<size_t>(4 * lines) : x_step - 4 * lines;
    }
}

template <Format format, int rows> static void tile(const Pass& pass, float* out) {
    F y[rows];
    if constexpr (format == kInt8 || format == kInt16) {
        integer_tile<format, rows>(pass, y);
    } else {
        float_tile<format, rows>(pass, y);
    }
    for (int m = 0; m < rows; ++m) store(out + 16 * m, y[m]);
}

template <Format format, int rows> FORCE void tile_of(int count, const Pass& pass, float* out) {
    if constexpr (rows > 1) {
        if (count < rows) return tile_of<format, rows - 1>(count, pass, out);
    }
    tile<format, rows>(pass, out);
}

// Sums of one strip for `rows` rows of one tile, before multiplier and bias: out[row][16].
template <Format format>
static void tile_rows(const Matrix& a, int strip, const Tiles& x, int tile_index, int rows,
                      float* out) {
    const size_t at = static_cast<size_t>(tile_index) * x.groups * x.tile;
    Pass pass;
    pass.weights = a.strips + static_cast<size_t>(strip) * a.strip_bytes();
    pass.x = x.values + at * kRowBytes[format];
    pass.scales = x.scales + at * kRowNumbers;
    pass.groups = a.groups;
    pass.tile = x.tile;
    int passes = tile_index * (kTile / kRowsAtOnce);
    for (int row = 0; row < rows; row += kRowsAtOnce, ++passes) {
        pass.next = passes == 1 ? pass.weights + a.strip_bytes() : nullptr;
        tile_of<format, kRowsAtOnce>(smaller(rows - row, kRowsAtOnce), pass, out + row * kStrip);
        pass.x += kRowsAtOnce * kRowBytes[format];
        pass.scales += kRowsAtOnce * kRowNumbers;
    }
}

static void strip_tile(const Matrix& a, int strip, const Tiles& x, int tile_index, int rows,
                       float* out) {
    switch (a.format) {
        case kInt8:
        case kRotated: return tile_rows<kInt8>(a, strip, x, tile_index, rows, out);
        case kInt16: return tile_rows<kInt16>(a, strip, x, tile_index, rows, out);
        case kBf16: return tile_rows<kBf16>(a, strip, x, tile_index, rows, out);
        default: return tile_rows<kFp32>(a, strip, x, tile_index, rows, out);
    }
}

// The largest of the first `width` lanes that are numbers.
FORCE float largest_of(F value, int width) {
    const F none = set1(-__builtin_inff());
    const F numbers = select_nan(value, none);
    return reduce_max(width == kStrip ? numbers : keep(numbers, 0, width, none));
}

static void linear(const Matrix& a, int strip, const Tiles& x, int rows, float* y, size_t stride,
                   bool accumulate, float* largest) {
    alignas(64) float out[kTile * kStrip];
    const F multiplier = set1(a.multiplier);
    const F bias = a.bias ? load(a.bias + strip * kStrip) : zero();
    const int width = smaller(kStrip, a.outputs - strip * kStrip);
    y += strip * kStrip;
    for (int first = 0; first < rows; first += x.tile) {
        const int count = smaller(x.tile, rows - first);
        // The results' lines are often in another core's cache: let them come during the products.
        for (int m = 0; m < count; ++m) fetch_to_write(y + static_cast<size_t>(first + m) * stride);
        strip_tile(a, strip, x, first / x.tile, count, out);
        for (int m = 0; m < count; ++m) {
            const F value = fma(load(out + 16 * m), multiplier, bias);
            float* to = y + static_cast<size_t>(first + m) * stride;
            if (largest) largest[first + m] = largest_of(value, width);
            if (width == kStrip) {
                store(to, accumulate ? add(load(to), value) : value);
                continue;
            }
            store(out + 16 * m, value);
            for (int i = 0; i < width; ++i) {
                to[i] = accumulate ? to[i] + out[16 * m + i] : out[16 * m + i];
            }
        }
    }
}

static void refine(const Matrix& a, int strip, int next, const Tiles& x, int row, float* y) {
    alignas(64) float out[kStrip];
    const Slot slot = slot_of(x, row, 0, kRowBytes[kInt16]);
    Pass pass;
    pass.weights = a.strips + static_cast<size_t>(strip) * a.strip_bytes();
    pass.next = next == strip ? nullptr : a.strips + static_cast<size_t>(next) * a.strip_bytes();
    pass.x = slot.values;
    pass.scales = slot.scales;
    pass.groups = a.groups;
    pass.tile = x.tile;
    tile<kInt16, 1>(pass, out);
    const F bias = a.bias ? load(a.bias + strip * kStrip) : zero();
    const F value = fma(load(out), set1(a.multiplier), bias);
    const int width = smaller(kStrip, a.outputs - strip * kStrip);
    y += strip * kStrip;
    if (width == kStrip) return store(y, value);
    store(out, value);
    for (int i = 0; i < width; ++i) y[i] = out[i];
}

// x * sigmoid(x)
FORCE F silu(F x) {
    const F decay = exp2(mul(x, set1(-1.44269504f)));
    return div(x, add(set1(1.0f), decay));
}

static void gate_up(const Matrix& a, int task, const Tiles& x, int rows, const Tiles& out,
                    Format out_format) {
    constexpr int pairs = kGroup / kStrip;
    alignas(64) float gates[pairs][kTile * kStrip], ups[pairs][kTile * kStrip];
    const F multiplier = set1(a.multiplier);
    for (int first = 0; first < rows; first += x.tile) {
        const int count = smaller(x.tile, rows - first);
        for (int m = 0; m < count; ++m) {
            const Slot slot = slot_of(out, first + m, task, kRowBytes[out_format]);
            fetch_to_write(slot.values);
            fetch_to_write(slot.scales);
        }
        for (int i = 0; i < pairs; ++i) {
            const int strip = 2 * (pairs * task + i);
            strip_tile(a, strip, x, first / x.tile, count, gates[i]);
            strip_tile(a, strip + 1, x, first / x.tile, count, ups[i]);
        }
        for (int m = 0; m < count; ++m) {
            F values[pairs];
            for (int i = 0; i < pairs; ++i) {
                const F gate = mul(load(gates[i] + 16 * m), multiplier);
                values[i] = mul(silu(gate), mul(load(ups[i] + 16 * m), multiplier));
            }
            quantise_group(values, first + m, task, out, out_format);
        }
    }
}
