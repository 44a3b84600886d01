// Errors, the thread pool, the allocator, the bucket of a key and the test of finite numbers.
#include <nanobind/stl/optional.h>

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <new>
#include <optional>
#include <vector>

#include "base/error.h"
#include "base/finite.h"
#include "base/hash.h"
#include "base/pool.h"
#include "bind.h"

namespace trireme::bind {

using namespace nb::literals;

namespace {

void raise(ErrorCode code, const char* what) {
  nb::object type =
      nb::module_::import_("trireme.errors").attr("class_of_code")(static_cast<int>(code));
  PyErr_SetString(type.ptr(), what);
}

}  // namespace

// The classes and their documentation are in trireme.errors. Only this function maps a code to a
// class.
void register_errors(nb::module_&) {
  nb::register_exception_translator([](const std::exception_ptr& p, void*) {
    try {
      std::rethrow_exception(p);
    } catch (const Error& e) {
      raise(e.code(), e.what());
    } catch (const std::bad_alloc&) {
      raise(ErrorCode::kResourceExhausted,
            "the core: expected memory for a call's scratch or result, found none");
    }
  });
}

namespace {

// glibc returns large blocks to the system as soon as they are freed. A training step frees and
// allocates the same blocks again and again, and the page faults take a large part of the step's
// time.
bool keep_freed_memory(int bytes_max) {
#ifdef __GLIBC__
  // The maximum that glibc allows; larger blocks are always returned.
  constexpr int kLargestMapped = 32 << 20;
  return mallopt(M_MMAP_THRESHOLD, kLargestMapped) == 1 &&
         mallopt(M_TRIM_THRESHOLD, bytes_max) == 1;
#else
  static_cast<void>(bytes_max);
  return false;
#endif
}

}  // namespace

void register_base(nb::module_& m) {
  m.attr("NUM_BUCKETS") = kNumBuckets;

  nb::class_<Pool>(m, "Pool",
                   "Threads that the core's functions share. The calling thread works too.")
      .def(nb::init<int>(), "threads"_a,
           "threads: how many threads work on one call, including the caller; at least 1.\n"
           "Raises BadRequest for fewer; ResourceExhausted if the system refuses threads.")
      .def_prop_ro("threads", &Pool::threads, "Threads that work on one call.");

  m.def(
      "buckets",
      [](Array1<const std::uint64_t> keys, Array1<std::uint16_t> out) {
        if (out.size() != keys.size()) {
          throw Error(ErrorCode::kBadRequest, "buckets: keys has " + std::to_string(keys.size()) +
                                                  " elements, out has " +
                                                  std::to_string(out.size()));
        }
        nb::gil_scoped_release release;
        for (std::size_t i = 0; i < keys.size(); ++i) {
          out.data()[i] = static_cast<std::uint16_t>(bucket_of(keys.data()[i]));
        }
      },
      "keys"_a.noconvert(), "out"_a.noconvert(),
      R"(Write the bucket of each key, 0 to NUM_BUCKETS - 1.

keys: (N,) uint64. out: (N,) uint16.
Raises BadRequest if the sizes differ.)");

  m.def(
      "first_not_finite",
      [](Array1<const float> values) -> std::optional<std::size_t> {
        // To hand the interpreter over takes longer than to check a small array.
        constexpr std::size_t kSmall = std::size_t{1} << 15;
        std::optional<nb::gil_scoped_release> release;
        if (values.size() > kSmall) release.emplace();
        const std::size_t first = first_not_finite({values.data(), values.size()});
        return first < values.size() ? std::optional(first) : std::nullopt;
      },
      "values"_a.noconvert(),
      R"(Return the position of the first value that is NaN or infinite; None if all are finite.

values: (N,) float32.)");

  m.def("keep_freed_memory", &keep_freed_memory, "bytes_max"_a,
        R"(Keep freed memory in the process instead of returning it to the system at once.

bytes_max: about how many bytes the allocator keeps.
Returns False if the C library has no such setting.)");

  m.def(
      "borrow",
      [](nb::object array) {
        auto view = nb::cast<nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>>(array,
                                                                                 /*convert=*/false);
        std::vector<std::size_t> shape;
        for (std::size_t i = 0; i < view.ndim(); ++i) {
          shape.push_back(view.shape(i));
        }
        return nb::ndarray<nb::numpy>(const_cast<void*>(view.data()), shape.size(), shape.data(),
                                      array, nullptr, view.dtype());
      },
      "array"_a,
      R"(Return a writable array over the same memory, without a copy.

torch has no read-only tensors and warns about read-only arrays. Write to the result only if nobody
else reads the memory.
array: C-contiguous, of any shape and type; the result keeps it alive.)");
}

}  // namespace trireme::bind
