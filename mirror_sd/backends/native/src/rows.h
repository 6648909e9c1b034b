// Work on one row of activations: norms and quantisation. Included inside an ISA's namespace.
#pragma once

#if MIRROR_SET == 3
constexpr int kRowBytes[kFormats] = {64, 128, 128, 256, 64};
#else
constexpr int kRowBytes[kFormats] = {128, 128, 128, 256, 128};
#endif

// The largest 16-bit activation: its high byte must stay within 127 after rounding the low one off.
constexpr float kLargest16 = 32512.0f;

struct Slot {
    uint8_t* values;
    float* scales;
};

FORCE Slot slot_of(const Tiles& tiles, int row, int group, int row_bytes) {
    const size_t at =
        (static_cast<size_t>(row / tiles.tile) * tiles.groups + group) * tiles.tile +
        row % tiles.tile;
    return {tiles.values + at * row_bytes, tiles.scales + at * kRowNumbers};
}

#if MIRROR_SET == 3
FORCE void store_int8(uint8_t* out, const I* q) {
    for (int i = 0; i < 4; ++i) store_low8(reinterpret_cast<int8_t*>(out) + 16 * i, q[i]);
}
// q = 256 * h + l with both in a signed byte: 64 bytes of h, then 64 of l.
FORCE void store_int16(uint8_t* out, const I* q) {
    for (int i = 0; i < 4; ++i) {
        const I high = _mm512_srai_epi32(iadd(q[i], iset1(128)), 8);
        store_low8(reinterpret_cast<int8_t*>(out) + 16 * i, high);
        store_low8(reinterpret_cast<int8_t*>(out) + 64 + 16 * i,
                   _mm512_sub_epi32(q[i], shift_left<8>(high)));
    }
}
#else
// 16-bit pairs in the order (0, 2), (1, 3) of each four inputs: a weight's bytes are widened by
// masking and shifting, which gives the even and the odd ones.
FORCE void store_int16(uint8_t* out, const I* q) {
    alignas(64) int32_t lanes[kGroup];
    for (int i = 0; i < 4; ++i) istore(lanes + 16 * i, q[i]);
    int16_t* to = reinterpret_cast<int16_t*>(out);
    for (int i = 0; i < kGroup; i += 4) {
        to[i] = static_cast<int16_t>(lanes[i]);
        to[i + 1] = static_cast<int16_t>(lanes[i + 2]);
        to[i + 2] = static_cast<int16_t>(lanes[i + 1]);
        to[i + 3] = static_cast<int16_t>(lanes[i + 3]);
    }
}
FORCE void store_int8(uint8_t* out, const I* q) { store_int16(out, q); }
#endif

// The unnormalised Hadamard transform of 32 values: row 0 is their sum.
FORCE void rotate(F& low, F& high) {
    const F sum = add(low, high);
    high = sub(low, high);
    low = sum;
    low = butterfly<8>(low), high = butterfly<8>(high);
    low = butterfly<4>(low), high = butterfly<4>(high);
    low = butterfly<2>(low), high = butterfly<2>(high);
    low = butterfly<1>(low), high = butterfly<1>(high);
}

FORCE void store_quantised(const Slot& slot, Format format, const I* q) {
    if (format == kInt16) store_int16(slot.values, q); else store_int8(slot.values, q);
}

// x: 64 values in four vectors.
FORCE void quantise_integer(F* x, Format format, const Slot& slot) {
    float sums[2] = {reduce_add(add(x[0], x[1])), reduce_add(add(x[2], x[3]))};
    if (format == kRotated) {
        rotate(x[0], x[1]);
        rotate(x[2], x[3]);
    }
    // As integers NaN is above infinity, so that neither can hide behind a number.
    const I largest_bits = imax(imax(bits(absolute(x[0])), bits(absolute(x[1]))),
                                imax(bits(absolute(x[2])), bits(absolute(x[3]))));
    const int32_t top = reduce_imax(largest_bits);
    I q[4];
    int32_t starts[2] = {0, 0};
    if (top >= 0x7f800000) {
        slot.scales[0] = sums[0] = sums[1] = __builtin_nanf("");
        for (int i = 0; i < 4; ++i) q[i] = izero();
    } else {
        float largest;
        __builtin_memcpy(&largest, &top, 4);
        const float levels = format == kInt16 ? kLargest16 : 127.0f;
        // Below this the reciprocal overflows; such a group is zero beside any other.
        const F inverse = set1(largest > 1e-30f ? levels / largest : 0.0f);
        for (int i = 0; i < 4; ++i) q[i] = round(mul(x[i], inverse));
        slot.scales[0] = largest / levels;
        // The weights' codes are stored plus 128.
        for (int i = 0; i < 2; ++i) starts[i] = -128 * reduce_iadd(iadd(q[2 * i], q[2 * i + 1]));
    }
    alignas(64) float lanes[16] = {sums[0], sums[1]};
    alignas(64) uint16_t rounded[16];
    store_bf16(rounded, load(lanes));
    __builtin_memcpy(slot.scales + 1, rounded, 4);
    __builtin_memcpy(slot.scales + 2, starts, 8);
    store_quantised(slot, format, q);
}

FORCE void quantise_group(F* x, int row, int group, const Tiles& out, Format format) {
    const Slot slot = slot_of(out, row, group, kRowBytes[format]);
    for (int i = 0; i < 4; ++i) {
        if (format == kFp32) store(reinterpret_cast<float*>(slot.values) + 16 * i, x[i]);
        if (format == kBf16) store_bf16(reinterpret_cast<uint16_t*>(slot.values) + 16 * i, x[i]);
    }
    if (format != kFp32 && format != kBf16) quantise_integer(x, format, slot);
}

// x: [groups * 64], zero beyond the real inputs.
static void quantise(const float* x, int row, const Tiles& out, Format format) {
    for (int group = 0; group < out.groups; ++group, x += kGroup) {
        F values[4] = {load(x), load(x + 16), load(x + 32), load(x + 48)};
        quantise_group(values, row, group, out, format);
    }
}

// x, weight, y: padded to whole groups with zeros. RMS norm (Zhang, Sennrich 2019).
static void normalise(const float* x, const float* weight, int size, float eps, float* y) {
    F sum = zero();
    const int padded = (size + kGroup - 1) / kGroup * kGroup;
    for (int i = 0; i < padded; i += 16) {
        const F v = load(x + i);
        sum = fma(v, v, sum);
    }
    const float mean = reduce_add(sum) / static_cast<float>(size) + eps;
    const F scale = set1(1.0f / __builtin_sqrtf(mean));
    for (int i = 0; i < padded; i += 16) {
        store(y + i, mul(mul(load(x + i), scale), load(weight + i)));
    }
}
