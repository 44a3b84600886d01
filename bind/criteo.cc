// The parser of Criteo's text.
#include "feed/criteo.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "base/error.h"
#include "bind.h"

namespace trireme::bind {
namespace {

using namespace nb::literals;

// Hands an array of the core over to NumPy, without a copy.
template <class Rank, class T>
nb::ndarray<nb::numpy, T, Rank> to_numpy(std::unique_ptr<T[]> data,
                                         std::initializer_list<std::size_t> shape) {
  T* const pointer = data.get();
  nb::capsule owner(pointer, [](void* p) noexcept { delete[] static_cast<T*>(p); });
  data.release();
  return nb::ndarray<nb::numpy, T, Rank>(pointer, shape, owner);
}

std::size_t parse(CriteoParser& parser, Array1<const std::uint8_t> text, std::size_t limit,
                  bool is_end, Pool& pool) {
  nb::gil_scoped_release release;
  return parser.parse({reinterpret_cast<const char*>(text.data()), text.size()}, limit, is_end,
                      pool);
}

using Broken = std::tuple<std::size_t, int, std::string, std::string>;

std::optional<Broken> broken_line(const CriteoParser& parser) {
  const auto& broken = parser.broken_line();
  if (!broken) return std::nullopt;
  return Broken(broken->offset, broken->field, broken->expected, broken->found);
}

using Columns = std::tuple<nb::ndarray<nb::numpy, float, nb::ndim<1>>,          // labels (B,)
                           nb::ndarray<nb::numpy, float, nb::ndim<2>>,          // dense (B, 13)
                           nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>,   // keys (N,)
                           nb::ndarray<nb::numpy, std::int64_t, nb::ndim<1>>>;  // (26*B + 1,)

Columns take(CriteoParser& parser) {
  CriteoBatch batch;
  {
    nb::gil_scoped_release release;
    batch = parser.take();
  }
  const std::size_t size = batch.num_examples;
  return {to_numpy<nb::ndim<1>>(std::move(batch.labels), {size}),
          to_numpy<nb::ndim<2>>(std::move(batch.dense), {size, CriteoParser::kNumDense}),
          to_numpy<nb::ndim<1>>(std::move(batch.values), {batch.num_values}),
          to_numpy<nb::ndim<1>>(std::move(batch.offsets), {size * CriteoParser::kNumSparse + 1})};
}

}  // namespace

void register_criteo(nb::module_& m) {
  nb::class_<CriteoParser>(m, "CriteoParser",
                           "Criteo's tab-separated text into batches; one thread at a time.")
      .def(
          "__init__",
          [](CriteoParser* self, std::int64_t batch_size, bool log1p, double scale,
             bool skip_broken) {
            if (batch_size < 1) {
              throw Error(
                  ErrorCode::kBadRequest,
                  "CriteoParser: expected batch_size 1..2^24, found " + std::to_string(batch_size));
            }
            new (self)
                CriteoParser({static_cast<std::size_t>(batch_size), log1p, scale, skip_broken});
          },
          "batch_size"_a, "log1p"_a = true, "scale"_a = 0.125, "skip_broken"_a = false,
          "Dense value of an integer x: scale * log(1 + max(x, 0)), or scale * x without log1p.")
      .def("parse", &parse, "text"_a.noconvert(), "limit"_a, "is_end"_a, "pool"_a,
           "Parse lines of text ((N,) uint8, at the start of a line) until the batch is full, the "
           "next line begins at `limit` or later, or the rest is not a whole line (`is_end`: it is "
           "the last). Returns the bytes done with. Give more than MAX_LINE_BYTES, or the end.")
      .def_prop_ro("num_examples", &CriteoParser::num_examples, "Examples in the batch so far.")
      .def_prop_ro("is_full", &CriteoParser::is_full)
      .def_prop_ro("broken_line", &broken_line,
                   "First broken line of the latest parse(): (offset in its text, field 0..39 or "
                   "-1, what was expected, what was found), or None.")
      .def_prop_ro("num_broken_lines", &CriteoParser::num_broken_lines)
      .def("take", &take,
           "The examples parsed since the last take(): labels (B,) float32, dense (B, 13) float32, "
           "keys (N,) int64, offsets (26*B + 1,) int64, feature-major.")
      .def_ro_static("MAX_LINE_BYTES", &CriteoParser::kMaxLineBytes);
}

}  // namespace trireme::bind
