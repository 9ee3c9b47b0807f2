// Whether this process may use AMX int8: the processor has it, the system saves its registers, and lets the process use them.
#pragma once

#include <string>

namespace colibri {

struct AmxAnswers {
    bool instructions = false;  // CPUID: AMX-TILE and AMX-INT8
    bool saved = false;         // XCR0: tile configuration and tile data
    int error = 0;              // errno of the request for permission; 0: granted
};

// Asks all three; permission only where the others hold. It stays granted, for every thread of the process.
AmxAnswers ask_for_amx();

// What is missing, for people; "" if nothing is.
std::string amx_refusal(const AmxAnswers& answers);

}  // namespace colibri
