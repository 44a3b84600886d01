#include "optim/rule.h"

#include <array>
#include <cmath>

#include "base/error.h"
#include "optim/rules.h"

namespace trireme {
namespace {

// A rule by name, and which options of RuleConfig it has.
struct Entry {
  const char* name;
  Rule (*make)(const RuleConfig&);
  bool has_shared;
  bool has_bias_correction;
  bool has_initial_accumulator;
};

constexpr std::array kRules = {
    Entry{"sgd", make_sgd, false, false, false},
    Entry{"adagrad", make_adagrad, true, false, true},
    Entry{"adam", make_adam, false, true, false},
    Entry{"count", make_count, false, false, false},
    Entry{"fleet_sgd", make_fleet_sgd, false, false, false},
    Entry{"fleet_adagrad", make_fleet_adagrad, true, false, false},
    Entry{"fleet_adam", make_fleet_adam, false, false, false},
};

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorCode::kBadRequest, what); }

void check_options(const Entry& rule, const RuleConfig& config) {
  const std::string subject = "rule " + config.name + ": ";
  if (config.shared && !rule.has_shared) refuse(subject + "expected shared = false, found true");
  if (config.bias_correction != "global" && !rule.has_bias_correction) {
    refuse(subject + "expected no bias_correction, found " + config.bias_correction);
  }
  if (config.bias_correction != "global" && config.bias_correction != "row") {
    refuse(subject + "expected bias_correction global or row, found " + config.bias_correction);
  }
  if (config.initial_accumulator != 0.0F && !rule.has_initial_accumulator) {
    refuse(subject + "expected no initial_accumulator, found " +
           std::to_string(config.initial_accumulator));
  }
  if (!(config.initial_accumulator >= 0.0F && std::isfinite(config.initial_accumulator))) {
    refuse(subject + "expected a finite initial_accumulator >= 0, found " +
           std::to_string(config.initial_accumulator));
  }
}

void check_value(bool ok, const char* name, const char* range, double value) {
  if (!ok) {
    refuse(std::string("RuleValues.") + name + ": expected " + range + ", found " +
           std::to_string(value));
  }
}

// Rules compute in float: a number that no float holds would turn weights into NaN.
bool is_finite_float(double value) noexcept { return std::isfinite(static_cast<float>(value)); }

}  // namespace

void RuleValues::check() const {
  check_value(is_finite_float(lr), "lr", "a finite number", lr);
  check_value(is_finite_float(weight_decay) && weight_decay >= 0, "weight_decay",
              "a finite number >= 0", weight_decay);
  check_value(is_finite_float(eps) && eps >= 0, "eps", "a finite number >= 0", eps);
  check_value(beta1 >= 0 && beta1 < 1, "beta1", "a number in [0, 1)", beta1);
  check_value(beta2 >= 0 && beta2 < 1, "beta2", "a number in [0, 1)", beta2);
  check_value(!std::isnan(upper), "upper", "a number", upper);
  check_value(lower <= upper, "lower", "a number <= upper", lower);
  check_value(step >= 1, "step", "a number >= 1", static_cast<double>(step));
}

Rule make_rule(const RuleConfig& config) {
  std::string names;
  for (const Entry& rule : kRules) {
    if (config.name == rule.name) {
      check_options(rule, config);
      return rule.make(config);
    }
    names += std::string(names.empty() ? "" : ", ") + rule.name;
  }
  refuse("rule: expected one of " + names + ", found " + config.name);
}

}  // namespace trireme
