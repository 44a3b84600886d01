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
        "Add examples to two histograms of scores. scores, labels, weights: (B,) float32, labels "
        "0 or 1, weights may be None; positives, negatives: (T,) float64, T even.");
  m.def("auc_area", &area, "positives"_a.noconvert(), "negatives"_a.noconvert(),
        "Area under the ROC curve, 0..1; NaN without a pair. positives, negatives: (T,) float64.");
  m.def("bucket_error", &error, "positives"_a.noconvert(), "negatives"_a.noconvert(),
        "from_logits"_a, "span_max"_a, "relative_error_max"_a,
        "Weighted mean of |click rate / mean score - 1| of groups of like scores; NaN without a "
        "group. positives, negatives: (T,) float64.");
  m.attr("EXACT_LIMBS") = kExactLimbs;
  m.def("exact_add", &add_exactly, "values"_a.noconvert(), "limbs"_a.noconvert(),
        "Add finite values (B,) float64 to an exact sum, (EXACT_LIMBS,) int64 digits to the base "
        "2^32 in units of 2^-1074, and carry.");
}

}  // namespace trireme::bind
