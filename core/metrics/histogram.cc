#include "metrics/histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace trireme {
namespace {

constexpr int kMantissaBits = 23;
constexpr int kOctavesLog2 = 6;                              // 64 powers of two per half
constexpr int kLogitLowest = -32, kProbabilityLowest = -65;  // powers of two
constexpr std::int64_t kRange = std::int64_t{1} << (kMantissaBits + kOctavesLog2);

// Bucket 0..half-1 of a distance: its bits, which are in order, relative to those of 2^lowest.
std::size_t bucket_of_distance(float distance, int lowest, std::int64_t half) noexcept {
  const std::int64_t low = static_cast<std::int64_t>(127 + lowest) << kMantissaBits;
  const std::int64_t bits = std::bit_cast<std::int32_t>(distance);
  return static_cast<std::size_t>(std::clamp<std::int64_t>(bits - low, 0, kRange - 1) * half >>
                                  (kMantissaBits + kOctavesLog2));
}

std::size_t bucket_of_logit(float x, std::size_t half) noexcept {
  const std::size_t i =
      bucket_of_distance(x < 0 ? -x : x, kLogitLowest, static_cast<std::int64_t>(half));
  return x < 0 ? half - 1 - i : half + i;
}

std::size_t bucket_of_probability(float p, std::size_t half) noexcept {
  const bool is_low = p < 0.5f;
  const std::size_t i = bucket_of_distance(is_low ? p : 1.0f - p, kProbabilityLowest,
                                           static_cast<std::int64_t>(half));
  return is_low ? i : 2 * half - 1 - i;
}

// The distance in the middle of bucket i of a half.
double distance_of_bucket(std::size_t i, int lowest, std::size_t half) noexcept {
  const std::int64_t low = static_cast<std::int64_t>(127 + lowest) << kMantissaBits;
  const double middle = (static_cast<double>(i) + 0.5) / static_cast<double>(half);
  const auto above = static_cast<std::int64_t>(middle * static_cast<double>(kRange));
  return std::bit_cast<float>(static_cast<std::int32_t>(low + above));
}

// The probability in the middle of bucket i of 2 * half.
double probability_of_bucket(std::size_t i, ScoreKind kind, std::size_t half) noexcept {
  const bool is_low = i < half;
  if (kind == ScoreKind::kProbability) {
    const double d = distance_of_bucket(is_low ? i : 2 * half - 1 - i, kProbabilityLowest, half);
    return is_low ? d : 1 - d;
  }
  const double d = distance_of_bucket(is_low ? half - 1 - i : i - half, kLogitLowest, half);
  return 1 / (1 + std::exp(is_low ? d : -d));
}

}  // namespace

void histogram_add(std::span<const float> scores, std::span<const float> labels,
                   std::span<const float> weights, ScoreKind kind, std::span<double> positives,
                   std::span<double> negatives) noexcept {
  const std::size_t half = positives.size() / 2;
  for (std::size_t b = 0; b < scores.size(); ++b) {
    const std::size_t i = kind == ScoreKind::kLogit ? bucket_of_logit(scores[b], half)
                                                    : bucket_of_probability(scores[b], half);
    (labels[b] != 0 ? positives : negatives)[i] += weights.empty() ? 1.0 : weights[b];
  }
}

double auc_area(std::span<const double> positives, std::span<const double> negatives) noexcept {
  double area = 0, positives_sum = 0, negatives_below = 0;
  for (std::size_t i = 0; i < positives.size(); ++i) {
    area += positives[i] * (negatives_below + 0.5 * negatives[i]);
    positives_sum += positives[i];
    negatives_below += negatives[i];
  }
  const double pairs = positives_sum * negatives_below;
  return pairs > 0 ? area / pairs : std::numeric_limits<double>::quiet_NaN();
}

double bucket_error(std::span<const double> positives, std::span<const double> negatives,
                    ScoreKind kind, const BucketErrorLimits& limits) noexcept {
  double error_sum = 0, weight_sum = 0;
  double begin = -1, weight = 0, expected = 0, clicks = 0;  // of the group; begin < 0: no group
  for (std::size_t i = 0; i < positives.size(); ++i) {
    const double here = positives[i] + negatives[i];
    if (here == 0) continue;
    const double p = probability_of_bucket(i, kind, positives.size() / 2);
    if (begin < 0 || p - begin > limits.span_max) {
      begin = p;
      weight = expected = clicks = 0;
    }
    weight += here;
    expected += p * here;
    clicks += positives[i];
    if (std::sqrt((1 - expected / weight) / expected) < limits.relative_error_max) {
      error_sum += std::fabs(clicks / expected - 1) * weight;
      weight_sum += weight;
      begin = -1;
    }
  }
  return weight_sum > 0 ? error_sum / weight_sum : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace trireme
