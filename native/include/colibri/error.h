// The error that native code throws: a class name of colibri_jax/errors.py and that class's four fields.
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

namespace colibri {

struct Error : std::runtime_error {
    Error(std::string kind, std::string what, std::string where = {}, std::string expected = {}, std::string got = {})
        : std::runtime_error(kind + ": " + what + (where.empty() ? "" : " (" + where + ")")),
          kind(std::move(kind)),
          rule(std::move(what)),
          where(std::move(where)),
          expected(std::move(expected)),
          got(std::move(got)) {}

    std::string kind;      // e.g. "ReadError"; the binding raises colibri_jax.errors.<kind>
    std::string rule;      // the violated rule, in words
    std::string where;     // file, tensor, offset, layer, position or option
    std::string expected;  // what would have been accepted
    std::string got;       // what was found
};

}  // namespace colibri
