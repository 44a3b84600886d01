// Shared by the binding files: array argument types and the list of registration functions.
//
// Every array argument is declared with .noconvert(): a wrong dtype, rank, layout or device is a
// TypeError, never a silent copy. Every call into the core runs with the GIL released.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <span>

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

void register_errors(nb::module_& m);
void register_base(nb::module_& m);
void register_criteo(nb::module_& m);
void register_feed(nb::module_& m);
void register_metrics(nb::module_& m);
void register_strings(nb::module_& m);
void register_table(nb::module_& m);

}  // namespace trireme::bind
