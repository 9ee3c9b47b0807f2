// Python's view of the routing part: names become enums, vectors become arrays, the GIL is released in between.
#include "colibri/routing.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <optional>
#include <string>
#include <utility>

#include "bindings.h"
#include "colibri/error.h"

namespace py = pybind11;

namespace colibri::bindings {
namespace {

using FloatArray = py::array_t<float, py::array::c_style>;
using IdArray = py::array_t<int32_t, py::array::c_style>;
using VoteArray = py::array_t<int64_t, py::array::c_style>;

py::dict select(const FloatArray& logits, const std::string& score, int top_k, const std::optional<FloatArray>& bias, int n_group,
                int topk_group, bool norm_topk_prob, double routed_scaling_factor, int expert_topk, double expert_topp,
                int64_t budget, const std::string& policy, const std::string& denominator, const std::string& vote, int floor,
                double coverage, const IdArray& resident, bool rows_alone, const VoteArray& row_votes, int route_top,
                int route_within) {
    RouterSpec router;
    router.score = score_named(score);
    router.top_k = top_k;
    if (bias) router.bias.assign(bias->data(), bias->data() + bias->size());
    router.n_group = n_group;
    router.topk_group = topk_group;
    router.norm_topk_prob = norm_topk_prob;
    router.routed_scaling_factor = routed_scaling_factor;
    RoutingOptions options;
    options.expert_topk = expert_topk;
    options.expert_topp = expert_topp;
    options.budget = budget;
    options.policy = policy_named(policy);
    options.denominator = denominator_named(denominator);
    options.vote = vote_named(vote);
    options.floor = floor;
    options.coverage = coverage;
    options.rows_alone = rows_alone;
    options.route_top = route_top;
    options.route_within = route_within;

    const py::ssize_t positions = logits.shape(0);
    const py::ssize_t experts = logits.shape(1);
    const std::span<const float> values(logits.data(), static_cast<size_t>(logits.size()));
    const std::span<const int32_t> in_cache(resident.data(), static_cast<size_t>(resident.size()));
    const std::span<const int64_t> votes(row_votes.data(), static_cast<size_t>(row_votes.size()));
    Selection selection;
    {
        const py::gil_scoped_release released;
        selection = select_experts(values, positions, experts, router, options, in_cache, votes);
    }
    py::dict result = selection_dict(selection);
    result["removed"] = to_array(selection.removed, {static_cast<py::ssize_t>(selection.removed.size())});
    return result;
}

}  // namespace

Score score_named(const std::string& name) {
    return named<Score>("score", name, {{"sigmoid", Score::sigmoid}, {"softmax", Score::softmax}});
}

Denominator denominator_named(const std::string& name) {
    return named<Denominator>("denominator", name, {{"survivors", Denominator::survivors}, {"frozen", Denominator::frozen}});
}

Vote vote_named(const std::string& name) {
    return named<Vote>("vote", name, {{"weights", Vote::weights}, {"all_scores", Vote::all_scores}});
}

py::dict selection_dict(const Selection& s) {
    py::dict d;
    d["ids"] = to_array(s.ids, {s.positions, s.top_k});
    d["weights"] = to_array(s.weights, {s.positions, s.top_k});
    d["kept"] = to_array(s.kept, {static_cast<py::ssize_t>(s.kept.size())});
    d["union_size"] = s.union_size;
    d["dropped"] = s.dropped;
    d["dropped_slots"] = s.dropped_slots;
    d["emptied_positions"] = s.emptied_positions;
    d["mass_kept"] = s.mass_kept;
    return d;
}

Policy policy_named(const std::string& name) {
    return named<Policy>("policy", name,
                         {{"aggregate", Policy::aggregate},
                          {"floor", Policy::floor},
                          {"substitute", Policy::substitute},
                          {"coverage", Policy::coverage},
                          {"per_position", Policy::per_position},
                          {"resident", Policy::resident},
                          {"cache_route", Policy::cache_route}});
}

void bind_routing(py::module_& module) {
    module.def(
        "select_experts", &select, py::arg("logits").noconvert(), py::kw_only(), py::arg("score"), py::arg("top_k"),
        py::arg("bias").noconvert(), py::arg("n_group"), py::arg("topk_group"), py::arg("norm_topk_prob"),
        py::arg("routed_scaling_factor"), py::arg("expert_topk"), py::arg("expert_topp"), py::arg("budget"), py::arg("policy"),
        py::arg("denominator"), py::arg("vote"), py::arg("floor") = 1, py::arg("coverage") = 1.0,
        py::arg("resident").noconvert() = IdArray(0), py::arg("rows_alone") = false,
        py::arg("row_votes").noconvert() = VoteArray(0), py::arg("route_top") = 2, py::arg("route_within") = 12,
        "Selection's fields and `removed` (ascending ids that the budget took from the union) as a dict. logits: float32 [S, E], "
        "C-contiguous; the arguments are the validated fields of RouterSpec and RoutingOptions; resident: int32 ids in [0, E) "
        "that the cache holds, for policies that look at it; rows_alone: every position is a step of its own; row_votes: int64 "
        "[S], "
        "what each position's votes weigh, or empty.");
}

}  // namespace colibri::bindings
