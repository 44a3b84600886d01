// Devices of rows on SSD, and what a table with such a tier tells of itself.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "base/error.h"
#include "store/ssd/device.h"
#include "store/ssd/page.h"
#include "table.h"

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

std::optional<std::map<std::string, std::uint64_t>> tier(const Table& table) {
  if (table.tier() == nullptr) return std::nullopt;
  const Tier::Use use = table.tier()->use();
  return {{{"memory_bytes", use.memory_bytes},
           {"bytes", use.bytes},
           {"own_bytes", use.own_bytes},
           {"index_bytes", use.index_bytes},
           {"rows", use.log.num_rows},
           {"hits", use.num_hits},
           {"misses", use.num_misses},
           {"evicted", use.num_evicted},
           {"cleaned", use.num_cleaned},
           {"refused", use.num_refused},
           {"fetched", use.num_fetched},
           {"reads", use.log.reads},
           {"pages_read", use.log.pages_read},
           {"pages_written", use.log.pages_written},
           {"segments", use.log.num_segments},
           {"damaged_pages", use.log.num_damaged},
           {"failed_writes", use.log.num_failed_writes},
           {"ssd_bytes", use.log.bytes},
           {"rows_written", use.log.num_rows_then}}};
}

std::unique_ptr<Tier::Claim> claim(Table& table, Keys keys, Pool& pool) {
  nb::gil_scoped_release release;
  return table.claim(as_span(keys), pool);
}

std::unique_ptr<Tier::Claim> claim_rows(Table& table, const Table& other, Pool& pool) {
  nb::gil_scoped_release release;
  return table.claim_rows(other, pool);
}

std::unique_ptr<Tier::Claim> claim_buckets(Table& table, Array1<const std::uint32_t> num_rows) {
  expect("claim_buckets", "a number of rows per bucket:", num_rows.size(), kNumBuckets);
  nb::gil_scoped_release release;
  return table.claim_buckets(
      std::span<const std::uint32_t, kNumBuckets>(num_rows.data(), kNumBuckets));
}

void fetch(Table& table, Keys keys, Pool& pool) {
  nb::gil_scoped_release release;
  table.fetch(as_span(keys), pool);
}

// Keeps the segments of a table until it is released.
struct SegmentHold {
  explicit SegmentHold(Table& table) { hold.emplace(table.need_tier("hold_segments").log()); }
  std::optional<ssd::PageLog::Hold> hold;
};

using SegmentFields = std::tuple<std::uint32_t, std::size_t, std::string, std::size_t, std::size_t>;

std::vector<SegmentFields> segments(const Table& table) {
  ssd::PageLog& log = table.need_tier("segments").log();
  std::vector<SegmentFields> result;
  nb::gil_scoped_release release;
  log.flush();
  for (const ssd::PageLog::SegmentFile& s : log.segments()) {
    result.emplace_back(s.number, s.device, s.name, s.num_pages, s.num_rows_then);
  }
  return result;
}

void adopt_segment(Table& table, std::uint32_t number, std::size_t device, std::string name,
                   std::size_t num_pages, std::size_t num_rows_then) {
  nb::gil_scoped_release release;
  table.need_tier("adopt_segment")
      .log()
      .adopt({.number = number,
              .device = device,
              .name = std::move(name),
              .num_pages = num_pages,
              .num_rows_then = num_rows_then});
}

}  // namespace

void register_claim(nb::module_& m) {
  nb::class_<Tier::Claim>(m, "Claim", "Rows that stay in memory, and room for new ones.");
}

void register_tier(nb::module_& m, nb::class_<Table>& table) {
  nb::class_<SegmentHold>(m, "SegmentHold", "Keeps the segments of a table until it is released.")
      .def("release", [](SegmentHold& held) { held.hold.reset(); });
  table
      .def_prop_ro("tier", &tier,
                   "Numbers of the SSD tier; None without one. memory_bytes: the budget. bytes: of "
                   "memory; own_bytes: beside rows; index_bytes: what finds the rows on SSD. rows: "
                   "on SSD. hits, misses: keys with a row, in memory or not, when needed. evicted, "
                   "cleaned: rows written because memory was needed, or segments. refused: rows "
                   "read that found no room in memory. fetched: rows brought into memory by "
                   "fetch(). damaged_pages: that cannot be read, nor the rows in them. "
                   "failed_writes: of some pages each, which were kept and written again, or "
                   "elsewhere. reads, pages_read, pages_written, segments, "
                   "ssd_bytes: of the device. rows_written: that the segments had when written.")
      .def(
          "fetch", &fetch, "keys"_a.noconvert(), "pool"_a,
          "Bring the rows of keys from SSD into memory, as far as there is room, for a later call. "
          "keys: (N,) uint64.")
      .def("claim_buckets", &claim_buckets, "num_rows"_a.noconvert(), nb::keep_alive<0, 1>(),
           nb::sig("def claim_buckets(self, num_rows: Annotated[NDArray[numpy.uint32], "
                   "dict(shape=(None,), order='C', device='cpu', writable=False)]) -> Claim | "
                   "None"),
           "Take room for num_rows rows of each bucket: restoring them with the claim then neither "
           "fails nor waits for a device. None if there is no such room, or claims would take too "
           "much of it. num_rows: (4096,) uint32. Raises BadRequest: all rows are in memory "
           "anyway. Unavailable, DeadlineExceeded: a device.")
      .def("claim_rows", &claim_rows, "other"_a, "pool"_a, nb::keep_alive<0, 1>(),
           nb::sig("def claim_rows(self, other: Table, pool: Pool) -> Claim | None"),
           "Claim the keys of all rows of another table, for `merge`, as `claim` does.")
      .def("claim", &claim, "keys"_a.noconvert(), "pool"_a, nb::keep_alive<0, 1>(),
           nb::sig("def claim(self, keys: Annotated[NDArray[numpy.uint64], dict(shape=(None,), "
                   "order='C', device='cpu', writable=False)], pool: Pool) -> Claim | None"),
           "Bring the rows of keys into memory, where they stay as long as the claim exists, and "
           "take room for new ones: an update or settlement of these keys then neither fails nor "
           "waits for a device. None if the claims would take more than half of the memory for "
           "rows: "
           "then room was there just now, for one stripe after the other. keys: (K,) uint64. "
           "Raises BadRequest: all rows are in memory "
           "anyway. ResourceExhausted: the budget is too small, or the devices are full. "
           "Unavailable, DeadlineExceeded, Corruption: a device, a page.")
      .def("check_room", &Table::check_room, nb::call_guard<nb::gil_scoped_release>(),
           "Raise ResourceExhausted if a table takes more memory than its budget, if it has one.")
      .def("set_memory", &Table::set_memory, "num_bytes"_a,
           nb::call_guard<nb::gil_scoped_release>(),
           "Set the budget of a table with an SSD tier; rows leave memory at once if it is less. "
           "Raises ResourceExhausted: less than it needs; the budget stays.")
      .def(
          "hold_segments", [](Table& held) { return new SegmentHold(held); },
          nb::rv_policy::take_ownership, nb::keep_alive<0, 1>(),
          "Keep all segments, also those without rows, until the result is released.")
      .def("segments", &segments,
           R"(The segments of a table that holds them, all of whose pages are durable now.

Returns (number, device, name of the file, pages, rows when it was written) for each.
Raises Unavailable, ResourceExhausted: a device.)")
      .def("adopt_segment", &adopt_segment, "number"_a, "device"_a, "name"_a, "num_pages"_a,
           "num_rows_then"_a,
           R"(Go on with a segment of another table, whose file was linked into this one's folder.

Raises BadRequest: its number or name is taken. Corruption: the file is too small.)");
}

void register_ssd(nb::module_& m) {
  m.def("ssd_page_bytes", &ssd::page_bytes_for, "row_bytes"_a,
        "Bytes of a page with rows on SSD. row_bytes: of the largest row class of its table.");
  m.def(
      "ssd_buffer_bytes",
      [](std::size_t row_bytes, std::size_t buffer_bytes, std::size_t read_bytes) {
        return Tier::buffer_bytes(
            {.devices = {}, .buffer_bytes = buffer_bytes, .read_bytes = read_bytes}, row_bytes);
      },
      "row_bytes"_a, "buffer_bytes"_a, "read_bytes"_a,
      "Bytes that buffers and reads of a table with rows on SSD take at all times. row_bytes: of "
      "its largest row class. buffer_bytes, read_bytes: as for Table.");
  nb::class_<ssd::Device>(m, "SsdDevice", "A folder where tables keep rows that are used seldom.")
      .def(nb::new_(&open_device), "folder"_a, "io"_a, "num_threads"_a = 32,
           R"(folder: exists; the rows of one table at a time lie in it.
io: io_uring, or threads that call pread where the system forbids that.
Raises BadRequest: no such folder, another io. Unavailable: the system does not offer it.)");
}

}  // namespace trireme::bind
