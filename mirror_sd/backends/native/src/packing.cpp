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

// One group of 32 weights as u8 with fp16 scale and minimum.
struct Group {
    uint16_t scale;
    uint16_t minimum;
    uint8_t values[kGroup];
    double error;
};

Group encode(const float* w, float scale, float minimum) {
    Group group{};
    group.scale = to_half(scale);
    group.minimum = to_half(minimum);
    const float step = from_half(group.scale), low = from_half(group.minimum);
    for (int i = 0; i < kGroup; ++i) {
        const float level = step > 0 ? std::nearbyint((w[i] - low) / step) : 0.0f;
        group.values[i] = static_cast<uint8_t>(std::clamp(level, 0.0f, 255.0f));
        const double miss = static_cast<double>(step) * group.values[i] + low - w[i];
        group.error += miss * miss;
    }
    return group;
}

// The better of two codes: the group's own range in 255 steps, which holds a group of 4 bits with a
// minimum (GGUF Q4_1) exactly since 15 divides 255, and a symmetric one, which holds Q8_0 exactly.
Group quantise(const float* w) {
    const auto [low, high] = std::minmax_element(w, w + kGroup);
    const Group ranged = encode(w, (*high - *low) / 255.0f, *low);
    const float step = std::max(std::fabs(*low), std::fabs(*high)) / 127.0f;
    const Group symmetric = encode(w, step, -128.0f * from_half(to_half(step)));
    return symmetric.error < ranged.error ? symmetric : ranged;
}

void hadamard(float* w) {
    for (int width = 1; width < kGroup; width *= 2) {
        for (int i = 0; i < kGroup; ++i) {
            if (i & width) continue;
            const float a = w[i], b = w[i + width];
            w[i] = a + b;
            w[i + width] = a - b;
        }
    }
}

// A group on a grid of 16 levels (GGUF Q4_0, Q4_1) has small integers for its transform.
bool encode_rotated_levels(const float* w, Group& group) {
    const auto [low, high] = std::minmax_element(w, w + kGroup);
    const float step = (*high - *low) / 15.0f;
    if (!(step > 0)) return false;
    float levels[kGroup], sum = 0;
    for (int i = 0; i < kGroup; ++i) {
        const float level = (w[i] - *low) / step;
        levels[i] = std::nearbyint(level);
        if (std::fabs(level - levels[i]) > 0.01f) return false;
        sum += levels[i];
    }
    const float middle = std::nearbyint(sum / kGroup);
    for (float& level : levels) level -= middle;
    hadamard(levels);
    for (int i = 0; i < kGroup; ++i) {
        if (std::fabs(levels[i]) > 127) return false;
        group.values[i] = static_cast<uint8_t>(levels[i] + 128);
    }
    group.scale = to_half(step / kGroup);
    group.minimum = to_half(*low + middle * step);
    return true;
}

// Codes of H w with the group's mean apart: w . x = scale * (codes . H x) + mean * sum(x).
Group quantise_rotated(const float* w) {
    Group group{};
    if (encode_rotated_levels(w, group)) return group;
    float rotated[kGroup];
    std::copy(w, w + kGroup, rotated);
    hadamard(rotated);
    group.minimum = to_half(rotated[0] / kGroup);
    rotated[0] -= kGroup * from_half(group.minimum);
    float largest = 0;
    for (float value : rotated) largest = std::max(largest, std::fabs(value));
    group.scale = to_half(largest / 127.0f / kGroup);
    const float step = from_half(group.scale) * kGroup;
    for (int i = 0; i < kGroup; ++i) {
        const float code = step > 0 ? std::nearbyint(rotated[i] / step) : 0.0f;
        group.values[i] = static_cast<uint8_t>(std::clamp(code, -127.0f, 127.0f) + 128);
    }
    return group;
}

// A power of two that brings the largest weight into [256, 512), the middle of fp16's range.
float multiplier_of(const float* weights, size_t count) {
    float largest = 0;
    for (size_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(weights[i]));
    if (largest == 0 || !std::isfinite(largest)) return 1.0f;
    return std::ldexp(1.0f, std::clamp(std::ilogb(largest) - 8, -120, 120));
}

void pack_u8(const float* group, size_t count, float inverse, bool rotated, int lane,
             uint8_t* out) {
    float w[kGroup] = {};
    for (size_t i = 0; i < count; ++i) w[i] = group[i] * inverse;
    if (!std::all_of(w, w + kGroup, [](float x) { return std::isfinite(x); })) {
        // No codes for these: the scale makes NaN of all the group.
        const uint16_t nan = to_half(std::nanf(""));
        std::memcpy(out + 512 + 2 * lane, &nan, 2);
        return;
    }
    const Group code = rotated ? quantise_rotated(w) : quantise(w);
    for (int i = 0; i < kGroup; ++i) out[i / 4 * 64 + lane * 4 + i % 4] = code.values[i];
    std::memcpy(out + 512 + 2 * lane, &code.scale, 2);
    std::memcpy(out + 544 + 2 * lane, &code.minimum, 2);
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

void unpack_row(const Matrix& matrix, int row, float* out) {
    const int lane = row % kStrip;
    const uint8_t* group =
        matrix.strips + static_cast<size_t>(row / kStrip) * matrix.strip_bytes();
    for (int i = 0; i < matrix.inputs; ++i) {
        const int j = i % kGroup;
        const uint8_t* at = group + static_cast<size_t>(i / kGroup) *
                                        strip_group_bytes(matrix.format);
        if (matrix.format == kFp32) {
            std::memcpy(out + i, at + j * 64 + lane * 4, 4);
        } else if (matrix.format == kBf16) {
            uint16_t value;
            std::memcpy(&value, at + j / 2 * 64 + lane * 4 + j % 2 * 2, 2);
            out[i] = float_of(static_cast<uint32_t>(value) << 16);
        } else {
            uint16_t scale, minimum;
            std::memcpy(&scale, at + 512 + 2 * lane, 2);
            std::memcpy(&minimum, at + 544 + 2 * lane, 2);
            const float value = from_half(scale) * at[j / 4 * 64 + lane * 4 + j % 4];
            out[i] = (value + from_half(minimum)) * matrix.multiplier;
        }
    }
}

}  // namespace mirror
