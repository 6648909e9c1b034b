#include "team.h"

#include <chrono>
#include <stdexcept>

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace mirror {
namespace {

// Spinning without giving the core away pays only for waits of microseconds: other processes (the
// broker, the gateways) share these cores, and a waiter that holds one may be what it waits for.
constexpr int kPauses = 1000;
constexpr auto kAwake = std::chrono::microseconds(300);

void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

void pin_to(int core) {
    if (core < 0) return;
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(core), &set);
    // Not being pinned costs speed only.
    (void)pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Pins the calling thread for a scope: with a helper on its core each barrier would cost a slice of
// the scheduler, and left alone the system does put them together.
class PinnedFor {
public:
    explicit PinnedFor(int core) {
        if (core < 0) return;
        if (sched_getaffinity(0, sizeof before_, &before_) != 0) return;
        pin_to(core);
        pinned_ = true;
    }
    ~PinnedFor() {
        if (pinned_) (void)pthread_setaffinity_np(pthread_self(), sizeof before_, &before_);
    }
    PinnedFor(const PinnedFor&) = delete;
    PinnedFor& operator=(const PinnedFor&) = delete;

private:
    cpu_set_t before_;
    bool pinned_ = false;
};

}  // namespace

std::vector<int> usable_cores(int threads) {
    cpu_set_t set;
    CPU_ZERO(&set);
    std::vector<int> cores;
    if (sched_getaffinity(0, sizeof set, &set) != 0) return cores;
    for (int core = 0; core < CPU_SETSIZE; ++core) {
        if (CPU_ISSET(static_cast<size_t>(core), &set)) cores.push_back(core);
    }
    if (cores.size() < static_cast<size_t>(threads)) cores.clear();
    return cores;
}

Team::Team(int threads, const std::vector<int>& cores)
    : threads_(threads),
      caller_core_(cores.empty() ? -1 : cores.front()),
      process_(static_cast<int>(getpid())) {
    try {
        for (int i = 1; i < threads; ++i) {
            const size_t at = static_cast<size_t>(i);
            const int core = at < cores.size() ? cores[at] : -1;
            workers_.emplace_back([this, i, core] { serve(i, core); });
        }
    } catch (...) {  // no more threads to be had
        stop();
        throw;
    }
}

Team::~Team() {
    if (process_ == static_cast<int>(getpid())) {
        stop();
        return;
    }
    // A forked process has no threads to join, and destroying a condition waits for its waiters.
    for (auto& worker : workers_) worker.detach();
    (void)sleep_.release();
}

void Team::stop() {
    stop_.store(true);
    epoch_.fetch_add(1);
    {
        const std::lock_guard<std::mutex> lock(sleep_->mutex);
        sleep_->wake.notify_all();
    }
    for (auto& worker : workers_) worker.join();
}

void Team::run(const std::function<void(int)>& work) {
    if (threads_ == 1) {
        work(0);
        return;
    }
    if (process_ != static_cast<int>(getpid())) {
        throw std::runtime_error("a fork has no threads: make the decoder in the process that uses it");
    }
    const PinnedFor pinned(caller_core_);
    work_ = &work;
    finished_.store(0, std::memory_order_relaxed);
    epoch_.fetch_add(1);
    if (sleeping_.load() > 0) {
        const std::lock_guard<std::mutex> lock(sleep_->mutex);
        sleep_->wake.notify_all();
    }
    work(0);
    for (int spins = 0; finished_.load(std::memory_order_acquire) < threads_ - 1; ++spins) {
        if (spins < kPauses) pause(); else sched_yield();
    }
}

void Team::wait_for(uint32_t generation, Ahead ahead) {
    for (int spins = 0; generation_.load(std::memory_order_acquire) == generation; ++spins) {
        if (ahead.fetch()) continue;
        if (spins < kPauses) pause(); else sched_yield();
    }
}

bool Team::await_run(uint32_t seen) {
    const auto asleep_at = std::chrono::steady_clock::now() + kAwake;
    for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen; ++spins) {
        if (spins < kPauses) {
            pause();
            continue;
        }
        sched_yield();
        if (spins % 16 == 0 && std::chrono::steady_clock::now() > asleep_at) {
            std::unique_lock<std::mutex> lock(sleep_->mutex);
            sleeping_.fetch_add(1);
            sleep_->wake.wait(lock, [this, seen] { return epoch_.load() != seen; });
            sleeping_.fetch_sub(1);
        }
    }
    return !stop_.load();
}

void Team::serve(int thread, int core) {
    pin_to(core);
    uint32_t seen = 0;
    while (await_run(seen)) {
        ++seen;
        (*work_)(thread);
        finished_.fetch_add(1, std::memory_order_release);
    }
}

}  // namespace mirror
