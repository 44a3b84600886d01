// Devices of rows on SSD, and what a table with such a tier tells of itself.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <string>

#include "base/error.h"
#include "bind.h"
#include "store/ssd/device.h"

namespace trireme::bind {

namespace {

using namespace nb::literals;

std::shared_ptr<ssd::Device> open_device(const std::string& folder, const std::string& io,
                                         int num_threads) {
  nb::gil_scoped_release release;
  if (io == "io_uring") return ssd::uring_device(folder);
  if (io == "threads") return ssd::pool_device(folder, num_threads);
  throw Error(ErrorCode::kBadRequest,
              "SsdDevice: expected io to be io_uring or threads, found " + io);
}

}  // namespace

void register_ssd(nb::module_& m) {
  nb::class_<ssd::Device>(m, "SsdDevice", "A folder where tables keep rows that are used seldom.")
      .def(nb::new_(&open_device), "folder"_a, "io"_a, "num_threads"_a = 32,
           R"(folder: exists; the rows of one table at a time lie in it.
io: io_uring, or threads that call pread where the system forbids that.
Raises BadRequest: no such folder, another io. Unavailable: the system does not offer it.)");
}

}  // namespace trireme::bind
