#include "packing.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <system_error>
#include <thread>
#include <vector>

namespace mirror {
namespace {

uint32_t bits_of(float x) {
    uint32_t raw;
    std::memcpy(&raw, &x, 4);
    return raw;
}

float float_of(uint32_t raw) {
    float x;
    std::memcpy(&x, &raw, 4);
    return x;
}

bool is_integer(Format format) {
    return format == kInt8 || format == kInt16 || format == kRotated;
}

float from_bf16(uint16_t value) { return float_of(static_cast<uint32_t>(value) << 16); }

// Half a group: 32 weights as bytes (codes plus 128) with a scale in fp16 and an offset in bf16.
struct Code {
    uint16_t scale;
    uint16_t offset;
    uint8_t values[kHalf];
    double error;
};

uint8_t clamped(float code) {
    return static_cast<uint8_t>(std::clamp(std::nearbyint(code), -127.0f, 127.0f) + 128);
}

Code encode(const float* w, float scale, float offset) {
    Code code{};
    code.scale = to_half(scale);
    code.offset = to_bf16(offset);
    const float step = from_half(code.scale), middle = from_bf16(code.offset);
    for (int i = 0; i < kHalf; ++i) {
        code.values[i] = clamped(step > 0 ? (w[i] - middle) / step : 0.0f);
        const double miss = static_cast<double>(step) * (code.values[i] - 128) + middle - w[i];
        code.error += miss * miss;
    }
    return code;
}

// The best of three codes: the half's own range in 254 steps; in 240, a multiple of the 15 of a GGUF
// Q4_1; and a symmetric one, which holds Q8_0 exactly.
Code quantise(const float* w) {
    const auto [low, high] = std::minmax_element(w, w + kHalf);
    const float range = *high - *low, middle = *low + range / 2;
    const Code ranged = encode(w, range / 254.0f, middle);
    const Code levels = encode(w, range / 240.0f, middle);
    const Code symmetric = encode(w, std::max(std::fabs(*low), std::fabs(*high)) / 127.0f, 0.0f);
    const Code& better = levels.error < ranged.error ? levels : ranged;
    return symmetric.error <= better.error ? symmetric : better;
}

void hadamard(float* w) {
    for (int width = 1; width < kHalf; width *= 2) {
        for (int i = 0; i < kHalf; ++i) {
            if (i & width) continue;
            const float a = w[i], b = w[i + width];
            w[i] = a + b;
            w[i + width] = a - b;
        }
    }
}

// Weights on a grid of 16 levels (GGUF Q4_0, Q4_1) have small integers for their transform.
bool encode_rotated_levels(const float* w, Code& code) {
    const auto [low, high] = std::minmax_element(w, w + kHalf);
    const float step = (*high - *low) / 15.0f;
    if (!(step > 0)) return false;
    float levels[kHalf], sum = 0;
    for (int i = 0; i < kHalf; ++i) {
        const float level = (w[i] - *low) / step;
        levels[i] = std::nearbyint(level);
        if (std::fabs(level - levels[i]) > 0.01f) return false;
        sum += levels[i];
    }
    const float middle = std::nearbyint(sum / kHalf);
    for (float& level : levels) level -= middle;
    hadamard(levels);
    for (int i = 0; i < kHalf; ++i) {
        if (std::fabs(levels[i]) > 127) return false;
        code.values[i] = static_cast<uint8_t>(levels[i] + 128);
    }
    code.scale = to_half(step / kHalf);
    code.offset = to_bf16(*low + middle * step);
    return true;
}

// Codes of H w with the mean apart: w . x = scale * (codes . H x) + mean * sum(x).
Code quantise_rotated(const float* w) {
    Code code{};
    if (encode_rotated_levels(w, code)) return code;
    float rotated[kHalf];
    std::copy(w, w + kHalf, rotated);
    hadamard(rotated);
    code.offset = to_bf16(rotated[0] / kHalf);
    rotated[0] -= kHalf * from_bf16(code.offset);
    float largest = 0;
    for (float value : rotated) largest = std::max(largest, std::fabs(value));
    code.scale = to_half(largest / 127.0f / kHalf);
    const float step = from_half(code.scale) * kHalf;
    for (int i = 0; i < kHalf; ++i) code.values[i] = clamped(step > 0 ? rotated[i] / step : 0.0f);
    return code;
}

// A power of two that brings the largest weight into [256, 512), the middle of fp16's range.
float multiplier_of(const float* weights, size_t count) {
    float largest = 0;
    for (size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(weights[i]));
    if (largest == 0 || !std::isfinite(largest)) return 1.0f;
    return std::ldexp(1.0f, std::clamp(std::ilogb(largest) - 8, -120, 120));
}

void pack_half(const float* w, bool rotated, int half, int lane, uint8_t* out) {
    uint8_t* scale = out + 1024 + 32 * half + 2 * lane;
    if (!std::all_of(w, w + kHalf, [](float x) { return std::isfinite(x); })) {
        // No codes for these: the scale makes NaN of all the group.
        const uint16_t nan = to_half(std::nanf(""));
        std::memcpy(scale, &nan, 2);
        return;
    }
    const Code code = rotated ? quantise_rotated(w) : quantise(w);
    uint8_t* lines = out + 512 * half + lane * 4;
    for (int i = 0; i < kHalf; ++i) lines[i / 4 * 64 + i % 4] = code.values[i];
    std::memcpy(scale, &code.scale, 2);
    std::memcpy(out + 1088 + 4 * lane + 2 * half, &code.offset, 2);
}

void pack_u8(const float* group, size_t count, float inverse, bool rotated, int lane,
             uint8_t* out) {
    float w[kGroup] = {};
    for (size_t i = 0; i < count; ++i) w[i] = group[i] * inverse;
    pack_half(w, rotated, 0, lane, out);
    pack_half(w + kHalf, rotated, 1, lane, out);
}

void pack_group(Format format, const float* group, size_t count, float inverse, int lane,
                uint8_t* out) {
    if (is_integer(format)) return pack_u8(group, count, inverse, format == kRotated, lane, out);
    for (size_t i = 0; i < count; ++i) {
        if (format == kBf16) {
            const uint16_t value = to_bf16(group[i]);
            std::memcpy(out + i / 2 * 64 + static_cast<size_t>(lane) * 4 + i % 2 * 2, &value, 2);
        } else {
            std::memcpy(out + i * 64 + static_cast<size_t>(lane) * 4, group + i, 4);
        }
    }
}

}  // namespace

uint16_t to_bf16(float x) {
    const uint32_t raw = bits_of(x);
    if (std::isnan(x)) return 0x7fc0;
    return static_cast<uint16_t>((raw + 0x7fff + ((raw >> 16) & 1)) >> 16);
}

float from_half(uint16_t h) {
    const uint32_t magnitude = h & 0x7fffu;
    const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
    if (magnitude >= 0x7c00u) return float_of((magnitude << 13) | 0x7f800000u | sign);
    return float_of(bits_of(float_of(magnitude << 13) * 0x1p112f) | sign);
}

uint16_t to_half(float x) {
    const uint16_t sign = static_cast<uint16_t>((bits_of(x) >> 16) & 0x8000u);
    const float magnitude = std::fabs(x);
    if (!(magnitude < 65520.0f)) return static_cast<uint16_t>(sign | 0x7c00u | (x != x));
    if (magnitude < 0x1p-14f) {  // subnormal: a multiple of 2^-24
        return static_cast<uint16_t>(sign | static_cast<int>(std::nearbyint(magnitude * 0x1p24f)));
    }
    const uint32_t raw = bits_of(magnitude);
    const uint32_t rounded = raw + 0xfff + ((raw >> 13) & 1);
    return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

size_t packed_bytes(Format format, int outputs, int inputs) {
    const size_t strips = static_cast<size_t>((outputs + kStrip - 1) / kStrip);
    const size_t groups = static_cast<size_t>((inputs + kGroup - 1) / kGroup);
    return strips * groups * strip_group_bytes(format);
}

float pack(Format format, const float* weights, int outputs, int inputs, int threads,
           uint8_t* out) {
    const size_t width = static_cast<size_t>(inputs);
    const bool integer = is_integer(format);
    const float multiplier =
        integer ? multiplier_of(weights, static_cast<size_t>(outputs) * width) : 1.0f;
    const int groups = (inputs + kGroup - 1) / kGroup;
    const int strips = (outputs + kStrip - 1) / kStrip;
    const size_t group_bytes = strip_group_bytes(format);
    std::memset(out, 0, packed_bytes(format, outputs, inputs));
    auto work = [&](int begin, int end) {
        for (int row = begin * kStrip; row < std::min(end * kStrip, outputs); ++row) {
            uint8_t* strip = out + static_cast<size_t>(row / kStrip) * groups * group_bytes;
            for (int group = 0; group < groups; ++group) {
                const size_t first = static_cast<size_t>(group) * kGroup;
                pack_group(format, weights + static_cast<size_t>(row) * width + first,
                           std::min<size_t>(kGroup, width - first), 1.0f / multiplier,
                           row % kStrip, strip + static_cast<size_t>(group) * group_bytes);
            }
        }
    };
    std::vector<std::thread> team;
    int shared = 0;  // strips that are another thread's, from the first on
    try {
        for (int i = 1; i < threads; ++i) {
            const int end = static_cast<int>(static_cast<int64_t>(strips) * i / threads);
            team.emplace_back(work, shared, end);
            shared = end;
        }
    } catch (const std::system_error&) {
        // No more threads to be had; what they would have done is left to this one.
    }
    work(shared, strips);
    for (auto& thread : team) thread.join();
    return multiplier;
}

// The 32 weights of half a group of one output.
static void unpack_half(const Matrix& matrix, const uint8_t* group, int half, int lane, float* out) {
    uint16_t scale, offset;
    std::memcpy(&scale, group + 1024 + 32 * half + 2 * lane, 2);
    std::memcpy(&offset, group + 1088 + 4 * lane + 2 * half, 2);
    const uint8_t* lines = group + 512 * half + 4 * lane;
    for (int i = 0; i < kHalf; ++i) out[i] = static_cast<float>(lines[i / 4 * 64 + i % 4] - 128);
    if (matrix.format == kRotated) hadamard(out);  // its own inverse, but for the factor in the scale
    for (int i = 0; i < kHalf; ++i) {
        out[i] = (from_half(scale) * out[i] + from_bf16(offset)) * matrix.multiplier;
    }
}

void unpack_row(const Matrix& matrix, int row, float* out) {
    const int lane = row % kStrip;
    const size_t group_bytes = strip_group_bytes(matrix.format);
    const uint8_t* strip =
        matrix.strips + static_cast<size_t>(row / kStrip) * matrix.strip_bytes();
    for (int first = 0; first < matrix.inputs; first += kHalf) {
        const uint8_t* group = strip + static_cast<size_t>(first / kGroup) * group_bytes;
        const int half = first / kHalf % 2;
        float values[kHalf];
        if (is_integer(matrix.format)) {
            unpack_half(matrix, group, half, lane, values);
        } else {
            for (int i = 0; i < kHalf; ++i) {
                const int j = half * kHalf + i;
                if (matrix.format == kFp32) {
                    std::memcpy(values + i, group + j * 64 + lane * 4, 4);
                } else {
                    uint16_t value;
                    std::memcpy(&value, group + j / 2 * 64 + lane * 4 + j % 2 * 2, 2);
                    values[i] = from_bf16(value);
                }
            }
        }
        std::copy(values, values + std::min(kHalf, matrix.inputs - first), out + first);
    }
}

}  // namespace mirror
