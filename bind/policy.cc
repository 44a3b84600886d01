// Policies of tables: how long rows live, and which keys get one.
#include "table/policy.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "table.h"
#include "table/admission.h"

namespace trireme::bind {

using namespace nb::literals;

void register_policies(nb::module_& m) {
  nb::class_<PolicyConfig>(m, "PolicyConfig",
                           "How long rows live: the values of trireme.policy that the core needs.")
      .def(
          "__init__",
          [](PolicyConfig* self, bool is_scored, double nonclk_coeff, double click_coeff,
             double decay_rate, double delete_threshold,
             std::optional<std::uint32_t> delete_after_unseen_days,
             std::optional<double> embedx_threshold, std::optional<std::uint64_t> ttl_s,
             std::optional<std::uint64_t> max_rows, std::optional<std::uint64_t> max_bytes) {
            new (self) PolicyConfig{.is_scored = is_scored,
                                    .rates = {.nonclk_coeff = nonclk_coeff,
                                              .click_coeff = click_coeff,
                                              .decay_rate = decay_rate},
                                    .delete_threshold = delete_threshold,
                                    .delete_after_unseen_days = delete_after_unseen_days,
                                    .ttl_s = ttl_s,
                                    .embedx_threshold = embedx_threshold,
                                    .max_rows = max_rows,
                                    .max_bytes = max_bytes};
          },
          nb::kw_only(), "is_scored"_a = false, "nonclk_coeff"_a = 0.1, "click_coeff"_a = 1.0,
          "decay_rate"_a = 1.0, "delete_threshold"_a = 0.0,
          "delete_after_unseen_days"_a = nb::none(), "embedx_threshold"_a = nb::none(),
          "ttl_s"_a = nb::none(), "max_rows"_a = nb::none(), "max_bytes"_a = nb::none());

  nb::class_<AdmissionConfig>(m, "AdmissionConfig",
                              "Which keys get a row: an admission filter of trireme.policy.")
      .def(
          "__init__",
          [](AdmissionConfig* self, std::string name, std::uint32_t n,
             std::optional<std::uint64_t> sketch_bytes, double p, double threshold) {
            new (self) AdmissionConfig{.name = std::move(name),
                                       .n = n,
                                       .sketch_bytes = sketch_bytes.value_or(0),
                                       .p = p,
                                       .threshold = threshold};
          },
          nb::kw_only(), "name"_a = "", "n"_a = 1, "sketch_bytes"_a = nb::none(), "p"_a = 1.0,
          "threshold"_a = 0.0,
          "name: count_filter (uses n, sketch_bytes), probability (p), score_filter (threshold), "
          "or empty: every key gets a row.");
}

}  // namespace trireme::bind
