#include "optim/rule.h"

#include <array>
#include <cmath>

#include "base/error.h"
#include "optim/rule_makers.h"

namespace trireme {
namespace {

// A rule by name, and which options of RuleConfig it has.
struct Entry {
  const char* name;
  Rule (*make)(const RuleConfig&);
  bool has_shared = false;
  bool has_bias_correction = false;
  bool has_initial_accumulator = false;
  bool has_nesterov = false;
};

constexpr std::array kRules = {
    Entry{.name = "sgd", .make = make_sgd},
    Entry{.name = "momentum", .make = make_momentum, .has_nesterov = true},
    Entry{.name = "adagrad",
          .make = make_adagrad,
          .has_shared = true,
          .has_initial_accumulator = true},
    Entry{.name = "adam", .make = make_adam, .has_shared = true, .has_bias_correction = true},
    Entry{.name = "ftrl", .make = make_ftrl},
    Entry{.name = "count", .make = make_count},
    Entry{.name = "fleet_sgd", .make = make_fleet_sgd},
    Entry{.name = "fleet_adagrad", .make = make_fleet_adagrad, .has_shared = true},
    Entry{.name = "fleet_adagrad_v2", .make = make_fleet_adagrad_v2},
    Entry{.name = "fleet_adam", .make = make_fleet_adam},
    Entry{.name = "fleet_shared_adam", .make = make_fleet_shared_adam},
};

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorCode::kBadRequest, what); }

void check_options(const Entry& rule, const RuleConfig& config) {
  const std::string subject = "rule " + config.name + ": ";
  if (config.shared && !rule.has_shared) refuse(subject + "expected shared = false, found true");
  if (config.nesterov && !rule.has_nesterov) {
    refuse(subject + "expected nesterov = false, found true");
  }
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
  check_value(momentum >= 0 && momentum < 1, "momentum", "a number in [0, 1)", momentum);
  check_value(dampening >= 0 && dampening < 1, "dampening", "a number in [0, 1)", dampening);
  check_value(is_finite_float(beta) && beta >= 0, "beta", "a finite number >= 0", beta);
  check_value(is_finite_float(l1) && l1 >= 0, "l1", "a finite number >= 0", l1);
  check_value(is_finite_float(l2) && l2 >= 0, "l2", "a finite number >= 0", l2);
  check_value(is_finite_float(initial_g2sum) && initial_g2sum >= 0, "initial_g2sum",
              "a finite number >= 0", initial_g2sum);
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
