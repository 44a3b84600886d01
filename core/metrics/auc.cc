#include "metrics/auc.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace trireme {
namespace {

constexpr int kMantissaBits = 23;
constexpr int kOctavesLog2 = 5;  // 32 powers of two per half
constexpr std::int64_t kRange = std::int64_t{1} << (kMantissaBits + kOctavesLog2);

// Bucket 0..half-1 of a distance: its bits, which are in order, relative to those of 2^lowest.
std::size_t bucket_of_distance(float distance, int lowest, std::int64_t half) noexcept {
  const std::int64_t low = static_cast<std::int64_t>(127 + lowest) << kMantissaBits;
  const std::int64_t bits = std::bit_cast<std::int32_t>(distance);
  return static_cast<std::size_t>(std::clamp<std::int64_t>(bits - low, 0, kRange - 1) * half >>
                                  (kMantissaBits + kOctavesLog2));
}

std::size_t bucket_of_logit(float x, std::size_t half) noexcept {
  const std::size_t i = bucket_of_distance(x < 0 ? -x : x, -24, static_cast<std::int64_t>(half));
  return x < 0 ? half - 1 - i : half + i;
}

std::size_t bucket_of_probability(float p, std::size_t half) noexcept {
  const bool is_low = p < 0.5f;
  const std::size_t i =
      bucket_of_distance(is_low ? p : 1.0f - p, -33, static_cast<std::int64_t>(half));
  return is_low ? i : 2 * half - 1 - i;
}

}  // namespace

void auc_add(std::span<const float> scores, std::span<const float> labels,
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

}  // namespace trireme
