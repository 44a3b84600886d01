#include "table/marks.h"

#include <algorithm>
#include <string>

#include "base/error.h"
#include "store/index.h"

namespace trireme {

Marks::Marks(int num_streams_max) {
  if (num_streams_max < 1) {
    throw Error(ErrorCode::kBadRequest,
                "Table: expected num_streams_max >= 1, found " + std::to_string(num_streams_max));
  }
  arrays_.resize(static_cast<std::size_t>(num_streams_max));
}

void Marks::check(std::int64_t stream) const {
  const auto num_streams_max = static_cast<std::int64_t>(arrays_.size());
  if (stream >= 0 && stream < num_streams_max) return;
  throw Error(ErrorCode::kBadRequest, "Table: expected a stream in [0, " +
                                          std::to_string(num_streams_max) + "), found " +
                                          std::to_string(stream));
}

Marks::Array& Marks::of(std::int64_t stream) {
  check(stream);
  std::lock_guard lock(mutex_);
  std::unique_ptr<Array>& array = arrays_[static_cast<std::size_t>(stream)];
  if (array == nullptr) array = std::make_unique<Array>();
  return *array;
}

const Marks::Array* Marks::find(std::int64_t stream) const {
  check(stream);
  std::lock_guard lock(mutex_);
  return arrays_[static_cast<std::size_t>(stream)].get();
}

std::vector<std::pair<std::int64_t, Marks::Array*>> Marks::streams() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<std::int64_t, Array*>> found;
  for (std::size_t i = 0; i < arrays_.size(); ++i) {
    if (arrays_[i] != nullptr) found.emplace_back(static_cast<std::int64_t>(i), arrays_[i].get());
  }
  return found;
}

std::size_t Marks::bytes() const {
  return arrays_.size() * sizeof arrays_[0] + streams().size() * sizeof(Array);
}

Advance::Advance(std::span<const PushId> ids, Marks& marks) {
  if (ids.empty())
    throw Error(ErrorCode::kBadRequest, "Table: expected one push id or more, found none");
  for (const PushId& id : ids) {
    if (id.sequence < 1) {
      throw Error(ErrorCode::kBadRequest, "Table: expected a sequence >= 1, found (stream " +
                                              std::to_string(id.stream) + ", sequence " +
                                              std::to_string(id.sequence) + ")");
    }
    ids_.emplace_back(&marks.of(id.stream), static_cast<std::uint64_t>(id.sequence));
  }
}

std::uint64_t Advance::applied(std::uint32_t first_bucket) const noexcept {
  std::uint64_t reached = 0;
  for (const auto& [marks, sequence] : ids_) {
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      reached |= std::uint64_t{(*marks)[first_bucket + i] >= sequence} << i;
    }
  }
  return reached;
}

void Advance::raise(std::uint32_t first_bucket, std::uint64_t passed_over) const noexcept {
  for (const auto& [marks, sequence] : ids_) {
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      if ((passed_over >> i & 1) != 0) continue;
      std::uint64_t& mark = (*marks)[first_bucket + i];
      mark = std::max(mark, sequence);
    }
  }
}

}  // namespace trireme
