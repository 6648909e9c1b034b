// Compiled once for each instruction set; the loops over fixed lanes are what the compiler
// vectorises. Nothing of the standard library's templates may be used here (see the build).
#include "sampling_kernels.h"

#define MIRROR_JOINED(a, b) a##b
#define MIRROR_JOIN(a, b) MIRROR_JOINED(a, b)
#define MIRROR_TEXT_(a) #a
#define MIRROR_TEXT(a) MIRROR_TEXT_(a)

namespace mirror {
namespace {

size_t length_of_block(size_t vocab, size_t first) {
    return vocab - first < kBlock ? vocab - first : kBlock;
}

// A block of which fewer tokens exist is filled up with -inf, which never wins anything.
const float* whole_block(const float* block, size_t count, float* filled) {
    if (count == kBlock) return block;
    for (size_t i = 0; i < kBlock; ++i) filled[i] = i < count ? block[i] : -__builtin_inff();
    return filled;
}

bool block_maxima(const float* row, size_t vocab, float* maxima) {
    uint32_t largest = 0;
    for (size_t first = 0; first < vocab; first += kBlock) {
        float filled[kBlock];
        const float* block = whole_block(row + first, length_of_block(vocab, first), filled);
        uint32_t bits[kBlock];
        __builtin_memcpy(bits, block, sizeof bits);
        // As integers floats compare alike once negative ones are turned round, and maxima of
        // integers vectorise without leave to reorder floating-point arithmetic.
        int32_t best = INT32_MIN;
        for (size_t i = 0; i < kBlock; ++i) {
            const int32_t value = static_cast<int32_t>(bits[i]);
            const int32_t key = value ^ ((value >> 31) & 0x7fffffff);
            best = key > best ? key : best;
            const uint32_t magnitude = bits[i] << 1;
            largest = magnitude > largest ? magnitude : largest;
        }
        const int32_t value = best ^ ((best >> 31) & 0x7fffffff);
        __builtin_memcpy(&maxima[first / kBlock], &value, sizeof value);
    }
    return largest > 0xff000000u;
}

double sum_of_weights(const float* row, size_t vocab, Scale scale, double peak) {
    constexpr size_t lanes = 8;
    double sums[lanes] = {};
    for (size_t first = 0; first < vocab; first += kBlock) {
        float filled[kBlock];
        const float* block = whole_block(row + first, length_of_block(vocab, first), filled);
        double weights[kBlock];
        for (size_t i = 0; i < kBlock; ++i) {
            weights[i] = exp_of_nonpositive(score_of(scale, block[i]) - peak);
        }
        for (size_t i = 0; i < kBlock; i += lanes) {
            for (size_t lane = 0; lane < lanes; ++lane) sums[lane] += weights[i + lane];
        }
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Flags of 0 or 1, eight at a time: the product collects the lowest bits of bytes in the top one.
uint64_t mask_of(const uint8_t* flags) {
    uint64_t mask = 0;
    for (size_t i = 0; i < kBlock; i += 8) {
        uint64_t bytes;
        __builtin_memcpy(&bytes, flags + i, sizeof bytes);
        mask |= ((bytes * 0x0102040810204080) >> 56) << i;
    }
    return mask;
}

uint64_t scores_at_least(const float* block, size_t count, Scale scale, double threshold,
                         double* scores) {
    float filled[kBlock];
    const float* x = whole_block(block, count, filled);
    uint8_t flags[kBlock];
    for (size_t i = 0; i < kBlock; ++i) scores[i] = score_of(scale, x[i]);
    for (size_t i = 0; i < kBlock; ++i) flags[i] = scores[i] >= threshold;
    const uint64_t mask = mask_of(flags);
    return count == kBlock ? mask : mask & ((uint64_t{1} << count) - 1);
}

void philox_of_block(PhiloxKey key, uint32_t position, uint32_t first, uint32_t* words) {
    constexpr size_t quads = kBlock / 4;
    uint32_t c0[quads], c1[quads], c2[quads], c3[quads];
    for (size_t i = 0; i < quads; ++i) {
        c0[i] = position;
        c1[i] = first / 4 + static_cast<uint32_t>(i);
        c2[i] = 0;
        c3[i] = 0;
    }
    for (int round = 0; round < 10; ++round) {
        for (size_t i = 0; i < quads; ++i) {
            const uint64_t p0 = uint64_t{c0[i]} * kPhiloxM0, p1 = uint64_t{c2[i]} * kPhiloxM1;
            c0[i] = static_cast<uint32_t>(p1 >> 32) ^ c1[i] ^ key.low;
            c1[i] = static_cast<uint32_t>(p1);
            c2[i] = static_cast<uint32_t>(p0 >> 32) ^ c3[i] ^ key.high;
            c3[i] = static_cast<uint32_t>(p0);
        }
        key.low += kPhiloxW0;
        key.high += kPhiloxW1;
    }
    for (size_t i = 0; i < quads; ++i) {
        words[4 * i] = c0[i];
        words[4 * i + 1] = c1[i];
        words[4 * i + 2] = c2[i];
        words[4 * i + 3] = c3[i];
    }
}

// Noise reaches g only if -log(u) <= exp(-g), and 1 - u <= -log(u). So a token can reach the lead
// only if 1 - u <= exp(score - lead), which is tested with a bound of exp that is a few percent
// too large: 2**(n + f) <= (1 + f) * 2**n, whose bits are n + f itself. The score is computed
// roughly and the slack covers that, and sums that tie with the lead only after they are rounded.
uint64_t may_reach(const float* block, size_t count, double temperature, double lead, PhiloxKey key,
                   uint32_t position, uint32_t first, uint32_t* words) {
    float filled[kBlock];
    const float* x = whole_block(block, count, filled);
    philox_of_block(key, position, first, words);
    const double magnitude = lead < 0 ? -lead : lead;
    const bool is_hot = temperature > 1e30;  // 1 / temperature is no normal float
    const double slack = 1e-3 + 1e-5 * magnitude + (is_hot ? 100.0 : 0.0);
    const float ratio = is_hot ? 0.0f : static_cast<float>(1.4426950408889634 / temperature);
    double base = (slack - lead) * 1.4426950408889634 + 127.0;
    base = base < 1e38 ? base : 1e38;  // of scores that large noise decides nothing
    base = base > -1e38 ? base : -1e38;
    const float shift = static_cast<float>(base);
    uint8_t flags[kBlock];
    for (size_t i = 0; i < kBlock; ++i) {
        float power = x[i] * ratio + shift;
        power = power > 1.0f ? power : 1.0f;
        power = power < 128.0f ? power : 128.0f;
        const int32_t bits = static_cast<int32_t>(power * 8388608.0f);
        float bound;
        __builtin_memcpy(&bound, &bits, sizeof bound);
        const int32_t below_one = static_cast<int32_t>(~words[i] >> 1);
        flags[i] = static_cast<float>(below_one) * 0x1p-31f <= bound;
    }
    const uint64_t mask = mask_of(flags);
    return count == kBlock ? mask : mask & ((uint64_t{1} << count) - 1);
}

const SamplingKernels table = {
    MIRROR_TEXT(MIRROR_ISA), block_maxima, sum_of_weights, scores_at_least, may_reach,
};

}  // namespace

const SamplingKernels& MIRROR_JOIN(sampling_kernels_, MIRROR_ISA)() { return table; }

}  // namespace mirror
