// The functions that make each rule: one per file. make_rule calls them after it has checked the
// options.
#pragma once

#include "optim/rule.h"

namespace trireme {

Rule make_sgd(const RuleConfig& config);
Rule make_momentum(const RuleConfig& config);
Rule make_adagrad(const RuleConfig& config);
Rule make_adam(const RuleConfig& config);
Rule make_ftrl(const RuleConfig& config);
Rule make_count(const RuleConfig& config);
Rule make_fleet_sgd(const RuleConfig& config);
Rule make_fleet_adagrad(const RuleConfig& config);
Rule make_fleet_adagrad_v2(const RuleConfig& config);
Rule make_fleet_adam(const RuleConfig& config);
Rule make_fleet_shared_adam(const RuleConfig& config);

}  // namespace trireme
