// Refusal of descriptions that would make sizes and indices meaningless; what they mean is Python's to check.
#pragma once

#include "colibri/engine.h"

namespace colibri {

// Throws Error("OptionError"): a dimension below 1 or absurd, lists of another length than there are layers, a rotation wider than
// what it rotates. After it, no product of two dimensions overflows.
void check_spec(const ModelSpec& model, const EngineOptions& options);

// Throws Error("OptionError"): not one budget per layer of the store.
void check_budgets(const ModelSpec& model, const std::vector<int64_t>& budgets);

}  // namespace colibri
