// Strings to keys.
#include "feed/strings.h"

#include <nanobind/stl/string.h>

#include <algorithm>
#include <string>

#include "base/error.h"
#include "bind.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

void hash(Array1<const std::uint8_t> bytes, Array1<const std::int64_t> offsets,
          const std::string& feature, Array1<std::uint64_t> out) {
  if (offsets.size() != out.size() + 1) {
    throw Error(ErrorCode::kBadRequest, "hash_strings: expected one offset more than strings (" +
                                            std::to_string(out.size()) + "), found " +
                                            std::to_string(offsets.size()));
  }
  nb::gil_scoped_release release;
  const auto all = as_span(offsets);
  const auto num_bytes = static_cast<std::int64_t>(bytes.size());
  if (all.front() < 0 || all.back() > num_bytes || !std::is_sorted(all.begin(), all.end())) {
    throw Error(ErrorCode::kBadRequest,
                "hash_strings: expected offsets that do not decrease within 0.." +
                    std::to_string(num_bytes) + ", found " + std::to_string(all.front()) + ".." +
                    std::to_string(all.back()));
  }
  hash_strings({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, all, feature,
               as_span(out));
}

}  // namespace

void register_strings(nb::module_& m) {
  m.def("hash_strings", &hash, "bytes"_a.noconvert(), "offsets"_a.noconvert(), "feature"_a,
        "out"_a.noconvert(),
        R"(Write the key of each string: XXH64(string, seed = XXH64(feature in UTF-8, 0)).

String i is bytes[offsets[i]:offsets[i + 1]].
bytes: (M,) uint8. offsets: (N + 1,) int64, not decreasing, within bytes. out: (N,) uint64.
Raises BadRequest for wrong offsets or sizes.)");
}

}  // namespace trireme::bind
