// Memory for intermediate results: grows as needed, is never cleared, and forgets when it grows.
#pragma once
#include <cstddef>
#include <memory>

template <typename T>
class Scratch {
   public:
    T* of(size_t count) {
        if (size_ < count) {
            held_.reset();  // before the next one is there
            held_.reset(new T[count]);
            size_ = count;
        }
        return held_.get();
    }

   private:
    std::unique_ptr<T[]> held_;
    size_t size_ = 0;
};
