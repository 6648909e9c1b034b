// Sixteen lanes of float or int32 on every instruction set, in one order of operations.
//
// Included by isa_kernels.cpp only, inside the namespace of one instruction set. The reductions add
// lanes in the same tree everywhere, so that results differ between instruction sets only where an
// instruction itself does (bf16 products; the portable path rounds between product and sum).
#pragma once

#if MIRROR_SET >= 1

#if MIRROR_SET >= 2  // AVX-512

using F = __m512;
using I = __m512i;

FORCE F zero() { return _mm512_setzero_ps(); }
FORCE F set1(float x) { return _mm512_set1_ps(x); }
FORCE F load(const float* p) { return _mm512_loadu_ps(p); }
FORCE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
FORCE F add(F a, F b) { return _mm512_add_ps(a, b); }
FORCE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
FORCE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
FORCE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
FORCE F div(F a, F b) { return _mm512_div_ps(a, b); }
FORCE F max(F a, F b) { return _mm512_max_ps(a, b); }
FORCE F min(F a, F b) { return _mm512_min_ps(a, b); }
FORCE F from_fp16(const uint16_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
FORCE F to_float(I x) { return _mm512_cvtepi32_ps(x); }
FORCE I round(F x) { return _mm512_cvtps_epi32(x); }
FORCE I izero() { return _mm512_setzero_si512(); }
FORCE I iset1(int32_t x) { return _mm512_set1_epi32(x); }
FORCE I iload(const void* p) { return _mm512_loadu_si512(p); }
FORCE void istore(void* p, I x) { _mm512_storeu_si512(p, x); }
FORCE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
FORCE I iand(I a, I b) { return _mm512_and_si512(a, b); }
FORCE I imax(I a, I b) { return _mm512_max_epi32(a, b); }
template <int N> FORCE I shift_left(I a) { return _mm512_slli_epi32(a, N); }
template <int N> FORCE I shift_right(I a) { return _mm512_srli_epi32(a, N); }
template <int N> FORCE I shift_right16(I a) { return _mm512_srli_epi16(a, N); }
FORCE I madd16(I a, I b) { return _mm512_madd_epi16(a, b); }
FORCE I bits(F x) { return _mm512_castps_si512(x); }
FORCE F floats(I x) { return _mm512_castsi512_ps(x); }
// Lane i of x for i in [low, high), else fill.
FORCE F keep(F x, int low, int high, F fill) {
    const __mmask16 mask =
        static_cast<__mmask16>((high >= 16 ? 0xffffu : (1u << high) - 1) & ~((1u << low) - 1));
    return _mm512_mask_mov_ps(fill, mask, x);
}
FORCE F select_nan(F x, F otherwise) {  // x where x is a number, else `otherwise`
    return _mm512_mask_mov_ps(otherwise, _mm512_cmp_ps_mask(x, x, _CMP_ORD_Q), x);
}
template <int N> FORCE F swap_lanes(F x) {  // lane i gets lane i ^ N
    if (N == 8) return _mm512_shuffle_f32x4(x, x, 0x4e);
    if (N == 4) return _mm512_shuffle_f32x4(x, x, 0xb1);
    return N == 2 ? _mm512_permute_ps(x, 0x4e) : _mm512_permute_ps(x, 0xb1);
}
FORCE float first_lane(F x) { return _mm512_cvtss_f32(x); }
FORCE __m256 low_half(F x) { return _mm512_castps512_ps256(x); }
FORCE __m256 high_half(F x) { return _mm512_extractf32x8_ps(x, 1); }
FORCE __m256i low_half(I x) { return _mm512_castsi512_si256(x); }
FORCE __m256i high_half(I x) { return _mm512_extracti32x8_epi32(x, 1); }
FORCE void store_low16(uint16_t* p, I x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(x));
}
FORCE void store_low8(int8_t* p, I x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
}
FORCE I widen8(const int8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
FORCE F bf16_to_float(const uint16_t* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

#else  // AVX2 with FMA and F16C

struct F { __m256 a, b; };
struct I { __m256i a, b; };

FORCE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
FORCE F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
FORCE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
FORCE void store(float* p, F x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
FORCE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
FORCE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
FORCE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
FORCE F fma(F x, F y, F z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
FORCE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
FORCE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
FORCE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
FORCE F from_fp16(const uint16_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
FORCE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
FORCE I round(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
FORCE I izero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
FORCE I iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
FORCE I iload(const void* p) {
    const __m256i* q = static_cast<const __m256i*>(p);
    return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
FORCE void istore(void* p, I x) {
    __m256i* q = static_cast<__m256i*>(p);
    _mm256_storeu_si256(q, x.a);
    _mm256_storeu_si256(q + 1, x.b);
}
FORCE I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
FORCE I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
FORCE I imax(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
template <int N> FORCE I shift_left(I x) {
    return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)};
}
template <int N> FORCE I shift_right(I x) {
    return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)};
}
template <int N> FORCE I shift_right16(I x) {
    return {_mm256_srli_epi16(x.a, N), _mm256_srli_epi16(x.b, N)};
}
FORCE I madd16(I x, I y) { return {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)}; }
FORCE I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
FORCE F floats(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
FORCE __m256 lanes_between(int low, int high, int base) {
    const __m256i lane = _mm256_add_epi32(_mm256_set1_epi32(base), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    const __m256i above = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(low - 1));
    const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(high), lane);
    return _mm256_castsi256_ps(_mm256_and_si256(above, below));
}
FORCE F keep(F x, int low, int high, F fill) {
    return {_mm256_blendv_ps(fill.a, x.a, lanes_between(low, high, 0)),
            _mm256_blendv_ps(fill.b, x.b, lanes_between(low, high, 8))};
}
FORCE F select_nan(F x, F otherwise) {
    return {_mm256_blendv_ps(otherwise.a, x.a, _mm256_cmp_ps(x.a, x.a, _CMP_ORD_Q)),
            _mm256_blendv_ps(otherwise.b, x.b, _mm256_cmp_ps(x.b, x.b, _CMP_ORD_Q))};
}
template <int N> FORCE F swap_lanes(F x) {
    if (N == 8) return {x.b, x.a};
    if (N == 4) return {_mm256_permute2f128_ps(x.a, x.a, 1), _mm256_permute2f128_ps(x.b, x.b, 1)};
    return N == 2 ? F{_mm256_permute_ps(x.a, 0x4e), _mm256_permute_ps(x.b, 0x4e)}
                  : F{_mm256_permute_ps(x.a, 0xb1), _mm256_permute_ps(x.b, 0xb1)};
}
FORCE float first_lane(F x) { return _mm256_cvtss_f32(x.a); }
FORCE __m256 low_half(F x) { return x.a; }
FORCE __m256 high_half(F x) { return x.b; }
FORCE __m256i low_half(I x) { return x.a; }
FORCE __m256i high_half(I x) { return x.b; }
FORCE void store_low16(uint16_t* p, I x) {
    alignas(32) int32_t lanes[16];
    istore(lanes, x);
    for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(lanes[i]);
}
FORCE void store_low8(int8_t* p, I x) {
    alignas(32) int32_t lanes[16];
    istore(lanes, x);
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(lanes[i]);
}
FORCE I widen8(const int8_t* p) {
    const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi8_epi32(raw), _mm256_cvtepi8_epi32(_mm_srli_si128(raw, 8))};
}
FORCE F bf16_to_float(const uint16_t* p) {
    const __m128i* q = reinterpret_cast<const __m128i*>(p);
    return floats(I{_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), 16),
                    _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1)), 16)});
}

#endif

FORCE float reduce_add(F x) {
    const __m256 eight = _mm256_add_ps(low_half(x), high_half(x));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(four, _mm_movehdup_ps(four)));
}
FORCE float reduce_max(F x) {
    const __m256 eight = _mm256_max_ps(low_half(x), high_half(x));
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
FORCE __m128i fold_four(__m256i x, bool maximum) {
    const __m128i low = _mm256_castsi256_si128(x), high = _mm256_extracti128_si256(x, 1);
    return maximum ? _mm_max_epi32(low, high) : _mm_add_epi32(low, high);
}
FORCE int32_t reduce_imax(I x) {
    __m128i four = fold_four(_mm256_max_epi32(low_half(x), high_half(x)), true);
    four = _mm_max_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
FORCE int32_t reduce_iadd(I x) {
    __m128i four = fold_four(_mm256_add_epi32(low_half(x), high_half(x)), false);
    four = _mm_add_epi32(four, _mm_shuffle_epi32(four, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(four, _mm_shuffle_epi32(four, 0xb1)));
}
FORCE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
FORCE void prefetch2(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#else  // portable: the compiler's vectors

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int16_t H __attribute__((vector_size(64)));
typedef uint16_t UH __attribute__((vector_size(64)));

FORCE F zero() { return F{}; }
FORCE F set1(float x) { return F{} + x; }
FORCE F load(const float* p) { F x; __builtin_memcpy(&x, p, 64); return x; }
FORCE void store(float* p, F x) { __builtin_memcpy(p, &x, 64); }
FORCE F add(F a, F b) { return a + b; }
FORCE F sub(F a, F b) { return a - b; }
FORCE F mul(F a, F b) { return a * b; }
FORCE F fma(F a, F b, F c) {
#ifdef __FP_FAST_FMAF
    for (int i = 0; i < 16; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#else
    return a * b + c;
#endif
}
FORCE F div(F a, F b) { return a / b; }
FORCE F max(F a, F b) { return a > b ? a : b; }
FORCE F min(F a, F b) { return a < b ? a : b; }
FORCE float half_to_float(uint16_t h) {
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    const uint32_t magnitude = h & 0x7fffu;
    float value;
    uint32_t raw = magnitude << 13;
    __builtin_memcpy(&value, &raw, 4);
    value *= 0x1p112f;  // rebias the exponent; subnormals come out right
    if (magnitude >= 0x7c00u) {
        raw = (magnitude << 13) | 0x7f800000u;
        __builtin_memcpy(&value, &raw, 4);
    }
    uint32_t out;
    __builtin_memcpy(&out, &value, 4);
    out |= sign;
    __builtin_memcpy(&value, &out, 4);
    return value;
}
FORCE F from_fp16(const uint16_t* p) {
    F x;
    for (int i = 0; i < 16; ++i) x[i] = half_to_float(p[i]);
    return x;
}
FORCE F to_float(I x) { return __builtin_convertvector(x, F); }
FORCE I round(F x) {  // to nearest even; |x| < 2^22 here
    const F magic = set1(12582912.0f);
    const F shifted = x + magic;
    return reinterpret_cast<I>(shifted) - reinterpret_cast<I>(magic);
}
FORCE I izero() { return I{}; }
FORCE I iset1(int32_t x) { return I{} + x; }
FORCE I iload(const void* p) { I x; __builtin_memcpy(&x, p, 64); return x; }
FORCE void istore(void* p, I x) { __builtin_memcpy(p, &x, 64); }
FORCE I iadd(I a, I b) { return a + b; }
FORCE I iand(I a, I b) { return a & b; }
FORCE I imax(I a, I b) { return a > b ? a : b; }
template <int N> FORCE I shift_left(I a) { return reinterpret_cast<I>(reinterpret_cast<U>(a) << N); }
template <int N> FORCE I shift_right(I a) { return reinterpret_cast<I>(reinterpret_cast<U>(a) >> N); }
template <int N> FORCE I shift_right16(I a) {
    return reinterpret_cast<I>(reinterpret_cast<UH>(a) >> N);
}
FORCE I madd16(I a, I b) {
    const I low = (reinterpret_cast<I>(reinterpret_cast<U>(a) << 16) >> 16) *
                  (reinterpret_cast<I>(reinterpret_cast<U>(b) << 16) >> 16);
    return low + (a >> 16) * (b >> 16);
}
FORCE I bits(F x) { return reinterpret_cast<I>(x); }
FORCE F floats(I x) { return reinterpret_cast<F>(x); }
FORCE F keep(F x, int low, int high, F fill) {
    for (int i = 0; i < 16; ++i) {
        if (i >= low && i < high) fill[i] = x[i];
    }
    return fill;
}
FORCE F select_nan(F x, F otherwise) { return x == x ? x : otherwise; }
FORCE void store_low16(uint16_t* p, I x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<uint16_t>(x[i]);
}
FORCE void store_low8(int8_t* p, I x) {
    for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(x[i]);
}
FORCE I widen8(const int8_t* p) {
    I x;
    for (int i = 0; i < 16; ++i) x[i] = p[i];
    return x;
}
FORCE F bf16_to_float(const uint16_t* p) {
    U raw;
    for (int i = 0; i < 16; ++i) raw[i] = static_cast<uint32_t>(p[i]) << 16;
    return reinterpret_cast<F>(raw);
}
template <int N> FORCE F swap_lanes(F x) {
    F y;
    for (int i = 0; i < 16; ++i) y[i] = x[i ^ N];
    return y;
}
FORCE float first_lane(F x) { return x[0]; }
FORCE float reduce_add(F x) {
    for (int width = 8; width > 0; width /= 2) {
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
    }
    return x[0];
}
FORCE float reduce_max(F x) {
    float best = x[0];
    for (int i = 1; i < 16; ++i) best = x[i] > best ? x[i] : best;
    return best;
}
FORCE int32_t reduce_imax(I x) {
    int32_t best = x[0];
    for (int i = 1; i < 16; ++i) best = x[i] > best ? x[i] : best;
    return best;
}
FORCE int32_t reduce_iadd(I x) {
    int32_t sum = 0;
    for (int i = 0; i < 16; ++i) sum += x[i];
    return sum;
}
FORCE void prefetch(const void* p) { __builtin_prefetch(p); }
FORCE void prefetch2(const void* p) { __builtin_prefetch(p, 0, 2); }

#endif

// Lane i gets x[i] + x[i + N] where bit N of i is clear, x[i - N] - x[i] where it is set.
template <int N> FORCE F butterfly(F x) {
    alignas(64) static const float signs[2][16] = {
        {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1},
        {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1}};
    alignas(64) static const float wide_signs[2][16] = {
        {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1},
        {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1}};
    const float* sign = N <= 2 ? signs[N - 1] : wide_signs[N / 8];
    return fma(x, load(sign), swap_lanes<N>(x));
}
FORCE F absolute(F x) { return floats(iand(bits(x), iset1(0x7fffffff))); }
FORCE void fetch_to_write(const void* p) { __builtin_prefetch(p, 1, 3); }
FORCE int32_t load32(const void* p) { int32_t x; __builtin_memcpy(&x, p, 4); return x; }

// The bits of bf16(x), rounded to nearest even, in the low half of each lane; NaN stays NaN.
FORCE I to_bf16(F x) {
    const F safe = select_nan(x, floats(iset1(0x7fc00000)));
    const I raw = bits(safe);
    const I odd = iand(shift_right<16>(raw), iset1(1));
    // A quiet NaN of ours has a zero low half, so the rounding cannot carry it over.
    return shift_right<16>(iadd(iadd(raw, iset1(0x7fff)), odd));
}
FORCE void store_bf16(uint16_t* p, F x) { store_low16(p, to_bf16(x)); }

// acc + w.low * x.low + w.high * x.high with bf16 halves; `w` 16 lanes of pairs, `x` one pair.
FORCE F dot_bf16(F acc, const void* w, int32_t x) {
#if MIRROR_SET == 3
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(iload(w)),
                            reinterpret_cast<__m512bh>(iset1(x)));
#else
    const I lines = iload(w);
    const I pair = iset1(x);
    const I high = iset1(static_cast<int32_t>(0xffff0000u));
    acc = fma(floats(iand(lines, high)), floats(iand(pair, high)), acc);
    return fma(floats(shift_left<16>(lines)), floats(shift_left<16>(pair)), acc);
#endif
}
FORCE F dot_fp32(F acc, const void* w, int32_t x) {
    return fma(load(static_cast<const float*>(w)), floats(iset1(x)), acc);
}

// 2^x with x held within [-126, 127]; NaN stays NaN. Cody-Waite with the minimax polynomial of 2^f on
// [-0.5, 0.5], relative error below 2e-7.
FORCE F exp2(F x) {
    // The number is the second operand: x86 returns that one when either is NaN.
    const F clamped = min(set1(127.0f), max(set1(-126.0f), x));
    const I whole = round(clamped);
    const F f = sub(clamped, to_float(whole));
    F p = set1(1.5403530e-4f);
    p = fma(p, f, set1(1.3333558e-3f));
    p = fma(p, f, set1(9.6181291e-3f));
    p = fma(p, f, set1(5.5504109e-2f));
    p = fma(p, f, set1(2.4022651e-1f));
    p = fma(p, f, set1(6.9314718e-1f));
    p = fma(p, f, set1(1.0f));
    return floats(iadd(bits(p), shift_left<23>(whole)));
}
