// Shared by the binding files: array argument types and the list of registration functions.
//
// Every array argument is declared with .noconvert(): a wrong dtype, rank, layout or device is a
// TypeError, never a silent copy. Every call into the core runs with the GIL released.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <span>

#include "base/array.h"

namespace trireme::bind {

namespace nb = nanobind;

template <class T>
using Array1 = nb::ndarray<T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array2 = nb::ndarray<T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array3 = nb::ndarray<T, nb::ndim<3>, nb::c_contig, nb::device::cpu>;

template <class T, class... Args>
std::span<T> as_span(const nb::ndarray<T, Args...>& array) {
  return {array.data(), array.size()};
}

template <class T>
using Result1 = nb::ndarray<nb::numpy, T, nb::ndim<1>, nb::c_contig>;
template <class T>
using Result2 = nb::ndarray<nb::numpy, T, nb::ndim<2>, nb::c_contig>;

template <class T>
nb::capsule owner_of(T* data) {
  return nb::capsule(data, [](void* p) noexcept { delete[] static_cast<T*>(p); });
}

// Passes an array of the core to NumPy, without a copy.
template <class T>
Result1<T> result(Array<T>&& array) {
  const std::size_t size = array.size();
  T* const data = array.release();
  return Result1<T>(data, {size}, owner_of(data));
}

template <class T>
Result2<T> result(Array<T>&& array, std::size_t dim) {
  const std::size_t rows = array.size() / dim;
  T* const data = array.release();
  return Result2<T>(data, {rows, dim}, owner_of(data));
}

void register_errors(nb::module_& m);
void register_base(nb::module_& m);
void register_bucket_columns(nb::module_& m);
void register_column_store(nb::module_& m);
void register_feed(nb::module_& m);
void register_frozen(nb::module_& m);
void register_metrics(nb::module_& m);
void register_row_text(nb::module_& m);
void register_ssd(nb::module_& m);
void register_statistics(nb::module_& m);
void register_strings(nb::module_& m);
void register_table(nb::module_& m);
void register_text(nb::module_& m);

}  // namespace trireme::bind
