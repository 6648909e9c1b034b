#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "decoder.h"

namespace mirror {
#if defined(__x86_64__)
namespace {

// Clang 14 does not know the name for __builtin_cpu_supports.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}

}  // namespace
#endif

const KernelTable& kernels_portable();
// A set that the compiler did not know is absent; see build_extension.py.
#ifdef MIRROR_HAVE_AVX2
const KernelTable& kernels_avx2();
#endif
#ifdef MIRROR_HAVE_AVX512
const KernelTable& kernels_avx512();
#endif
#ifdef MIRROR_HAVE_AVX512_VNNI
const KernelTable& kernels_avx512_vnni();
#endif

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
#if defined(__x86_64__)
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      has_f16c();
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq");
#ifdef MIRROR_HAVE_AVX512_VNNI
    if (avx512 && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
        names.emplace_back("avx512_vnni");
    }
#endif
#ifdef MIRROR_HAVE_AVX512
    if (avx512) names.emplace_back("avx512");
#endif
#ifdef MIRROR_HAVE_AVX2
    if (avx2) names.emplace_back("avx2");
#endif
    static_cast<void>(avx512);
#endif
    names.emplace_back("portable");
    return names;
}

const KernelTable& kernels_named(const std::string& name) {
    std::string known;
    for (const std::string& isa : available_isas()) {
        known += (known.empty() ? "" : ", ") + isa;
        if (isa != name) continue;
#ifdef MIRROR_HAVE_AVX512_VNNI
        if (name == "avx512_vnni") return kernels_avx512_vnni();
#endif
#ifdef MIRROR_HAVE_AVX512
        if (name == "avx512") return kernels_avx512();
#endif
#ifdef MIRROR_HAVE_AVX2
        if (name == "avx2") return kernels_avx2();
#endif
        return kernels_portable();
    }
    throw std::invalid_argument("instruction set '" + name + "' is not one of " + known);
}

}  // namespace mirror
