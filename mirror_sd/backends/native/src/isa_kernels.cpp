// Compiled once per instruction set with -DMIRROR_ISA=<name>; see build_extension.py.
//
// No header of the standard library that defines functions is included: an inline function compiled
// here with AVX-512 could be the one the linker keeps for everybody.
#include <cstddef>
#include <cstdint>

#include "kernels.h"

#define MIRROR_CONCAT_(a, b) a##b
#define MIRROR_CONCAT(a, b) MIRROR_CONCAT_(a, b)
#define MIRROR_STRING_(a) #a
#define MIRROR_STRING(a) MIRROR_STRING_(a)
#define FORCE static inline __attribute__((always_inline))

#if defined(__AVX512VNNI__) && defined(__AVX512BF16__)
#define MIRROR_SET 3
#elif defined(__AVX512BW__)
#define MIRROR_SET 2
#elif defined(__AVX2__)
#define MIRROR_SET 1
#else
#define MIRROR_SET 0
#endif
#if MIRROR_SET > 0
#include <immintrin.h>
#endif

namespace mirror {
namespace MIRROR_CONCAT(isa_, MIRROR_ISA) {

#include "vec.h"

#include "rows.h"

#include "linear.h"

#include "cache.h"

#include "attention.h"

// Without software prefetch: it only slows a pure stream down.
static uint64_t read(const uint8_t* p, size_t bytes) {
    I a = izero(), b = izero(), c = izero(), d = izero();
    for (size_t i = 0; i + 256 <= bytes; i += 256) {
        a = iadd(a, iload(p + i));
        b = iadd(b, iload(p + i + 64));
        c = iadd(c, iload(p + i + 128));
        d = iadd(d, iload(p + i + 192));
    }
    return static_cast<uint32_t>(reduce_iadd(iadd(iadd(a, b), iadd(c, d))));
}

static const KernelTable table = {
    MIRROR_STRING(MIRROR_ISA),
    {kRowBytes[0], kRowBytes[1], kRowBytes[2], kRowBytes[3], kRowBytes[4]},
    linear,
    refine,
    gate_up,
    normalise,
    quantise,
    attention,
    fold,
    rotate_head,
    store_units,
    store_kv,
    read,
};

}  // namespace

const KernelTable& MIRROR_CONCAT(kernels_, MIRROR_ISA)() {
    return MIRROR_CONCAT(isa_, MIRROR_ISA)::table;
}

}  // namespace mirror
