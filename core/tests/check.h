// Shared by the C++ tests: CHECK with values printed, and a seeded random source.
//
// A test is a plain executable: it returns 0, or prints the failure and exits with 1.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>

#include "base/hash.h"

namespace trireme::test {

template <class A, class B>
void check_equal(const A& found, const B& expected, const char* what, const char* file, int line) {
  if (found == expected) return;
  std::cerr << file << ":" << line << ": " << what << ": expected " << expected << ", found "
            << found << std::endl;
  std::exit(1);
}

// splitmix64 as a stream: the same numbers on every machine.
class Random {
 public:
  explicit Random(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() { return mix64(state_ += 0x9E3779B97F4A7C15ULL); }
  std::uint64_t below(std::uint64_t bound) { return next() % bound; }

 private:
  std::uint64_t state_;
};

// The seed of a random test: argv[1], or 1; printed, so that a failure can be repeated.
inline std::uint64_t seed_of(int argc, char** argv) {
  const std::uint64_t seed = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 1;
  std::cout << "seed " << seed << " (repeat: " << argv[0] << " " << seed << ")" << std::endl;
  return seed;
}

}  // namespace trireme::test

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::cerr << __FILE__ << ":" << __LINE__ << ": " << #condition << std::endl; \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

#define CHECK_EQUAL(found, expected) \
  ::trireme::test::check_equal((found), (expected), #found, __FILE__, __LINE__)
