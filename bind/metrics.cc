// Histograms of scores, exact sums.
#include <nanobind/stl/optional.h>

#include <cmath>
#include <optional>
#include <string>

#include "base/error.h"
#include "bind.h"
#include "metrics/exact_sum.h"
#include "metrics/histogram.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

void check_histograms(const char* function, std::size_t positives, std::size_t negatives) {
  if (positives != negatives || positives < 2 || positives % 2 != 0) {
    throw Error(ErrorCode::kBadRequest,
                std::string(function) + ": expected two histograms of one even size, found " +
                    std::to_string(positives) + " and " + std::to_string(negatives));
  }
}

void add(Array1<const float> scores, Array1<const float> labels,
         std::optional<Array1<const float>> weights, bool from_logits, Array1<double> positives,
         Array1<double> negatives) {
  check_histograms("histogram_add", positives.size(), negatives.size());
  const std::size_t num_weights = weights ? weights->size() : scores.size();
  if (labels.size() != scores.size() || num_weights != scores.size()) {
    throw Error(ErrorCode::kBadRequest,
                "histogram_add: expected as many labels and weights as scores (" +
                    std::to_string(scores.size()) + "), found " + std::to_string(labels.size()) +
                    " and " + std::to_string(num_weights));
  }
  nb::gil_scoped_release release;
  histogram_add(as_span(scores), as_span(labels),
                weights ? as_span(*weights) : std::span<const float>(),
                from_logits ? ScoreKind::kLogit : ScoreKind::kProbability, as_span(positives),
                as_span(negatives));
}

double area(Array1<const double> positives, Array1<const double> negatives) {
  check_histograms("auc_area", positives.size(), negatives.size());
  nb::gil_scoped_release release;
  return auc_area(as_span(positives), as_span(negatives));
}

double error(Array1<const double> positives, Array1<const double> negatives, bool from_logits,
             double span_max, double relative_error_max) {
  check_histograms("bucket_error", positives.size(), negatives.size());
  nb::gil_scoped_release release;
  return bucket_error(as_span(positives), as_span(negatives),
                      from_logits ? ScoreKind::kLogit : ScoreKind::kProbability,
                      {span_max, relative_error_max});
}

void add_exactly(Array1<const double> values, Array1<std::int64_t> limbs) {
  if (limbs.size() != kExactLimbs) {
    throw Error(ErrorCode::kBadRequest, "exact_add: expected " + std::to_string(kExactLimbs) +
                                            " limbs, found " + std::to_string(limbs.size()));
  }
  nb::gil_scoped_release release;
  for (const double value : as_span(values)) {
    if (!std::isfinite(value)) {
      throw Error(ErrorCode::kBadRequest,
                  "exact_add: expected finite values, found " + std::to_string(value));
    }
  }
  exact_add(as_span(values), std::span<std::int64_t, kExactLimbs>(limbs.data(), kExactLimbs));
}

}  // namespace

void register_metrics(nb::module_& m) {
  m.def("histogram_add", &add, "scores"_a.noconvert(), "labels"_a.noconvert(),
        "weights"_a.noconvert().none(), "from_logits"_a, "positives"_a.noconvert(),
        "negatives"_a.noconvert(),
        R"(Add examples to the histograms of the scores of positive and of negative examples.

scores, labels: (B,) float32; labels are 0 or 1. weights: (B,) float32, or None for 1.
from_logits: the scores are logits, otherwise probabilities.
positives, negatives: (T,) float64, T even.
Raises BadRequest if the sizes do not agree.)");
  m.def(
      "auc_area", &area, "positives"_a.noconvert(), "negatives"_a.noconvert(),
      R"(Return the area under the ROC curve, 0 to 1; NaN without a positive or a negative example.

positives, negatives: (T,) float64, from `histogram_add`.
Raises BadRequest unless both have the same even size.)");
  m.def("bucket_error", &error, "positives"_a.noconvert(), "negatives"_a.noconvert(),
        "from_logits"_a, "span_max"_a, "relative_error_max"_a,
        R"(Return the weighted mean of |click rate / mean score - 1| over groups of similar scores.

NaN if there is no complete group. A group is complete when its click rate is known to
relative_error_max; a group whose scores span more than span_max before that is left out.
positives, negatives: (T,) float64, from `histogram_add`.
Raises BadRequest unless both have the same even size.)");
  m.attr("EXACT_LIMBS") = kExactLimbs;
  m.def("exact_add", &add_exactly, "values"_a.noconvert(), "limbs"_a.noconvert(),
        R"(Add values to an exact sum, and carry.

values: (B,) float64, finite. limbs: (EXACT_LIMBS,) int64, the digits of the sum to the base 2^32,
lowest first, in units of 2^-1074.
Raises BadRequest for another number of limbs, or a value that is not finite.)");
}

}  // namespace trireme::bind
