// Python's face of the decoder: shapes and types are checked here, then the GIL is given up.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <thread>

#include <pthread.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include "decoder.h"
#include "packing.h"

namespace nb = nanobind;

namespace {

using Ints = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Weights = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using MutableBytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

mirror::Format format_named(const std::string& name) {
    if (name == "int8") return mirror::kInt8;
    if (name == "int16") return mirror::kInt16;
    if (name == "bf16") return mirror::kBf16;
    if (name == "fp32") return mirror::kFp32;
    if (name == "rotated") return mirror::kRotated;
    throw std::invalid_argument("format '" + name +
                                "' is not one of int8, int16, rotated, bf16, fp32");
}

mirror::CacheFormat cache_named(const std::string& name) {
    if (name == "bf16") return mirror::kCacheBf16;
    if (name == "fp32") return mirror::kCacheFp32;
    if (name == "int8") return mirror::kCacheInt8;
    throw std::invalid_argument("cache '" + name + "' is not one of bf16, fp32, int8");
}

// numpy lets an array begin at any byte. Packed bytes hold scales of two.
template <typename Array>
void check_alignment(const Array& array, const char* what) {
    if (reinterpret_cast<uintptr_t>(array.data()) % alignof(int32_t) != 0) {
        throw std::invalid_argument(std::string(what) + " is not aligned");
    }
}

// Keeps the arrays that matrices point into. Callers from several threads take turns: a forward runs
// without the GIL.
class NativeDecoder {
public:
    NativeDecoder(mirror::Spec spec, const std::string& isa, int threads,
                  const std::vector<int>& cores)
        : decoder_(std::move(spec), mirror::kernels_named(isa), threads, cores) {}

    void set_matrix(const std::string& role, int layer, Bytes data, int outputs, int inputs,
                    float multiplier, const std::string& format_name) {
        const mirror::Format format = format_named(format_name);
        if (outputs < 1 || inputs < 1) throw std::invalid_argument(role + " has no elements");
        check_alignment(data, "the packed array");
        const auto turn = take_turn();
        const size_t needed = mirror::packed_bytes(format, outputs, inputs);
        if (data.shape(0) != needed) {
            throw std::invalid_argument(role + ": " + std::to_string(data.shape(0)) +
                                        " packed bytes, expected " + std::to_string(needed));
        }
        sealed_ = false;
        mirror::Matrix& to = matrix(role, layer);
        to.strips = data.data();
        to.outputs = outputs;
        to.inputs = inputs;
        to.groups = (inputs + mirror::kGroup - 1) / mirror::kGroup;
        to.multiplier = multiplier;
        to.format = format;
        kept_.push_back(std::move(data));
    }

    void set_vector(const std::string& role, int layer, Floats data) {
        check_alignment(data, "the vector");
        const auto turn = take_turn();
        sealed_ = false;
        std::vector<float> values(data.data(), data.data() + data.shape(0));
        const bool bias = role == "qkv_bias" || role == "output_bias";
        const size_t multiple = bias ? mirror::kStrip : mirror::kGroup;
        if (role != "q_norm" && role != "k_norm") {
            values.resize((values.size() + multiple - 1) / multiple * multiple, 0.0f);
        }
        if (role == "final_norm") {
            decoder_.final_norm() = std::move(values);
            return;
        }
        mirror::Layer& of = layer_at(layer);
        if (role == "attention_norm") of.attention_norm = std::move(values);
        else if (role == "mlp_norm") of.mlp_norm = std::move(values);
        else if (role == "q_norm") of.q_norm = std::move(values);
        else if (role == "k_norm") of.k_norm = std::move(values);
        else if (role == "qkv_bias") of.qkv_bias = std::move(values);
        else if (role == "output_bias") of.output_bias = std::move(values);
        else throw std::invalid_argument("no vector has the role '" + role + "'");
    }

    // After the last weight: checks that all are there.
    void seal() {
        const auto turn = take_turn();
        decoder_.check_weights();
        for (int i = 0; i < decoder_.spec().layers; ++i) {
            mirror::Layer& layer = decoder_.layer(i);
            layer.qkv.bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data();
            layer.output.bias = layer.output_bias.empty() ? nullptr : layer.output_bias.data();
        }
        sealed_ = true;
    }

    size_t kv_bytes_per_block(int block_size) const {
        check_block_size(block_size);
        return decoder_.kv_bytes_per_block(block_size);
    }

    void allocate_kv(int blocks, int block_size) {
        check_block_size(block_size);
        const auto turn = take_turn();
        decoder_.allocate_kv(blocks, block_size);
        block_size_ = block_size;
        written_.assign(static_cast<size_t>(blocks), 0);
        batches_ = 0;
    }

    void forward(Ints token_ids, Ints positions, Ints offsets, nb::tuple tables, Ints logit_rows,
                 Rows logits, const std::vector<int>& taps, Rows features) {
        const auto turn = take_turn();
        if (!sealed_) throw std::invalid_argument("the weights are not complete");
        mirror::Batch batch;
        batch.token_ids = token_ids.data();
        batch.positions = positions.data();
        batch.offsets = offsets.data();
        batch.logit_rows = logit_rows.data();
        batch.tokens = length(token_ids, "token_ids");
        batch.rows = length(logit_rows, "logit_rows");
        length(positions, "positions");
        length(offsets, "sequence_offsets");
        check_alignment(logits, "logits");
        if (batch.tokens == 0 || positions.shape(0) != token_ids.shape(0)) {
            throw std::invalid_argument(std::to_string(token_ids.shape(0)) + " token ids with " +
                                        std::to_string(positions.shape(0)) + " positions");
        }
        if (offsets.shape(0) != nb::len(tables) + 1) {
            throw std::invalid_argument(std::to_string(offsets.shape(0)) + " offsets for " +
                                        std::to_string(nb::len(tables)) + " block tables");
        }
        const size_t vocab = static_cast<size_t>(decoder_.spec().vocab_size);
        if (logits.shape(0) < logit_rows.shape(0) || logits.shape(1) != vocab) {
            throw std::invalid_argument("logits has the wrong shape");
        }
        set_taps(batch, taps, features);
        for (nb::handle item : tables) {  // the tuple keeps them alive
            Ints table;
            if (!nb::try_cast(item, table, false)) {
                throw nb::type_error("a block table is not a contiguous int32 array");
            }
            batch.tables.push_back(table.data());
            batch.table_lengths.push_back(length(table, "block table"));
        }
        check_written_blocks(batch);
        {
            const nb::gil_scoped_release released;
            decoder_.forward(batch, logits.data());
        }
    }

    std::string isa() const { return decoder_.kernels().name; }
    int threads() const { return decoder_.team()->size(); }

private:
    std::unique_lock<std::mutex> take_turn() {
        std::unique_lock<std::mutex> turn(turn_, std::defer_lock);
        if (process_ == getpid()) {
            const nb::gil_scoped_release released;
            turn.lock();
        } else if (!turn.try_lock()) {  // whoever holds it is not in this process
            throw std::runtime_error("forked in the middle of a forward: make the decoder in the "
                                     "process that uses it");
        }
        return turn;
    }

    static void check_block_size(int block_size) {
        if (block_size < 1 || block_size > 1 << 16) {
            throw std::invalid_argument("a block of " + std::to_string(block_size) +
                                        " tokens; it must hold 1 to 65536");
        }
    }

    static int length(const Ints& values, const char* what) {
        check_alignment(values, what);
        if (values.shape(0) > 1u << 24) {
            throw std::invalid_argument(std::string(what) + " is too long");
        }
        return static_cast<int>(values.shape(0));
    }

    void set_taps(mirror::Batch& batch, const std::vector<int>& taps, const Rows& features) const {
        if (taps.empty()) return;
        const size_t width = static_cast<size_t>(decoder_.spec().hidden_size) * taps.size();
        if (!features.is_valid() || features.shape(1) != width ||
            features.shape(0) < static_cast<size_t>(batch.tokens)) {
            throw std::invalid_argument("features has the wrong shape");
        }
        check_alignment(features, "features");
        batch.taps = taps;
        batch.features = features.data();
    }

    // Threads write the rows of a batch at the same time, so no two of its blocks that are written may
    // be the same. What else may be wrong is left to the decoder.
    void check_written_blocks(const mirror::Batch& batch) {
        if (block_size_ == 0) return;
        if (++batches_ == 0) {
            std::fill(written_.begin(), written_.end(), 0);
            batches_ = 1;
        }
        for (size_t i = 0; i < batch.tables.size(); ++i) {
            const int begin = batch.offsets[i], end = batch.offsets[i + 1];
            if (begin < 0 || end <= begin || end > batch.tokens) return;
            const int first = batch.positions[begin], last = batch.positions[end - 1];
            if (first < 0 || last < first || last / block_size_ >= batch.table_lengths[i]) return;
            for (int at = first / block_size_; at <= last / block_size_; ++at) {
                const int block = batch.tables[i][at];
                if (block < 0 || static_cast<size_t>(block) >= written_.size()) return;
                uint32_t& mark = written_[static_cast<size_t>(block)];
                if (mark == batches_) {
                    throw std::invalid_argument("block " + std::to_string(block) +
                                                " would be written at two places");
                }
                mark = batches_;
            }
        }
    }

    mirror::Layer& layer_at(int layer) {
        if (layer < 0 || layer >= decoder_.spec().layers) {
            throw std::invalid_argument("layer " + std::to_string(layer) + " is outside 0.." +
                                        std::to_string(decoder_.spec().layers - 1));
        }
        return decoder_.layer(layer);
    }

    mirror::Matrix& matrix(const std::string& role, int layer) {
        if (role == "embedding") return decoder_.embedding();
        if (role == "head") return decoder_.head();
        mirror::Layer& of = layer_at(layer);
        if (role == "qkv") return of.qkv;
        if (role == "output") return of.output;
        if (role == "gate_up") return of.gate_up;
        if (role == "down") return of.down;
        throw std::invalid_argument("no matrix has the role '" + role + "'");
    }

    mirror::Decoder decoder_;
    std::vector<Bytes> kept_;
    int block_size_ = 0;
    std::vector<uint32_t> written_;  // the last batch that writes each block
    uint32_t batches_ = 0;
    std::mutex turn_;
    const pid_t process_ = getpid();
    bool sealed_ = false;
};

mirror::Spec make_spec(int vocab_size, int hidden_size, int intermediate_size, int layers,
                       int heads, int kv_heads, int head_dim, int max_context, float rms_eps,
                       float rope_scale, Floats frequencies, const std::vector<int>& windows,
                       const std::string& cache) {
    const int sizes[] = {vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads,
                         head_dim, max_context};
    check_alignment(frequencies, "frequencies");
    for (int size : sizes) {
        if (size < 1 || size > 1 << 24) {
            throw std::invalid_argument("a dimension of " + std::to_string(size) +
                                        " is outside 1..2^24");
        }
    }
    if (static_cast<int64_t>(heads) * head_dim > 1 << 24) {
        throw std::invalid_argument("the heads together are wider than 2^24");
    }
    if (heads % kv_heads != 0 || head_dim % 2 != 0 || head_dim > 512) {
        throw std::invalid_argument("heads must divide evenly over KV heads, and the head dimension "
                                    "be even and at most 512");
    }
    if (frequencies.shape(0) != static_cast<size_t>(head_dim / 2) ||
        windows.size() != static_cast<size_t>(layers)) {
        throw std::invalid_argument("frequencies or windows have the wrong length");
    }
    for (int window : windows) {
        if (window < 0) throw std::invalid_argument("a window is negative");
    }
    return {vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads, head_dim,
            max_context, rms_eps, rope_scale,
            std::vector<float>(frequencies.data(), frequencies.data() + frequencies.shape(0)),
            windows, cache_named(cache)};
}

float pack(Weights weights, const std::string& format, int threads, MutableBytes out) {
    const int outputs = static_cast<int>(weights.shape(0));
    const int inputs = static_cast<int>(weights.shape(1));
    const mirror::Format kind = format_named(format);
    check_alignment(weights, "weights");
    check_alignment(out, "the packed array");
    if (outputs < 1 || inputs < 1 || out.shape(0) != mirror::packed_bytes(kind, outputs, inputs)) {
        throw std::invalid_argument("the packed array has the wrong size");
    }
    const nb::gil_scoped_release released;
    return mirror::pack(kind, weights.data(), outputs, inputs, std::clamp(threads, 1, 256),
                        out.data());
}

size_t packed_bytes(const std::string& format, int outputs, int inputs) {
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a matrix has no elements");
    return mirror::packed_bytes(format_named(format), outputs, inputs);
}

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

void bind_decoder(nb::module_& m) {
    m.def("usable_cores", &mirror::usable_cores, nb::arg("threads"));
    m.def("available_isas", &mirror::available_isas,
          "Instruction sets of this build that this machine runs, best first.");
    m.def("pack", &pack, nb::arg("weights").noconvert(), nb::arg("format"), nb::arg("threads"),
          nb::arg("out").noconvert());
    m.def("packed_bytes", &packed_bytes, nb::arg("format"), nb::arg("outputs"), nb::arg("inputs"));
    m.def("read_bandwidth", &read_bandwidth, nb::arg("threads"), nb::arg("bytes"),
          nb::arg("rounds") = 5, "GB/s that the threads read together, each its own part.");
    nb::class_<NativeDecoder>(m, "Decoder")
        .def("__init__",
             [](NativeDecoder* self, int vocab_size, int hidden_size, int intermediate_size,
                int layers, int heads, int kv_heads, int head_dim, int max_context, float rms_eps,
                float rope_scale, Floats frequencies, const std::vector<int>& windows,
                const std::string& cache, const std::string& isa, int threads,
                const std::vector<int>& cores) {
                 if (threads < 1 || threads > 1024) {
                     throw std::invalid_argument("threads is outside 1..1024");
                 }
                 new (self) NativeDecoder(
                     make_spec(vocab_size, hidden_size, intermediate_size, layers, heads, kv_heads,
                               head_dim, max_context, rms_eps, rope_scale, frequencies, windows,
                               cache),
                     isa, threads, cores);
             },
             nb::kw_only(), nb::arg("vocab_size"), nb::arg("hidden_size"),
             nb::arg("intermediate_size"), nb::arg("layers"), nb::arg("heads"),
             nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("max_context"), nb::arg("rms_eps"),
             nb::arg("rope_scale"), nb::arg("frequencies").noconvert(), nb::arg("windows"),
             nb::arg("cache"), nb::arg("isa"), nb::arg("threads"), nb::arg("cores"))
        .def("set_matrix", &NativeDecoder::set_matrix, nb::arg("role"), nb::arg("layer"),
             nb::arg("data").noconvert(), nb::arg("outputs"), nb::arg("inputs"),
             nb::arg("multiplier"), nb::arg("format"))
        .def("set_vector", &NativeDecoder::set_vector, nb::arg("role"), nb::arg("layer"),
             nb::arg("data").noconvert())
        .def("seal", &NativeDecoder::seal)
        .def("kv_bytes_per_block", &NativeDecoder::kv_bytes_per_block, nb::arg("block_size"))
        .def("allocate_kv", &NativeDecoder::allocate_kv, nb::arg("num_blocks"),
             nb::arg("block_size"))
        .def("forward", &NativeDecoder::forward, nb::arg("token_ids").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("sequence_offsets").noconvert(),
             nb::arg("block_tables"), nb::arg("logit_rows").noconvert(),
             nb::arg("logits").noconvert(), nb::arg("taps") = std::vector<int>(),
             nb::arg("features").noconvert().none() = nb::none())
        .def_prop_ro("isa", &NativeDecoder::isa)
        .def_prop_ro("threads", &NativeDecoder::threads);
}
