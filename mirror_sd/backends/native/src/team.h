// A persistent team of threads for one forward at a time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace mirror {

// A stretch of memory that a thread will read soon, fetched into its cache line by line.
struct Ahead {
    const uint8_t* at = nullptr;
    const uint8_t* end = nullptr;

    bool fetch() {  // false when there is nothing left
        if (at >= end) return false;
        __builtin_prefetch(at, 0, 2);
        at += 64;
        return true;
    }
};

// Threads 1..n-1 are ours, thread 0 is the caller of `run`. They spin briefly between runs, because
// the next decode step comes within a fraction of a millisecond, then sleep.
class Team {
public:
    // cores: one core for each thread, or empty to leave the placement to the system. The caller of
    // `run` is pinned to the first one for the time of the run.
    Team(int threads, const std::vector<int>& cores);
    ~Team();
    Team(const Team&) = delete;
    Team& operator=(const Team&) = delete;

    int size() const { return threads_; }

    // Calls work(thread) on every thread and returns when all are done. Not reentrant. Throws
    // std::runtime_error in a process forked from the one that made the team: it has no threads.
    void run(const std::function<void(int)>& work);

    // Inside `run`: waits for all threads; the last one to arrive calls `work` before all go on, and
    // those that wait fetch what they will read next.
    template <typename Work> void barrier(Ahead ahead, const Work& work) {
        if (threads_ == 1) {
            work();
            return;
        }
        const uint32_t generation = generation_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
            // As much as can be under way while this thread works.
            for (int line = 0; line < 40 && ahead.fetch();) ++line;
            work();
            arrived_.store(0, std::memory_order_relaxed);
            generation_.store(generation + 1, std::memory_order_release);
            return;
        }
        wait_for(generation, ahead);
    }

private:
    struct Sleep {
        std::mutex mutex;
        std::condition_variable wake;
    };

    void stop();
    void serve(int thread, int core);
    void wait_for(uint32_t generation, Ahead ahead);
    bool await_run(uint32_t seen);

    const int threads_;
    const int caller_core_;
    const int process_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int> finished_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    const std::function<void(int)>* work_ = nullptr;
    std::unique_ptr<Sleep> sleep_ = std::make_unique<Sleep>();
    std::vector<std::thread> workers_;
};

// One core for each thread out of those this process may use, or none if they are fewer: then the
// system places the threads.
std::vector<int> usable_cores(int threads);

// Tasks 0..count-1 of one phase, shared by a team: each thread takes its own range in order, then
// what others have left. Which thread computes a task never changes a result.
class Ranges {
public:
    explicit Ranges(int threads) : next_(static_cast<size_t>(threads)) {}

    void reset(int count) {
        count_ = count;
        const int threads = static_cast<int>(next_.size());
        for (int i = 0; i < threads; ++i) {
            next_[i].value.store(static_cast<int>(static_cast<int64_t>(count) * i / threads),
                                 std::memory_order_relaxed);
        }
    }

    // First task of a thread's own range.
    int begin_of(int thread) const {
        return static_cast<int>(static_cast<int64_t>(count_) * thread /
                                static_cast<int64_t>(next_.size()));
    }

    template <typename Work> void take(int thread, const Work& work) {
        const int threads = static_cast<int>(next_.size());
        for (int step = 0; step < threads; ++step) {
            const int owner = (thread + step) % threads;
            const int end = static_cast<int>(static_cast<int64_t>(count_) * (owner + 1) / threads);
            while (next_[owner].value.load(std::memory_order_relaxed) < end) {
                const int task = next_[owner].value.fetch_add(1, std::memory_order_relaxed);
                if (task >= end) break;
                work(task);
            }
        }
    }

private:
    struct alignas(64) Counter {
        std::atomic<int> value{0};
    };
    int count_ = 0;
    std::vector<Counter> next_;
};

}  // namespace mirror
