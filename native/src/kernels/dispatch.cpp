// Which kernel tables this processor can run.
#include "colibri/error.h"
#include "colibri/kernels.h"

namespace colibri {

namespace scalar {
extern const Kernels table;
}
#ifdef COLIBRI_X86
namespace avx2 {
extern const Kernels table;
}
namespace avx512 {
extern const Kernels table;
}
#endif

namespace {

std::vector<const Kernels*> usable_tables() {
    std::vector<const Kernels*> tables{&scalar::table};
#ifdef COLIBRI_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2")) {
        tables.push_back(&avx2::table);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
            tables.push_back(&avx512::table);
        }
    }
#endif
    return tables;
}

const std::vector<const Kernels*>& tables() {
    static const std::vector<const Kernels*> found = usable_tables();
    return found;
}

}  // namespace

std::vector<std::string> available_isas() {
    std::vector<std::string> names;
    for (const Kernels* table : tables()) names.emplace_back(table->name);
    return names;
}

const Kernels& kernels_for(const std::string& isa) {
    if (isa.empty()) return *tables().back();
    std::string known;
    for (const Kernels* table : tables()) {
        if (isa == table->name) return *table;
        known += (known.empty() ? "" : ", ") + std::string(table->name);
    }
    throw Error("OptionError", "instruction set not available", "isa", known, isa);
}

}  // namespace colibri
