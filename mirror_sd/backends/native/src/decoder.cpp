#include "decoder.h"

#include <algorithm>
#include <cmath>

#include "packing.h"

namespace mirror {
namespace {

constexpr int kExtraPhases = 4;
constexpr int kStripsPerRefinement = 32;
// Of an int8 head, a row's strips with a logit within this many nats of the largest are computed again
// with 16-bit activations: 5 are 47 of 3,072 strips on plain text. One less or more changed the KL by
// a tenth and the time of 16 rows by half to one percent (docs/decisions/0005).
constexpr float kRefinedNats = 5.0f;

}  // namespace

Decoder::Decoder(Spec spec, const KernelTable& kernels, int threads, const std::vector<int>& cores)
    : LayerStack(std::move(spec), kernels, std::make_shared<Team>(threads, cores), kExtraPhases) {
    refinement_.own.resize(static_cast<size_t>(threads));
}

void Decoder::check_weights() const {
    check_layers();
    check_matrix("embedding", embedding_, spec_.vocab_size, spec_.hidden_size);
    check_matrix("head", head_, spec_.vocab_size, spec_.hidden_size);
    check_vector("final_norm", final_norm_, hidden_, false);
}

void Decoder::check_outputs(const Batch& batch) const {
    check_range("logit row", batch.logit_rows, batch.rows, batch.tokens);
    for (int i = 1; i < batch.rows; ++i) {
        if (batch.logit_rows[i] <= batch.logit_rows[i - 1]) fail("logit rows must ascend");
    }
    for (size_t i = 0; i < batch.taps.size(); ++i) {
        if (batch.taps[i] <= (i > 0 ? batch.taps[i - 1] : 0) || batch.taps[i] > spec_.layers) {
            fail("tapped layers must ascend within 1.." + std::to_string(spec_.layers));
        }
    }
}

void Decoder::reserve_refinement(int rows) {
    Refinement& r = refinement_;
    if (rows <= r.rows) return;
    r.rows = 0;  // as in `reserve`
    const size_t count = static_cast<size_t>(rows);
    const size_t groups = static_cast<size_t>(hidden_ / kGroup);
    r.values.resize(count * groups * kernels_.row_bytes[kInt16]);
    r.scales.resize(count * groups * kRowNumbers);
    r.inputs = {r.values.data(), r.scales.data(), hidden_ / kGroup, 1};
    r.largest.resize(count * static_cast<size_t>(head_.strip_count()));
    r.thresholds.resize(count);
    for (auto& own : r.own) own.resize(count);
    r.rows = rows;
}

void Decoder::forward(const Batch& batch, float* logits) {
    check(batch, nullptr);
    check_outputs(batch);
    reserve(std::max(batch.tokens, batch.rows));
    if (is_refined()) reserve_refinement(batch.rows);
    plan(batch, nullptr, batch.tokens);
    set_tiles(std::max(batch.tokens, batch.rows), batch.tokens);
    for (int i = 0; i < spec_.layers; ++i) reset_phases(i, batch.tokens, batch.tokens);
    const auto last = phases_.begin() + spec_.layers * kPhasesPerLayer;
    const int strips = head_.strip_count();
    last[0].reset(batch.tokens);
    last[1].reset(batch.rows);
    last[2].reset(batch.rows > 0 ? strips : 0);
    const int refinements = round_up(strips, kStripsPerRefinement) / kStripsPerRefinement;
    last[3].reset(batch.rows > 0 ? refinements : 0);
    team_->run([&](int thread) { run(thread, batch, logits); });
    const int tap = tap_after(batch, spec_.layers);
    for (int row = 0; tap >= 0 && row < batch.tokens; ++row) keep_features(batch, tap, row);
}

// Which tap the residual stream after so many layers is, or -1.
int Decoder::tap_after(const Batch& batch, int layers) const {
    const auto found = std::find(batch.taps.begin(), batch.taps.end(), layers);
    return found == batch.taps.end() ? -1 : static_cast<int>(found - batch.taps.begin());
}

void Decoder::keep_features(const Batch& batch, int tap, int row) const {
    const size_t hidden = static_cast<size_t>(spec_.hidden_size);
    const float* x = memory_->x.data() + static_cast<size_t>(row) * hidden_;
    const size_t at = static_cast<size_t>(row) * batch.taps.size() + static_cast<size_t>(tap);
    std::copy_n(x, hidden, batch.features + at * hidden);
}

void Decoder::run(int thread, const Batch& batch, float* logits) {
    const auto last = phases_.begin() + spec_.layers * kPhasesPerLayer;
    for_rows(thread, batch.tokens, last[0], {}, [&](int row) { embed(batch, row); });
    for (int i = 0; i < spec_.layers; ++i) {
        const int tap = tap_after(batch, i);
        write_kv(thread, batch, i, [&](int row) {
            if (tap >= 0) keep_features(batch, tap, row);
        });
        finish_layer(thread, batch, i, {batch.tokens, nullptr, memory_->x.data()});
    }
    for_rows(thread, batch.rows, last[1], first_strips(thread, head_, last[2], 1),
             [&](int row) { normalise_logit_row(thread, batch, row); });
    run_head(thread, batch, logits);
}

void Decoder::embed(const Batch& batch, int row) {
    unpack_row(embedding_, batch.token_ids[row],
               memory_->x.data() + static_cast<size_t>(row) * hidden_);
    set_angles(batch.positions[row], row);
}

void Decoder::normalise_logit_row(int thread, const Batch& batch, int row) {
    Memory& m = *memory_;
    const float* x = m.x.data() + static_cast<size_t>(batch.logit_rows[row]) * hidden_;
    normalise_row(thread, final_norm_, x, row, head_.format);
    if (!is_refined()) return;
    kernels_.quantise(m.threads[static_cast<size_t>(thread)].row.data(), row, refinement_.inputs, kInt16);
}

void Decoder::run_head(int thread, const Batch& batch, float* logits) {
    Memory& m = *memory_;
    const auto last = phases_.begin() + spec_.layers * kPhasesPerLayer;
    const size_t stride = static_cast<size_t>(spec_.vocab_size);
    const int rows = batch.rows;
    if (!is_refined()) {
        last[2].take(thread, [&](int strip) {
            kernels_.linear(head_, strip, m.a, rows, logits, stride, false, nullptr);
        });
        return;
    }
    float* own = refinement_.own[static_cast<size_t>(thread)].data();
    std::fill_n(own, rows, -INFINITY);
    last[2].take(thread, [&](int strip) {
        float* largest = refinement_.largest.data() + static_cast<size_t>(strip) * rows;
        kernels_.linear(head_, strip, m.a, rows, logits, stride, false, largest);
        for (int row = 0; row < rows; ++row) own[row] = std::max(own[row], largest[row]);
    });
    team_->barrier({}, [&] { set_thresholds(rows); });
    last[3].take(thread, [&](int task) { refine_strips(task, rows, logits); });
}

// By the last thread to have done its strips.
void Decoder::set_thresholds(int rows) {
    for (int row = 0; row < rows; ++row) {
        float top = -INFINITY;
        for (const auto& own : refinement_.own) top = std::max(top, own[row]);
        // A row of NaN stays as it is.
        refinement_.thresholds[row] = top == -INFINITY ? INFINITY : top - kRefinedNats;
    }
}

// Which strips of a row are refined, and their new values, depend on the row alone.
void Decoder::refine_strips(int task, int rows, float* logits) const {
    const float* thresholds = refinement_.thresholds.data();
    const int end = std::min((task + 1) * kStripsPerRefinement, head_.strip_count());
    int strips[kStripsPerRefinement], count = 0;
    for (int strip = task * kStripsPerRefinement; strip < end; ++strip) {
        const float* largest = refinement_.largest.data() + static_cast<size_t>(strip) * rows;
        int reached = 0;
        for (int row = 0; row < rows; ++row) reached += largest[row] >= thresholds[row];
        if (reached > 0) strips[count++] = strip;
    }
    for (int i = 0; i < count; ++i) {
        const int strip = strips[i];
        int next = strips[std::min(i + 1, count - 1)];
        const float* largest = refinement_.largest.data() + static_cast<size_t>(strip) * rows;
        for (int row = 0; row < rows; ++row) {
            if (!(largest[row] >= thresholds[row])) continue;
            kernels_.refine(head_, strip, next, refinement_.inputs, row,
                            logits + static_cast<size_t>(row) * spec_.vocab_size);
            next = strip;
        }
    }
}

}  // namespace mirror
