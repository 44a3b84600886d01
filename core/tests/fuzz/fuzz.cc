// A libFuzzer target for the parser of one format, FUZZ_FORMAT.
#include <cstddef>
#include <cstdint>

#include "parsing.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  trireme::test::check_input(FUZZ_FORMAT, {reinterpret_cast<const char*>(data), size});
  return 0;
}
