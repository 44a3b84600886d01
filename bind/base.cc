// Errors, the thread pool, the allocator and the bucket of a key.
#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <new>

#include "base/error.h"
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
                   "Threads shared by the calls of the core; the caller of a call works too.")
      .def(nb::init<int>(), "threads"_a,
           "threads: threads that work on one call, the caller included; >= 1.")
      .def_prop_ro("threads", &Pool::threads);

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
      "Write the bucket (0..4095) of each key. keys: (N,) uint64; out: (N,) uint16.");

  m.def("keep_freed_memory", &keep_freed_memory, "bytes_max"_a,
        "Let the allocator of this process keep up to about `bytes_max` of freed memory for its "
        "next use, instead of "
        "giving it back to the system at once. False where the C library has no such setting.");

  m.def(
      "borrow",
      [](nb::object array) {
        auto rows = nb::cast<Array2<const float>>(array, /*convert=*/false);
        return nb::ndarray<nb::numpy, float, nb::ndim<2>>(const_cast<float*>(rows.data()),
                                                          {rows.shape(0), rows.shape(1)}, array);
      },
      "array"_a,
      "The same memory as an array that torch takes without a warning: it has no read-only "
      "tensors. Do not write to it. array: (K, D) float32, kept alive by the result.");
}

}  // namespace trireme::bind
