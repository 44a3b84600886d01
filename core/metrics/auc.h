// The area under the ROC curve from histograms of scores.
//
// Scores fall into T buckets in their order; the area counts a pair within one bucket as half, as
// it does a tie. Histograms of disjoint examples add up, in any order, to that of their union; the
// sums are exact while all weights are integers (or multiples of one power of two) below 2^53.
//
// Buckets are even in the exponent of the score, as floating point is, so that they are fine where
// click models put their scores. Each half of the buckets covers 32 powers of two of a distance d:
// for logits x the halves are x < 0 and x >= 0 and d = |x|, 2^-24..2^8; for probabilities p they
// are p < 1/2, d = p and p >= 1/2, d = 1 - p, both 2^-33..1/2. What lies outside goes to the last
// bucket of its side. With T = 2^18, scores tie when their d differ by less than one part in 4096.
//
// Threads: functions without state. The caller owns the histograms.
#pragma once

#include <span>

namespace trireme {

enum class ScoreKind { kLogit, kProbability };

// Adds B examples. Requires: T even; labels are 0 or 1; scores and weights finite, weights not
// negative, probabilities in [0, 1]. (Any value at all stays within the arrays.)
// Cost: O(B); allocates nothing.
void auc_add(std::span<const float> scores,   // (B,)
             std::span<const float> labels,   // (B,)
             std::span<const float> weights,  // (B,), or empty for 1
             ScoreKind kind,
             std::span<double> positives,            // (T,)
             std::span<double> negatives) noexcept;  // (T,)

// The area, 0..1: the share of pairs (positive, negative) in the right order; NaN if there is none.
double auc_area(std::span<const double> positives, std::span<const double> negatives) noexcept;

}  // namespace trireme
