// Which kernel tables this processor can run.
#include "amx_permission.h"
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
namespace amx {
extern const Kernels table;
}
namespace amx_emulated {
extern const Kernels table;
}
#endif

namespace {

using Tables = std::vector<const Kernels*>;

struct Usable {
    Tables available{&scalar::table};
    Tables emulated;
    std::string amx_refusal = "the processor has no AVX-512 VNNI";
};

Usable usable_tables() {
    Usable usable;
#ifdef COLIBRI_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) {
        usable.available.push_back(&avx2::table);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
            __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni")) {
            usable.available.push_back(&avx512::table);
            usable.amx_refusal = amx_refusal(ask_for_amx());
            if (usable.amx_refusal.empty()) usable.available.push_back(&amx::table);
#ifdef COLIBRI_AMX_EMULATION
            usable.emulated.push_back(&amx_emulated::table);  // its vectors are real
#endif
        }
    }
#endif
    return usable;
}

const Usable& usable() {
    static const Usable found = usable_tables();
    return found;
}

std::vector<std::string> names_of(const Tables& tables) {
    std::vector<std::string> names;
    for (const Kernels* table : tables) names.emplace_back(table->name);
    return names;
}

}  // namespace

std::vector<std::string> available_isas() { return names_of(usable().available); }

std::vector<std::string> emulated_isas() { return names_of(usable().emulated); }

std::string amx_refusal() { return usable().amx_refusal; }

const Kernels& kernels_for(const std::string& isa) {
    if (isa.empty()) return *usable().available.back();
    std::string known;
    for (const Tables* tables : {&usable().available, &usable().emulated}) {
        for (const Kernels* table : *tables) {
            if (isa == table->name) return *table;
            known += (known.empty() ? "" : ", ") + std::string(table->name);
        }
    }
    throw Error("OptionError", "instruction set not available", "isa", known, isa == "amx" ? isa + ": " + amx_refusal() : isa);
}

}  // namespace colibri
