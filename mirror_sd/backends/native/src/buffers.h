// Memory of the decoder and of the draft head, and how both refuse what is wrong.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>

namespace mirror {

inline int round_up(int value, int multiple) {
    return (value + multiple - 1) / multiple * multiple;
}

// Zeroed memory at a cache line: a strip's outputs fill lines that no other thread writes.
template <typename T> class Buffer {
public:
    void resize(size_t count) {
        const size_t bytes = (count * sizeof(T) + 63) / 64 * 64 + 64;
        void* p = std::aligned_alloc(64, bytes);
        if (p == nullptr) throw std::bad_alloc();
        std::memset(p, 0, bytes);
        memory_.reset(static_cast<T*>(p));
        size_ = count;
    }
    T* data() const { return memory_.get(); }
    size_t size() const { return size_; }
    T& operator[](size_t i) const { return memory_.get()[i]; }

private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> memory_;
    size_t size_ = 0;
};

[[noreturn]] inline void fail(const std::string& message) { throw std::invalid_argument(message); }

inline void check_range(const std::string& what, const int32_t* values, int count, int end) {
    for (int i = 0; i < count; ++i) {
        if (values[i] < 0 || values[i] >= end) {
            fail(what + " " + std::to_string(values[i]) + " is outside 0.." +
                 std::to_string(end - 1));
        }
    }
}

}  // namespace mirror
