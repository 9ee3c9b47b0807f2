// Memory that is streamed through wants large pages: the processor fetches ahead within a page only, and looks up fewer of them.
#pragma once

#include <sys/mman.h>

#include <cstdint>

namespace colibri {

constexpr uint64_t kHugePage = uint64_t{2} << 20;

// Asks for large pages where whole ones lie inside [memory, memory + bytes), so that nothing outside becomes resident. A system
// that has none to give keeps small ones.
inline void want_huge_pages(void* memory, uint64_t bytes) {
    const uint64_t at = reinterpret_cast<uint64_t>(memory);
    const uint64_t begin = (at + kHugePage - 1) / kHugePage * kHugePage, end = (at + bytes) / kHugePage * kHugePage;
    if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace colibri
