// How fast threads read memory together.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <sys/mman.h>

#include "decoder.h"

namespace nb = nanobind;

namespace {

// Best of `rounds` joint readings, each thread its own part of `bytes`, in GB/s. A round lasts from
// the first thread's begin to the last one's end, so that no thread is timed while others rest.
double read_bandwidth(int threads, size_t bytes, int rounds) {
    if (threads < 1 || threads > 1024 || bytes < (1u << 20) || rounds < 1) {
        throw std::invalid_argument("threads, bytes or rounds are out of range");
    }
    const nb::gil_scoped_release released;
    const mirror::KernelTable& kernels = mirror::kernels_named(mirror::available_isas().front());
    const size_t part = bytes / static_cast<size_t>(threads) / 4096 * 4096;
    const size_t huge = size_t{2} << 20;
    const size_t mapped = (part + 8192 + huge - 1) / huge * huge;
    using Clock = std::chrono::steady_clock;
    std::vector<Clock::time_point> begins(static_cast<size_t>(threads)), ends(begins);
    std::vector<void*> memory;
    for (int i = 0; i < threads; ++i) {
        void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (p == MAP_FAILED) throw std::bad_alloc();
        (void)madvise(p, mapped, MADV_HUGEPAGE);
        std::memset(p, i + 1, mapped);
        memory.push_back(p);
    }
    mirror::Team team(threads, mirror::usable_cores(threads));
    std::atomic<uint64_t> sink{0};
    double best = 1e9;
    for (int round = 0; round < rounds; ++round) {
        team.run([&](int thread) {
            const size_t at = static_cast<size_t>(thread);
            team.barrier({}, [] {});
            begins[at] = Clock::now();
            sink.fetch_add(kernels.read(static_cast<const uint8_t*>(memory[at]), part));
            ends[at] = Clock::now();
        });
        const std::chrono::duration<double> took = *std::max_element(ends.begin(), ends.end()) -
                                                   *std::min_element(begins.begin(), begins.end());
        best = std::min(best, took.count());
    }
    for (void* p : memory) munmap(p, mapped);
    return static_cast<double>(part) * threads / best / 1e9;
}

}  // namespace

void bind_bandwidth(nb::module_& m) {
    m.def("read_bandwidth", &read_bandwidth, nb::arg("threads"), nb::arg("bytes"),
          nb::arg("rounds") = 5, "GB/s that the threads read together, each its own part.");
}
