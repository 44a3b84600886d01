// Histograms: order of the buckets, the rank statistic, values out of range. Exact sums.
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"
#include "metrics/exact_sum.h"
#include "metrics/histogram.h"

using namespace trireme;

namespace {

struct Histograms {
  explicit Histograms(std::size_t size = 1 << 12) : positives(size), negatives(size) {}
  void add(const std::vector<float>& scores, const std::vector<float>& labels, ScoreKind kind,
           const std::vector<float>& weights = {}) {
    histogram_add(scores, labels, weights, kind, positives, negatives);
  }
  double area() const { return auc_area(positives, negatives); }
  std::vector<double> positives, negatives;
};

void higher_scores_never_go_to_lower_buckets() {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> logits = {-inf,   -1e30f, -300.f, -5.f, -1.f,  -1e-3f, -1e-30f,
                                     1e-30f, 1e-3f,  1.f,    5.f,  300.f, 1e30f,  inf};
  const std::vector<float> probabilities = {0.f,  1e-38f, 1e-9f, 1e-3f,   0.1f,      0.4999f,
                                            0.5f, 0.6f,   0.9f,  0.9999f, 0.999999f, 1.f};
  for (const auto kind : {ScoreKind::kLogit, ScoreKind::kProbability}) {
    const auto& scores = kind == ScoreKind::kLogit ? logits : probabilities;
    for (std::size_t i = 0; i + 1 < scores.size(); ++i) {
      Histograms h;
      h.add({scores[i], scores[i + 1]}, {0, 1}, kind);
      CHECK(h.area() >= 0.5);
      const bool is_far = scores[i + 1] - scores[i] > 1e-4f && std::fabs(scores[i]) < 1e9;
      if (is_far) CHECK_EQUAL(h.area(), 1.0);
    }
  }
}

void any_bits_stay_within_the_histogram() {
  test::Random random(1);
  for (const std::size_t size : {2, 6, 1000}) {
    Histograms h(size);
    for (int i = 0; i < 20000; ++i) {
      const float score = std::bit_cast<float>(static_cast<std::uint32_t>(random.next()));
      h.add({score}, {1}, i % 2 ? ScoreKind::kLogit : ScoreKind::kProbability);
    }
    double sum = 0;
    for (const double count : h.positives) sum += count;
    CHECK_EQUAL(sum, 20000.0);
  }
}

void area_is_the_share_of_pairs_in_order() {
  Histograms h;
  h.add({0.1f, 0.4f, 0.35f, 0.8f}, {0, 0, 1, 1}, ScoreKind::kProbability);
  CHECK_EQUAL(h.area(), 0.75);
  Histograms weighted;
  weighted.add({-1, 0.5f, 0.25f, 2}, {0, 0, 1, 1}, ScoreKind::kLogit, {1, 2, 3, 1});
  CHECK_EQUAL(weighted.area(), (3.0 * 1 + 1.0 * 3) / (4.0 * 3));
  Histograms tie;
  tie.add({0.3f, 0.3f}, {0, 1}, ScoreKind::kProbability);
  CHECK_EQUAL(tie.area(), 0.5);
  CHECK(std::isnan(Histograms().area()));
}

void bucket_error_counts_complete_groups_only() {
  const BucketErrorLimits limits{0.01, 0.05};
  Histograms h(1 << 18);
  // sqrt(0.5 / (0.5 * n)) is below 0.05 from n = 401 on.
  for (int i = 0; i < 396; ++i) h.add({0.f}, {i % 4 == 0 ? 1.f : 0.f}, ScoreKind::kLogit);
  CHECK(std::isnan(bucket_error(h.positives, h.negatives, ScoreKind::kLogit, limits)));
  for (int i = 0; i < 8; ++i) h.add({0.f}, {0.f}, ScoreKind::kLogit);
  const double error = bucket_error(h.positives, h.negatives, ScoreKind::kLogit, limits);
  CHECK(std::fabs(error - (1 - 2 * 99.0 / 404)) < 1e-6);
  // Too few at 0.1 for their own group, and too far from 0.5 to join that one.
  h.add({-2.197f}, {1.f}, ScoreKind::kLogit);
  CHECK_EQUAL(bucket_error(h.positives, h.negatives, ScoreKind::kLogit, limits), error);
}

using Limbs = std::vector<std::int64_t>;

Limbs sum_of(const std::vector<double>& values) {
  Limbs limbs(kExactLimbs);
  exact_add(values, std::span<std::int64_t, kExactLimbs>(limbs));
  return limbs;
}

void exact_sums_forget_nothing_in_any_order() {
  const double largest = std::numeric_limits<double>::max();
  const double smallest = std::numeric_limits<double>::denorm_min();
  const Limbs zero(kExactLimbs);
  CHECK(sum_of({}) == zero);
  CHECK(sum_of({largest, smallest, -largest, -smallest}) == zero);
  CHECK(sum_of({1e300, 1.0, -1e300}) == sum_of({1.0}));
  CHECK(sum_of({-smallest}) != sum_of({smallest}));
  test::Random random(2);
  std::vector<double> values;
  Limbs one_by_one(kExactLimbs);
  for (int i = 0; i < 10000; ++i) {
    const double value = std::bit_cast<double>(random.next());
    if (!std::isfinite(value)) continue;
    values.insert(values.begin() + static_cast<std::ptrdiff_t>(random.next() % (values.size() + 1)),
                  value);
    exact_add(std::span(&value, 1), std::span<std::int64_t, kExactLimbs>(one_by_one));
  }
  CHECK(sum_of(values) == one_by_one);
}

}  // namespace

int main() {
  bucket_error_counts_complete_groups_only();
  exact_sums_forget_nothing_in_any_order();
  higher_scores_never_go_to_lower_buckets();
  any_bits_stay_within_the_histogram();
  area_is_the_share_of_pairs_in_order();
  return 0;
}
