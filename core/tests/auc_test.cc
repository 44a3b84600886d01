// AUC histograms: order of the buckets, agreement with the rank statistic, values out of range.
#include "metrics/auc.h"

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "check.h"

using namespace trireme;

namespace {

struct Histograms {
  explicit Histograms(std::size_t size = 1 << 12) : positives(size), negatives(size) {}
  void add(const std::vector<float>& scores, const std::vector<float>& labels, ScoreKind kind,
           const std::vector<float>& weights = {}) {
    auc_add(scores, labels, weights, kind, positives, negatives);
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
      const bool is_far = scores[i + 1] - scores[i] > 1e-4f && std::fabs(scores[i]) < 200;
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

}  // namespace

int main() {
  higher_scores_never_go_to_lower_buckets();
  any_bits_stay_within_the_histogram();
  area_is_the_share_of_pairs_in_order();
  return 0;
}
