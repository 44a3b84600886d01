// Shared by the C++ tests: CHECK with values printed, calls that must be refused, and a seeded
// random source.
//
// A test is a plain executable: it returns 0, or prints the failure and exits with 1.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <string>
#include <vector>

#include "base/error.h"
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

inline std::vector<std::uint64_t> distinct_keys(Random& random, std::size_t n) {
  std::vector<std::uint64_t> keys;
  for (std::uint64_t key = random.next(); keys.size() < n; key += 1 + random.below(1000)) {
    keys.push_back(key);
  }
  return keys;
}

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

namespace trireme::test {

template <class Call>
void check_refused(const Call& call, const std::string& part_of_message = "") {
  try {
    call();
  } catch (const Error& error) {
    CHECK(error.code() == ErrorCode::kBadRequest);
    if (std::string(error.what()).find(part_of_message) == std::string::npos) {
      CHECK_EQUAL(std::string(error.what()), part_of_message);
    }
    return;
  }
  CHECK_EQUAL(std::string("no error"), "an error with: " + part_of_message);
}

}  // namespace trireme::test
