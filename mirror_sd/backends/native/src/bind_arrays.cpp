#include "bind_arrays.h"

#include <algorithm>

namespace mirror::bind {

Format format_named(const std::string& name) {
    if (name == "int8") return kInt8;
    if (name == "int16") return kInt16;
    if (name == "bf16") return kBf16;
    if (name == "fp32") return kFp32;
    if (name == "rotated") return kRotated;
    throw std::invalid_argument("format '" + name +
                                "' is not one of int8, int16, rotated, bf16, fp32");
}

CacheFormat cache_named(const std::string& name) {
    if (name == "bf16") return kCacheBf16;
    if (name == "fp32") return kCacheFp32;
    if (name == "int8") return kCacheInt8;
    throw std::invalid_argument("cache '" + name + "' is not one of bf16, fp32, int8");
}

int length(const Ints& values, const char* what) {
    check_alignment(values, what);
    if (values.shape(0) > 1u << 24) {
        throw std::invalid_argument(std::string(what) + " is too long");
    }
    return static_cast<int>(values.shape(0));
}

void check_block_size(int block_size) {
    if (block_size < 1 || block_size > 1 << 16) {
        throw std::invalid_argument("a block of " + std::to_string(block_size) +
                                    " tokens; it must hold 1 to 65536");
    }
}

Spec make_spec(int vocab_size, int hidden_size, int intermediate_size, int layers,
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

void read_tokens(const Ints& token_ids, const Ints& positions, const Ints& offsets,
                 const nb::tuple& tables, Tokens& batch) {
    batch.token_ids = token_ids.data();
    batch.positions = positions.data();
    batch.offsets = offsets.data();
    batch.tokens = length(token_ids, "token_ids");
    length(positions, "positions");
    length(offsets, "sequence_offsets");
    if (batch.tokens == 0 || positions.shape(0) != token_ids.shape(0)) {
        throw std::invalid_argument(std::to_string(token_ids.shape(0)) + " token ids with " +
                                    std::to_string(positions.shape(0)) + " positions");
    }
    if (offsets.shape(0) != nb::len(tables) + 1) {
        throw std::invalid_argument(std::to_string(offsets.shape(0)) + " offsets for " +
                                    std::to_string(nb::len(tables)) + " block tables");
    }
    for (nb::handle item : tables) {
        Ints table;
        if (!nb::try_cast(item, table, false)) {
            throw nb::type_error("a block table is not a contiguous int32 array");
        }
        batch.tables.push_back(table.data());
        batch.table_lengths.push_back(length(table, "block table"));
    }
}

Matrix matrix_view(const std::string& role, const Bytes& data, int outputs, int inputs,
                   float multiplier, const std::string& format_name) {
    const Format format = format_named(format_name);
    if (outputs < 1 || inputs < 1) throw std::invalid_argument(role + " has no elements");
    check_alignment(data, "the packed array");
    const size_t needed = packed_bytes(format, outputs, inputs);
    if (data.shape(0) != needed) {
        throw std::invalid_argument(role + ": " + std::to_string(data.shape(0)) +
                                    " packed bytes, expected " + std::to_string(needed));
    }
    Matrix view;
    view.strips = data.data();
    view.outputs = outputs;
    view.inputs = inputs;
    view.groups = (inputs + kGroup - 1) / kGroup;
    view.multiplier = multiplier;
    view.format = format;
    return view;
}

std::vector<float> vector_values(const std::string& role, const Floats& data) {
    check_alignment(data, "the vector");
    std::vector<float> values(data.data(), data.data() + data.shape(0));
    if (role == "q_norm" || role == "k_norm") return values;
    const bool bias = role == "qkv_bias" || role == "output_bias";
    const size_t multiple = bias ? kStrip : kGroup;
    values.resize((values.size() + multiple - 1) / multiple * multiple, 0.0f);
    return values;
}

Matrix* matrix_of(Layer& layer, const std::string& role) {
    if (role == "qkv") return &layer.qkv;
    if (role == "output") return &layer.output;
    if (role == "gate_up") return &layer.gate_up;
    if (role == "down") return &layer.down;
    return nullptr;
}

std::vector<float>* vector_of(Layer& layer, const std::string& role) {
    if (role == "attention_norm") return &layer.attention_norm;
    if (role == "mlp_norm") return &layer.mlp_norm;
    if (role == "q_norm") return &layer.q_norm;
    if (role == "k_norm") return &layer.k_norm;
    if (role == "qkv_bias") return &layer.qkv_bias;
    if (role == "output_bias") return &layer.output_bias;
    return nullptr;
}

void set_biases(Layer& layer) {
    layer.qkv.bias = layer.qkv_bias.empty() ? nullptr : layer.qkv_bias.data();
    layer.output.bias = layer.output_bias.empty() ? nullptr : layer.output_bias.data();
}

std::unique_lock<std::mutex> Turns::take() {
    std::unique_lock<std::mutex> turn(mutex_, std::defer_lock);
    if (process_ == getpid()) {
        const nb::gil_scoped_release released;
        turn.lock();
    } else if (!turn.try_lock()) {  // whoever holds it is not in this process
        throw std::runtime_error("forked in the middle of a forward: make the decoder in the "
                                 "process that uses it");
    }
    return turn;
}

void WrittenBlocks::reset(int blocks, int block_size) {
    block_size_ = block_size;
    written_.assign(static_cast<size_t>(blocks), 0);
    batches_ = 0;
}

void WrittenBlocks::check(const Tokens& batch, const int32_t* steps) {
    if (block_size_ == 0) return;
    if (++batches_ == 0) {
        std::fill(written_.begin(), written_.end(), 0);
        batches_ = 1;
    }
    for (size_t i = 0; i < batch.tables.size(); ++i) {
        const int begin = batch.offsets[i], end = batch.offsets[i + 1];
        if (begin < 0 || end <= begin || end > batch.tokens) return;
        const int64_t first = batch.positions[begin];
        int64_t last = batch.positions[end - 1];
        if (steps != nullptr && steps[i] > 1) last += steps[i] - 1;
        if (first < 0 || last < first || last / block_size_ >= batch.table_lengths[i]) return;
        for (int64_t at = first / block_size_; at <= last / block_size_; ++at) {
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

}  // namespace mirror::bind
