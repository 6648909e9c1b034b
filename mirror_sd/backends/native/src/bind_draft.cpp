#include "bind_decoder.h"
#include "draft_head.h"

namespace mirror::bind {
namespace {

using Seeds = Array<const uint64_t, 1>;
using MutableRows = Array<int32_t, 2>;

// The draft head as Python holds it. It takes turns with its target, whose threads it works on; the
// target is kept alive by the binding.
class NativeDraft {
public:
    NativeDraft(NativeDecoder& target, Spec spec, int feature_size, std::vector<int32_t> token_ids)
        : turns_(target.turns()),
          head_(std::move(spec), feature_size, std::move(token_ids), target.decoder()) {}

    void set_matrix(const std::string& role, Bytes data, int outputs, int inputs, float multiplier,
                    const std::string& format) {
        const Matrix view = matrix_view(role, data, outputs, inputs, multiplier, format);
        const auto turn = turns_->take();
        sealed_ = false;
        Matrix* to = role == "fuse_features" ? &head_.fuse_features()
                     : role == "fuse_input"  ? &head_.fuse_input()
                     : role == "head"        ? &head_.head()
                                             : matrix_of(head_.layer(0), role);
        if (to == nullptr) throw std::invalid_argument("no matrix has the role '" + role + "'");
        *to = view;
        kept_.push_back(std::move(data));
    }

    void set_vector(const std::string& role, Floats data) {
        std::vector<float> values = vector_values(role, data);
        const auto turn = turns_->take();
        sealed_ = false;
        std::vector<float>* to = role == "embedding_norm" ? &head_.embedding_norm()
                                 : role == "feature_norm" ? &head_.feature_norm()
                                 : role == "final_norm"   ? &head_.final_norm()
                                                          : vector_of(head_.layer(0), role);
        if (to == nullptr) throw std::invalid_argument("no vector has the role '" + role + "'");
        *to = std::move(values);
    }

    void seal() {
        const auto turn = turns_->take();
        head_.check_weights();
        set_biases(head_.layer(0));
        sealed_ = true;
    }

    size_t kv_bytes_per_block(int block_size) const {
        check_block_size(block_size);
        return head_.kv_bytes_per_block(block_size);
    }

    void allocate_kv(int blocks, int block_size) {
        check_block_size(block_size);
        const auto turn = turns_->take();
        head_.allocate_kv(blocks, block_size);
        written_.reset(blocks, block_size);
    }

    void draft(Ints token_ids, Ints positions, Ints offsets, nb::tuple tables, Weights features,
               Ints steps, Floats floors, Floats temperatures, Seeds seeds, MutableRows tokens,
               Rows probabilities) {
        const auto turn = turns_->take();
        if (!sealed_) throw std::invalid_argument("the weights are not complete");
        DraftBatch batch;
        read_tokens(token_ids, positions, offsets, tables, batch);
        check_alignment(features, "features");
        if (features.shape(0) != static_cast<size_t>(batch.tokens) ||
            features.shape(1) != static_cast<size_t>(head_.feature_size())) {
            throw std::invalid_argument("features has the wrong shape");
        }
        batch.features = features.data();
        const size_t sequences = batch.tables.size();
        batch.steps = by_sequence(steps, sequences, "steps");
        batch.floors = by_sequence(floors, sequences, "floors");
        batch.temperatures = by_sequence(temperatures, sequences, "temperatures");
        batch.seeds = by_sequence(seeds, sequences, "seeds");
        check_alignment(tokens, "tokens");
        check_alignment(probabilities, "probabilities");
        const size_t width = tokens.shape(1);
        if (tokens.shape(0) != sequences || probabilities.shape(0) != sequences ||
            probabilities.shape(1) != width || width > 1u << 16) {
            throw std::invalid_argument("tokens or probabilities has the wrong shape");
        }
        written_.check(batch, batch.steps);
        const nb::gil_scoped_release released;
        head_.draft(batch, static_cast<int>(width), tokens.data(), probabilities.data());
    }

private:
    template <typename T>
    static const T* by_sequence(const Array<const T, 1>& values, size_t sequences,
                                const char* what) {
        if (reinterpret_cast<uintptr_t>(values.data()) % alignof(T) != 0) {
            throw std::invalid_argument(std::string(what) + " is not aligned");
        }
        if (values.shape(0) != sequences) {
            throw std::invalid_argument(std::to_string(values.shape(0)) + " " + what + " for " +
                                        std::to_string(sequences) + " sequences");
        }
        return values.data();
    }

    const std::shared_ptr<Turns> turns_;
    DraftHead head_;
    std::vector<Bytes> kept_;  // what the matrices point into
    WrittenBlocks written_;
    bool sealed_ = false;
};

void make_draft(NativeDraft* self, NativeDecoder& target, int feature_size, const Ints& token_ids,
                int intermediate_size, int heads, int kv_heads, int head_dim, float rms_eps,
                const Floats& frequencies, const std::string& cache) {
    if (feature_size < 1 || feature_size > 1 << 24) {
        throw std::invalid_argument("features of " + std::to_string(feature_size));
    }
    const Spec& of = target.decoder().spec();
    Spec spec = make_spec(of.vocab_size, of.hidden_size, intermediate_size, 1, heads, kv_heads,
                          head_dim, of.max_context, rms_eps, 1.0f, frequencies, {0}, cache);
    const int count = length(token_ids, "token_ids");
    const auto turn = target.turns()->take();
    new (self) NativeDraft(target, std::move(spec), feature_size,
                           {token_ids.data(), token_ids.data() + count});
}

}  // namespace
}  // namespace mirror::bind

void bind_draft(nanobind::module_& m) {
    namespace nb = nanobind;
    using mirror::bind::NativeDraft;
    nb::class_<NativeDraft>(m, "DraftHead")
        .def("__init__", &mirror::bind::make_draft, nb::keep_alive<1, 2>(), nb::arg("target"),
             nb::kw_only(), nb::arg("feature_size"), nb::arg("token_ids").noconvert(),
             nb::arg("intermediate_size"), nb::arg("heads"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("rms_eps"), nb::arg("frequencies").noconvert(),
             nb::arg("cache"))
        .def("set_matrix", &NativeDraft::set_matrix, nb::arg("role"), nb::arg("data").noconvert(),
             nb::arg("outputs"), nb::arg("inputs"), nb::arg("multiplier"), nb::arg("format"))
        .def("set_vector", &NativeDraft::set_vector, nb::arg("role"), nb::arg("data").noconvert())
        .def("seal", &NativeDraft::seal)
        .def("kv_bytes_per_block", &NativeDraft::kv_bytes_per_block, nb::arg("block_size"))
        .def("allocate_kv", &NativeDraft::allocate_kv, nb::arg("num_blocks"),
             nb::arg("block_size"))
        .def("draft", &NativeDraft::draft, nb::arg("token_ids").noconvert(),
             nb::arg("positions").noconvert(), nb::arg("sequence_offsets").noconvert(),
             nb::arg("block_tables"), nb::arg("features").noconvert(),
             nb::arg("steps").noconvert(), nb::arg("floors").noconvert(),
             nb::arg("temperatures").noconvert(), nb::arg("seeds").noconvert(),
             nb::arg("tokens").noconvert(), nb::arg("probabilities").noconvert());
}
