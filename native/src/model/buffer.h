// Memory of fixed size, aligned to cache lines, untouched until written (so that only what is used becomes resident).
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "../huge_pages.h"

namespace colibri {

template <typename T>
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(int64_t count) : size_(count) {
        const size_t bytes = (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
        data_.reset(static_cast<T*>(std::aligned_alloc(64, bytes ? bytes : 64)));
        if (!data_) throw std::bad_alloc();
        if (bytes >= kHugePage) want_huge_pages(data_.get(), bytes);
    }

    T* data() { return data_.get(); }
    const T* data() const { return data_.get(); }
    int64_t size() const { return size_; }
    T& operator[](int64_t i) { return data_.get()[i]; }
    const T& operator[](int64_t i) const { return data_.get()[i]; }

    // Room for `count` elements; the contents are lost when it grows.
    void reserve(int64_t count) {
        if (count > size_) *this = Buffer(count);
    }

  private:
    struct Free {
        void operator()(T* p) const { std::free(p); }
    };
    std::unique_ptr<T, Free> data_;
    int64_t size_ = 0;
};

}  // namespace colibri
