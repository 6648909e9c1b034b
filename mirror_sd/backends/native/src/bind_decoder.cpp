#include "bind_decoder.h"

#include <algorithm>

namespace mirror::bind {

void NativeDecoder::set_matrix(const std::string& role, int layer, Bytes data, int outputs,
                               int inputs, float multiplier, const std::string& format) {
    const Matrix view = matrix_view(role, data, outputs, inputs, multiplier, format);
    const auto turn = turns_->take();
    sealed_ = false;
    matrix(role, layer) = view;
    kept_.push_back(std::move(data));
}

void NativeDecoder::set_vector(const std::string& role, int layer, Floats data) {
    std::vector<float> values = vector_values(role, data);
    const auto turn = turns_->take();
    sealed_ = false;
    std::vector<float>* to =
        role == "final_norm" ? &decoder_.final_norm() : vector_of(layer_at(layer), role);
    if (to == nullptr) throw std::invalid_argument("no vector has the role '" + role + "'");
    *to = std::move(values);
}

void NativeDecoder::seal() {
    const auto turn = turns_->take();
    decoder_.check_weights();
    for (int i = 0; i < decoder_.spec().layers; ++i) set_biases(decoder_.layer(i));
    sealed_ = true;
}

size_t NativeDecoder::kv_bytes_per_block(int block_size) const {
    check_block_size(block_size);
    return decoder_.kv_bytes_per_block(block_size);
}

void NativeDecoder::allocate_kv(int blocks, int block_size) {
    check_block_size(block_size);
    const auto turn = turns_->take();
    decoder_.allocate_kv(blocks, block_size);
    written_.reset(blocks, block_size);
}

void NativeDecoder::discard_kv(Ints blocks) {
    const auto turn = turns_->take();
    decoder_.discard_kv(blocks.data(), length(blocks, "blocks"));
}

void NativeDecoder::forward(Ints token_ids, Ints positions, Ints offsets, nb::tuple tables,
                            Ints logit_rows, Rows logits, const std::vector<int>& taps,
                            Rows features) {
    const auto turn = turns_->take();
    if (!sealed_) throw std::invalid_argument("the weights are not complete");
    Batch batch;
    read_tokens(token_ids, positions, offsets, tables, batch);
    batch.logit_rows = logit_rows.data();
    batch.rows = length(logit_rows, "logit_rows");
    check_alignment(logits, "logits");
    const size_t vocab = static_cast<size_t>(decoder_.spec().vocab_size);
    if (logits.shape(0) < logit_rows.shape(0) || logits.shape(1) != vocab) {
        throw std::invalid_argument("logits has the wrong shape");
    }
    set_taps(batch, taps, features);
    written_.check(batch, nullptr);
    const nb::gil_scoped_release released;
    decoder_.forward(batch, logits.data());
}

void NativeDecoder::set_taps(Batch& batch, const std::vector<int>& taps,
                             const Rows& features) const {
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

Layer& NativeDecoder::layer_at(int layer) {
    if (layer < 0 || layer >= decoder_.spec().layers) {
        throw std::invalid_argument("layer " + std::to_string(layer) + " is outside 0.." +
                                    std::to_string(decoder_.spec().layers - 1));
    }
    return decoder_.layer(layer);
}

Matrix& NativeDecoder::matrix(const std::string& role, int layer) {
    if (role == "embedding") return decoder_.embedding();
    if (role == "head") return decoder_.head();
    Matrix* found = matrix_of(layer_at(layer), role);
    if (found == nullptr) throw std::invalid_argument("no matrix has the role '" + role + "'");
    return *found;
}

namespace {

float pack(Weights weights, const std::string& format, int threads, MutableBytes out) {
    const int outputs = static_cast<int>(weights.shape(0));
    const int inputs = static_cast<int>(weights.shape(1));
    const Format kind = format_named(format);
    check_alignment(weights, "weights");
    check_alignment(out, "the packed array");
    if (outputs < 1 || inputs < 1 || out.shape(0) != packed_bytes(kind, outputs, inputs)) {
        throw std::invalid_argument("the packed array has the wrong size");
    }
    const nb::gil_scoped_release released;
    return pack(kind, weights.data(), outputs, inputs, std::clamp(threads, 1, 256),
                        out.data());
}

size_t packed_bytes(const std::string& format, int outputs, int inputs) {
    if (outputs < 1 || inputs < 1) throw std::invalid_argument("a matrix has no elements");
    return packed_bytes(format_named(format), outputs, inputs);
}

}  // namespace
}  // namespace mirror::bind

void bind_decoder(nanobind::module_& m) {
    using namespace mirror::bind;
    m.def("usable_cores", &mirror::usable_cores, nb::arg("threads"));
    m.def("available_isas", &mirror::available_isas,
          "Instruction sets of this build that this machine runs, best first.");
    m.def("pack", &pack, nb::arg("weights").noconvert(), nb::arg("format"), nb::arg("threads"),
          nb::arg("out").noconvert());
    m.def("packed_bytes", &packed_bytes, nb::arg("format"), nb::arg("outputs"), nb::arg("inputs"));
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
        .def("discard_kv", &NativeDecoder::discard_kv, nb::arg("blocks").noconvert())
        .def("forward", &NativeDecoder::forward, nb::arg("token_ids").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("sequence_offsets").noconvert(),
             nb::arg("block_tables"), nb::arg("logit_rows").noconvert(),
             nb::arg("logits").noconvert(), nb::arg("taps") = std::vector<int>(),
             nb::arg("features").noconvert().none() = nb::none())
        .def_prop_ro("isa", &NativeDecoder::isa)
        .def_prop_ro("threads", &NativeDecoder::threads);
}
