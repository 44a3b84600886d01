// Initial weights: a pure function of (seed, key, position in the row), bit-equal on every machine.
#pragma once

#include <cstdint>
#include <string>

namespace trireme {

class Initializer {
 public:
  // uniform: in [a, b).  normal: mean a, standard deviation b.  constant: a (b must be 0).
  // tail_uniform: 0 for the first weight of the row, the others in [a, b).
  // Errors: kBadRequest, naming the value.
  Initializer(const std::string& name, float a, float b, std::uint64_t seed);

  // Writes the initial weights of a key. weights: (dim).
  void fill(std::uint64_t key, float* weights, int dim) const noexcept;

 private:
  enum class Kind { kUniform, kNormal, kConstant, kTailUniform };
  Kind kind_;
  float a_;
  float b_;
  std::uint64_t seed_;
};

// The quantile function of the standard normal distribution; 0 < u < 1; relative error about 1e-7.
// It uses only + - * / and sqrt, which IEEE 754 rounds exactly, so every machine computes the same
// bits.
double normal_quantile(double u) noexcept;

}  // namespace trireme
