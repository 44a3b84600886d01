// The one error type of the core, with the codes that also travel on the wire and name the classes
// in errors.py.
//
// Faults of users, peers and disks are thrown as Error at the edges of the core; the inner loops
// are noexcept. Programming errors fail a TRIREME_CHECK, which stays on in release builds and ends
// the process. Input from outside must never reach a TRIREME_CHECK.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <utility>

namespace trireme {

// Permanent numbers and names: they are written to disk and sent between versions.
enum class ErrorCode : int {
  kBadRequest = 1,
  kWrongMap = 2,
  kUnknownTable = 3,
  kSchemaMismatch = 4,
  kNotReady = 5,
  kFenced = 6,
  kResourceExhausted = 7,
  kCorruption = 8,
  kUnavailable = 9,
  kDeadlineExceeded = 10,
  kInternal = 11,
  kLeased = 12,
};

class Error : public std::runtime_error {
 public:
  // Message form: "Subject.method: what was expected, what was found".
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

[[noreturn]] inline void check_failed(const char* file, int line, const char* what) noexcept {
  std::fprintf(stderr, "%s:%d: check failed: %s\n", file, line, what);
  std::abort();
}

}  // namespace trireme

#define TRIREME_CHECK(condition)                                               \
  do {                                                                         \
    if (!(condition)) ::trireme::check_failed(__FILE__, __LINE__, #condition); \
  } while (false)
