// Python's face of `sampling.h`. Shapes and types are checked here; the work goes without the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "sampling.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

using Row = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Rows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tokens = std::vector<int64_t>;

// numpy lets an array begin at any byte.
template <typename Array>
const float* aligned(const Array& array) {
    const auto address = reinterpret_cast<uintptr_t>(array.data());
    if (address % alignof(float) != 0) throw std::invalid_argument("the logits are not aligned");
    return array.data();
}

void make_chooser(mirror::Chooser* self, double temperature, int64_t top_k, double top_p,
                  double presence_penalty, double frequency_penalty, uint64_t seed,
                  std::vector<std::pair<int64_t, double>> bias, Tokens stop_tokens,
                  const Tokens& completion, const std::string& isa) {
    mirror::ChooserParams params{temperature,
                                 top_k,
                                 top_p,
                                 static_cast<float>(presence_penalty),
                                 static_cast<float>(frequency_penalty),
                                 seed,
                                 {},
                                 std::move(stop_tokens)};
    for (const auto& [token, value] : bias) {
        params.bias.emplace_back(token, static_cast<float>(value));
    }
    new (self) mirror::Chooser(std::move(params), completion, isa);
}

int64_t choose(mirror::Chooser& self, const Row& logits, int64_t position) {
    const float* row = aligned(logits);
    const nb::gil_scoped_release release;
    return self.choose(row, logits.shape(0), static_cast<uint32_t>(position));
}

nb::tuple judge(mirror::Chooser& self, const Rows& logits, const Tokens& draft, int64_t position,
                int64_t room) {
    const mirror::LogitRows rows{aligned(logits), logits.shape(0), logits.shape(1)};
    mirror::Judgement done;
    {
        const nb::gil_scoped_release release;
        done = self.judge(rows, draft, static_cast<uint32_t>(position), room);
    }
    return nb::make_tuple(done.tokens, done.accepted, static_cast<int>(done.ending));
}

nb::tuple token_logprob(const Row& logits, int64_t token, int64_t best, const std::string& isa) {
    const float* row = aligned(logits);
    mirror::Logprob done;
    {
        const nb::gil_scoped_release release;
        done = mirror::token_logprob(row, logits.shape(0), token, best, isa);
    }
    return nb::make_tuple(done.logprob, done.top);
}

// For tests against the known answers.
Tokens philox_words(const Tokens& counter, const Tokens& key) {
    if (counter.size() != 4 || key.size() != 2) {
        throw std::invalid_argument("a counter has four words and a key two");
    }
    uint32_t from[4], words[4];
    for (size_t i = 0; i < 4; ++i) from[i] = static_cast<uint32_t>(counter[i]);
    mirror::philox(from, {static_cast<uint32_t>(key[0]), static_cast<uint32_t>(key[1])}, words);
    return Tokens(words, words + 4);
}

double gumbel(uint64_t seed, int64_t position, int64_t token) {
    return mirror::gumbel({static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)},
                          static_cast<uint32_t>(position), static_cast<uint32_t>(token));
}

}  // namespace

void bind_sampling(nb::module_& m) {
    nb::exception<mirror::InvalidLogits>(m, "InvalidLogits", PyExc_ArithmeticError);
    nb::class_<mirror::Chooser>(m, "Chooser")
        .def("__init__", &make_chooser, nb::kw_only(), "temperature"_a, "top_k"_a, "top_p"_a,
             "presence_penalty"_a, "frequency_penalty"_a, "seed"_a, "bias"_a, "stop_tokens"_a,
             "completion"_a, "isa"_a = "")
        .def("commit", &mirror::Chooser::commit, "token"_a)
        .def("choose", &choose, "logits"_a.noconvert(), "position"_a)
        .def("judge", &judge, "logits"_a.noconvert(), "draft"_a, "position"_a, "room"_a);
    m.def("token_logprob", &token_logprob, "logits"_a.noconvert(), "token"_a, "best"_a,
          "isa"_a = "");
    m.def("sampling_isa", [](const std::string& isa) { return mirror::sampling_kernels(isa).name; },
          "isa"_a = "");
    m.def("philox_words", &philox_words, "counter"_a, "key"_a);
    m.def("gumbel", &gumbel, "seed"_a, "position"_a, "token"_a);
}
