// Work on one row of activations: norms and quantisation. Included inside an ISA's namespace.
#pragma once

#if MIRROR_SET == 3
constexpr int kRowBytes[kFormats] = {32, 64, 64, 128, 32};
#else
constexpr int kRowBytes[kFormats] = {64, 64, 64, 128, 64};
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
FORCE void store_int8(const Slot& slot, I low, I high) {
    store_low8(reinterpret_cast<int8_t*>(slot.values), low);
    store_low8(reinterpret_cast<int8_t*>(slot.values) + 16, high);
}
// q = 256 * h + l with both in a signed byte: 32 bytes of h, then 32 of l.
FORCE void store_int16(const Slot& slot, I low, I high) {
    int8_t* out = reinterpret_cast<int8_t*>(slot.values);
    const I half = iset1(128);
    const I low_h = _mm512_srai_epi32(iadd(low, half), 8);
    const I high_h = _mm512_srai_epi32(iadd(high, half), 8);
    store_low8(out, low_h);
    store_low8(out + 16, high_h);
    store_low8(out + 32, _mm512_sub_epi32(low, shift_left<8>(low_h)));
    store_low8(out + 48, _mm512_sub_epi32(high, shift_left<8>(high_h)));
}
#else
// 16-bit pairs in the order (0, 2), (1, 3) of each four inputs: a weight's bytes are widened by
// masking and shifting, which gives the even and the odd ones.
FORCE void store_int16(const Slot& slot, I low, I high) {
    alignas(64) int32_t lanes[kGroup];
    istore(lanes, low);
    istore(lanes + 16, high);
    int16_t* out = reinterpret_cast<int16_t*>(slot.values);
    for (int i = 0; i < kGroup; i += 4) {
        out[i] = static_cast<int16_t>(lanes[i]);
        out[i + 1] = static_cast<int16_t>(lanes[i + 2]);
        out[i + 2] = static_cast<int16_t>(lanes[i + 1]);
        out[i + 3] = static_cast<int16_t>(lanes[i + 3]);
    }
}
FORCE void store_int8(const Slot& slot, I low, I high) { store_int16(slot, low, high); }
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

FORCE void quantise_integer(F low, F high, Format format, const Slot& slot) {
    const bool wide = format == kInt16;
    if (format == kRotated) rotate(low, high);
    const int32_t zero_start = 0;
    __builtin_memcpy(slot.scales + 2, &zero_start, 4);
    // As integers NaN is above infinity, so that neither can hide behind a number.
    const int32_t top = reduce_imax(imax(bits(absolute(low)), bits(absolute(high))));
    if (top >= 0x7f800000) {
        const float nan = __builtin_nanf("");
        slot.scales[0] = slot.scales[1] = nan;
        if (wide) store_int16(slot, izero(), izero()); else store_int8(slot, izero(), izero());
        return;
    }
    float largest;
    __builtin_memcpy(&largest, &top, 4);
    const float levels = wide ? kLargest16 : 127.0f;
    // Below this the reciprocal overflows; such a group is zero beside any other.
    const float inverse = largest > 1e-30f ? levels / largest : 0.0f;
    const I low_q = round(mul(low, set1(inverse)));
    const I high_q = round(mul(high, set1(inverse)));
    const int32_t sum = reduce_iadd(iadd(low_q, high_q));
    slot.scales[0] = largest / levels;
    if (format == kRotated) {
        slot.scales[1] = first_lane(low);
        const int32_t start = -128 * sum;  // the codes are stored plus 128
        __builtin_memcpy(slot.scales + 2, &start, 4);
    } else {
        slot.scales[1] = slot.scales[0] * static_cast<float>(sum);
    }
    if (wide) store_int16(slot, low_q, high_q); else store_int8(slot, low_q, high_q);
}

FORCE void quantise_group(F low, F high, int row, int group, const Tiles& out, Format format) {
    const Slot slot = slot_of(out, row, group, kRowBytes[format]);
    if (format == kFp32) {
        store(reinterpret_cast<float*>(slot.values), low);
        store(reinterpret_cast<float*>(slot.values) + 16, high);
    } else if (format == kBf16) {
        store_bf16(reinterpret_cast<uint16_t*>(slot.values), low);
        store_bf16(reinterpret_cast<uint16_t*>(slot.values) + 16, high);
    } else {
        quantise_integer(low, high, format, slot);
    }
}

// x: [groups * 32], zero beyond the real inputs.
static void quantise(const float* x, int row, const Tiles& out, Format format) {
    for (int group = 0; group < out.groups; ++group, x += kGroup) {
        quantise_group(load(x), load(x + 16), row, group, out, format);
    }
}

// x, weight, y: padded to a multiple of 32 with zeros. RMS norm (Zhang, Sennrich 2019).
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
