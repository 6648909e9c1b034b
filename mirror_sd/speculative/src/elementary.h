// exp, log and Philox with one result on every machine: additions, multiplications and divisions
// only, each rounded by itself (the build forbids contraction). libm and numpy differ from these,
// and from CPU to CPU among themselves, in the last bit.
//
// Everything is `static`: the file is compiled for several instruction sets.
#pragma once

#include <cstdint>

namespace mirror {

static inline double from_bits(uint64_t bits) {
    double value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint64_t to_bits(double value) {
    uint64_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

static constexpr double kLn2High = 6.93147180369123816490e-01;  // 33 bits: its products are exact
static constexpr double kLn2Low = 1.90821492927058770002e-10;

// exp(x) for x <= 0 within 1 ulp; 0 below -708, where results are no longer normal.
static inline double exp_of_nonpositive(double x) {
    constexpr double shift = 0x1.8p52;  // adding it leaves the nearest integer in the low bits
    const double clamped = x < -708.0 ? -708.0 : x;
    const double shifted = clamped * 1.44269504088896338700e+00 + shift;
    const double k = shifted - shift;
    const double r = (clamped - k * kLn2High) - k * kLn2Low;
    // Taylor's series; |r| <= ln(2) / 2, so the first term left out is 4e-18.
    double p = 1.0 / 6227020800;
    p = p * r + 1.0 / 479001600;
    p = p * r + 1.0 / 39916800;
    p = p * r + 1.0 / 3628800;
    p = p * r + 1.0 / 362880;
    p = p * r + 1.0 / 40320;
    p = p * r + 1.0 / 5040;
    p = p * r + 1.0 / 720;
    p = p * r + 1.0 / 120;
    p = p * r + 1.0 / 24;
    p = p * r + 1.0 / 6;
    p = p * r + 0.5;
    const double power = from_bits((to_bits(shifted) << 52) + (uint64_t{1023} << 52));
    const double value = (1.0 + (r + r * r * p)) * power;
    return x < -708.0 ? 0.0 : value;
}

// log(x) for a positive normal x within 1 ulp.
static inline double log_of_positive(double x) {
    constexpr uint64_t sqrt_half = 0x3fe6a09e667f3bcd;
    constexpr uint64_t one = 0x3ff0000000000000;
    const uint64_t bits = to_bits(x) + (one - sqrt_half);
    const double k = static_cast<double>(static_cast<int64_t>(bits >> 52) - 1023);
    const double f = from_bits((bits & 0x000fffffffffffff) + sqrt_half) - 1.0;
    // log(1 + f) = 2 artanh(s), arranged so that f itself enters unrounded.
    const double s = f / (2.0 + f);
    const double z = s * s;
    double r = 2.0 / 21;
    r = r * z + 2.0 / 19;
    r = r * z + 2.0 / 17;
    r = r * z + 2.0 / 15;
    r = r * z + 2.0 / 13;
    r = r * z + 2.0 / 11;
    r = r * z + 2.0 / 9;
    r = r * z + 2.0 / 7;
    r = r * z + 2.0 / 5;
    r = r * z + 2.0 / 3;
    r = r * z;
    const double half = 0.5 * f * f;
    return k * kLn2High - ((half - (s * (half + r) + k * kLn2Low)) - f);
}

// Philox 4x32-10 (Salmon, Moraes, Dror, Shaw, SC 2011).
static constexpr uint32_t kPhiloxM0 = 0xD2511F53, kPhiloxM1 = 0xCD9E8D57;
static constexpr uint32_t kPhiloxW0 = 0x9E3779B9, kPhiloxW1 = 0xBB67AE85;

struct PhiloxKey {
    uint32_t low, high;
};

static inline void philox(const uint32_t counter[4], PhiloxKey key, uint32_t words[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{c0} * kPhiloxM0, p1 = uint64_t{c2} * kPhiloxM1;
        c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ key.low;
        c1 = static_cast<uint32_t>(p1);
        c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ key.high;
        c3 = static_cast<uint32_t>(p0);
        key.low += kPhiloxW0;
        key.high += kPhiloxW1;
    }
    words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

// -log(-log(u)) with u = (word + 0.5) / 2**32: standard Gumbel noise of a uniform word.
static inline double gumbel_of(uint32_t word) {
    const double u = (static_cast<double>(word) + 0.5) / 4294967296.0;
    return -log_of_positive(-log_of_positive(u));
}

// The noise of one cell; see mirror_sd/philox.py.
static inline double gumbel(PhiloxKey key, uint32_t position, uint32_t token) {
    const uint32_t counter[4] = {position, token / 4, 0, 0};
    uint32_t words[4];
    philox(counter, key, words);
    return gumbel_of(words[token % 4]);
}

}  // namespace mirror
