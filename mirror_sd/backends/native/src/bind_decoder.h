// The decoder as Python holds it: shapes and types are checked, then the GIL is given up.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "bind_arrays.h"
#include "decoder.h"

namespace mirror::bind {

class NativeDecoder {
public:
    NativeDecoder(Spec spec, const std::string& isa, int threads, const std::vector<int>& cores)
        : decoder_(std::move(spec), kernels_named(isa), threads, cores) {}

    void set_matrix(const std::string& role, int layer, Bytes data, int outputs, int inputs,
                    float multiplier, const std::string& format);
    void set_vector(const std::string& role, int layer, Floats data);
    // After the last weight: checks that all are there.
    void seal();
    size_t kv_bytes_per_block(int block_size) const;
    void allocate_kv(int blocks, int block_size);
    void discard_kv(Ints blocks);
    void forward(Ints token_ids, Ints positions, Ints offsets, nb::tuple tables, Ints logit_rows,
                 Rows logits, const std::vector<int>& taps, Rows features);

    std::string isa() const { return decoder_.kernels().name; }
    int threads() const { return decoder_.team()->size(); }

    // For a draft head, which works on the same threads.
    Decoder& decoder() { return decoder_; }
    const std::shared_ptr<Turns>& turns() const { return turns_; }

private:
    void set_taps(Batch& batch, const std::vector<int>& taps, const Rows& features) const;
    Layer& layer_at(int layer);
    Matrix& matrix(const std::string& role, int layer);

    Decoder decoder_;
    std::vector<Bytes> kept_;  // what the matrices point into
    WrittenBlocks written_;
    std::shared_ptr<Turns> turns_ = std::make_shared<Turns>();
    bool sealed_ = false;
};

}  // namespace mirror::bind
