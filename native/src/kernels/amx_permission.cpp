// Permission to use AMX: since Linux 5.16 a process has to ask for the 8 KiB of tile registers before it touches them.
#include "amx_permission.h"

#include <cstring>

#ifdef COLIBRI_X86
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#endif

namespace colibri {

#ifdef COLIBRI_X86

namespace {

// Linux, arch/x86/include/uapi/asm/prctl.h: of the libc's headers only newer ones have them.
constexpr int kGetPermission = 0x1022, kRequestPermission = 0x1023;
constexpr int kTileConfig = 17, kTileData = 18;  // bits of XCR0 and of the permissions

uint64_t read_xcr0() {
    uint32_t low = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t{high} << 32 | low;
}

int request_permission() {
    if (::syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return errno;
    uint64_t granted = 0;
    if (::syscall(SYS_arch_prctl, kGetPermission, &granted) != 0) return errno;
    return (granted >> kTileData & 1) != 0 ? 0 : EPERM;
}

}  // namespace

AmxAnswers ask_for_amx() {
    AmxAnswers answers;
    uint32_t a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return answers;
    constexpr uint32_t kAmxTile = 1u << 24, kAmxInt8 = 1u << 25;
    answers.instructions = (d & kAmxTile) != 0 && (d & kAmxInt8) != 0;
    constexpr uint32_t kOsXsave = 1u << 27;
    if (!answers.instructions || !__get_cpuid(1, &a, &b, &c, &d) || (c & kOsXsave) == 0) return answers;
    constexpr uint64_t kBoth = uint64_t{1} << kTileConfig | uint64_t{1} << kTileData;
    answers.saved = (read_xcr0() & kBoth) == kBoth;
    if (answers.saved) answers.error = request_permission();
    return answers;
}

#else

AmxAnswers ask_for_amx() { return {}; }

#endif

std::string amx_refusal(const AmxAnswers& answers) {
    if (!answers.instructions) return "the processor has no AMX int8";
    if (!answers.saved) return "the operating system does not save AMX registers";
    if (answers.error != 0) return std::string("the operating system refuses AMX registers: ") + std::strerror(answers.error);
    return "";
}

}  // namespace colibri
