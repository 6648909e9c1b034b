// What the bindings of the decoder and of the draft head share: arrays and their checks, and callers
// taking turns.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <unistd.h>

#include "decoder.h"
#include "packing.h"

namespace mirror::bind {

namespace nb = nanobind;

template <typename T, size_t dimensions>
using Array = nb::ndarray<T, nb::ndim<dimensions>, nb::c_contig, nb::device::cpu>;
using Ints = Array<const int32_t, 1>;
using Floats = Array<const float, 1>;
using Rows = Array<float, 2>;
using Weights = Array<const float, 2>;
using Bytes = Array<const uint8_t, 1>;
using MutableBytes = Array<uint8_t, 1>;

Format format_named(const std::string& name);
CacheFormat cache_named(const std::string& name);

// numpy lets an array begin at any byte. Packed bytes hold scales of two.
template <typename Values>
void check_alignment(const Values& array, const char* what) {
    if (reinterpret_cast<uintptr_t>(array.data()) % alignof(int32_t) != 0) {
        throw std::invalid_argument(std::string(what) + " is not aligned");
    }
}

int length(const Ints& values, const char* what);
void check_block_size(int block_size);
// Dimensions as a caller gave them; throws std::invalid_argument.
Spec make_spec(int vocab_size, int hidden_size, int intermediate_size, int layers, int heads,
               int kv_heads, int head_dim, int max_context, float rms_eps, float rope_scale,
               Floats frequencies, const std::vector<int>& windows, const std::string& cache);
// Fills all of `batch` that a ragged batch says about tokens. `tables` keeps the tables alive.
void read_tokens(const Ints& token_ids, const Ints& positions, const Ints& offsets,
                 const nb::tuple& tables, Tokens& batch);

// A view of packed bytes, which the caller keeps alive.
Matrix matrix_view(const std::string& role, const Bytes& data, int outputs, int inputs,
                   float multiplier, const std::string& format);
// The vector, padded with zeros as its role wants it.
std::vector<float> vector_values(const std::string& role, const Floats& data);
// Of a layer, or none by that name.
Matrix* matrix_of(Layer& layer, const std::string& role);
std::vector<float>* vector_of(Layer& layer, const std::string& role);
void set_biases(Layer& layer);

// Callers from several threads take turns: the work is done without the GIL, on one team of threads.
class Turns {
public:
    std::unique_lock<std::mutex> take();

private:
    std::mutex mutex_;
    const pid_t process_ = getpid();
};

// Threads write the rows of a batch at the same time, so no two of its blocks that are written may be
// the same. What else may be wrong is left to the layers.
class WrittenBlocks {
public:
    void reset(int blocks, int block_size);
    // steps: [sequences] tokens that are drafted after a sequence's last one, or none.
    void check(const Tokens& batch, const int32_t* steps);

private:
    int block_size_ = 0;
    std::vector<uint32_t> written_;  // the last batch that writes each block
    uint32_t batches_ = 0;
};

}  // namespace mirror::bind
