// Histograms of scores, and what is computed from them: the area under the ROC curve, bucket error.
//
// Scores are sorted into T ordered buckets; scores in one bucket count as tied. Histograms of
// disjoint examples add up, in any order, to that of their union. The sums are exact while all
// weights are integers (or multiples of one power of two) below 2^53.
//
// Buckets are logarithmic in the score, as floating point is, so they are fine where the scores of
// click models are. Each half of the buckets covers 64 powers of two of a distance d: for logits x
// the halves are x < 0 and x >= 0 and d = |x|, 2^-32..2^32; for probabilities p they are p < 1/2, d
// = p and p >= 1/2, d = 1 - p, both 2^-65..1/2. Scores outside go to the last bucket of their side.
// With T = 2^18, scores tie when their d differ by less than one part in 2048.
//
// Threads: functions without state. The caller owns the histograms.
#pragma once

#include <span>

namespace trireme {

enum class ScoreKind { kLogit, kProbability };

// Adds B examples. Requires: T even; labels are 0 or 1; scores and weights finite, weights not
// negative, probabilities in [0, 1]. (No value causes a write outside the arrays.)
// Cost: O(B); allocates nothing.
void histogram_add(std::span<const float> scores,   // (B,)
                   std::span<const float> labels,   // (B,)
                   std::span<const float> weights,  // (B,), or empty for 1
                   ScoreKind kind,
                   std::span<double> positives,            // (T,)
                   std::span<double> negatives) noexcept;  // (T,)

// The area, 0..1: the share of pairs (positive, negative) in the right order; NaN if there is none.
double auc_area(std::span<const double> positives, std::span<const double> negatives) noexcept;

// How far the click rate of groups of examples with similar scores is from their mean score.
//
// Buckets are grouped in order, each with the probability p of its middle. A group ends when
// sqrt((1 - p) / (p * weight)) is below relative_error_max for the mean p of the group. Its click
// rate is then known well enough, and |clicks / (p * weight) - 1| counts with its weight. A group
// whose scores span more than span_max before that is left out. Source: Paddle's bucket error
// (PaddleRec, metric_helper), over finer buckets.
struct BucketErrorLimits {
  double span_max;            // Paddle: 0.01
  double relative_error_max;  // Paddle: 0.05
};

// The weighted mean over the groups; NaN if no group is complete.
double bucket_error(std::span<const double> positives, std::span<const double> negatives,
                    ScoreKind kind, const BucketErrorLimits& limits) noexcept;

}  // namespace trireme
