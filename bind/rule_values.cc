// The values of update rules.
#include <cstdint>
#include <limits>

#include "optim/rule.h"
#include "table.h"

namespace trireme::bind {

using namespace nb::literals;

void register_rule_values(nb::module_& m) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  nb::class_<RuleValues>(m, "RuleValues",
                         "The numbers of one step of an update rule; they travel with a push.")
      .def(
          "__init__",
          [](RuleValues* self, double lr, double weight_decay, double eps, double beta1,
             double beta2, double momentum, double dampening, double beta, double l1, double l2,
             double initial_g2sum, double lower, double upper, std::int64_t step) {
            const RuleValues values{.lr = lr,
                                    .weight_decay = weight_decay,
                                    .eps = eps,
                                    .beta1 = beta1,
                                    .beta2 = beta2,
                                    .momentum = momentum,
                                    .dampening = dampening,
                                    .beta = beta,
                                    .l1 = l1,
                                    .l2 = l2,
                                    .initial_g2sum = initial_g2sum,
                                    .lower = lower,
                                    .upper = upper,
                                    .step = step};
            values.check();
            new (self) RuleValues(values);
          },
          nb::kw_only(), "lr"_a, "weight_decay"_a = 0.0, "eps"_a = 1e-10, "beta1"_a = 0.9,
          "beta2"_a = 0.999, "momentum"_a = 0.0, "dampening"_a = 0.0, "beta"_a = 1.0, "l1"_a = 0.0,
          "l2"_a = 0.0, "initial_g2sum"_a = 3.0, "lower"_a = -kInfinity, "upper"_a = kInfinity,
          "step"_a = 1,
          R"(weight_decay: added to the gradient, g += weight_decay * w.

lower, upper: the weights are clipped to [lower, upper] after the step.
step: the step's number, from 1, for Adam's global bias correction.
Each update rule uses the other numbers that have its names.
Raises BadRequest, naming the value.)")
      .def_ro("lr", &RuleValues::lr)
      .def_ro("weight_decay", &RuleValues::weight_decay)
      .def_ro("eps", &RuleValues::eps)
      .def_ro("beta1", &RuleValues::beta1)
      .def_ro("beta2", &RuleValues::beta2)
      .def_ro("momentum", &RuleValues::momentum)
      .def_ro("dampening", &RuleValues::dampening)
      .def_ro("beta", &RuleValues::beta)
      .def_ro("l1", &RuleValues::l1)
      .def_ro("l2", &RuleValues::l2)
      .def_ro("initial_g2sum", &RuleValues::initial_g2sum)
      .def_ro("lower", &RuleValues::lower)
      .def_ro("upper", &RuleValues::upper)
      .def_ro("step", &RuleValues::step);
}

}  // namespace trireme::bind
