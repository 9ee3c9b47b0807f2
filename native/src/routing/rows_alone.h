// The selection of a step whose positions are each routed as a step of their own.
#pragma once

#include <cstdint>
#include <span>

#include "colibri/routing.h"

namespace colibri::routing {

// select_experts of each position by itself, joined as colibri/routing.h says of `rows_alone`.
Selection select_rows_alone(std::span<const float> logits, int64_t positions, int64_t experts, const RouterSpec& router,
                            const RoutingOptions& options);

}  // namespace colibri::routing
