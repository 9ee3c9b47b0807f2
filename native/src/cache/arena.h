// Memory of all slots and staging buffers: one mapping, taken at construction, so that its size is exact.
#pragma once

#include <sys/mman.h>

#include <cstdint>
#include <string>

#include "../huge_pages.h"
#include "colibri/error.h"

namespace colibri {

class Arena {
  public:
    // Throws Error("MemoryBudgetError") where the system refuses. Pages are aligned to 4096 bytes and untouched.
    explicit Arena(uint64_t bytes) : bytes_(bytes) {
        void* memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED)
            throw Error("MemoryBudgetError", "memory for the expert cache", "expert store", std::to_string(bytes) + " bytes",
                        "refused");
        memory_ = static_cast<uint8_t*>(memory);
        want_huge_pages(memory, bytes);
    }
    ~Arena() { ::munmap(memory_, bytes_); }
    Arena(const Arena&) = delete;
    Arena& operator=(const Arena&) = delete;

    uint8_t* at(uint64_t offset) const { return memory_ + offset; }

  private:
    uint8_t* memory_ = nullptr;
    uint64_t bytes_;
};

}  // namespace colibri
