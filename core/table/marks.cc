#include "table/marks.h"

#include <algorithm>
#include <string>

#include "base/error.h"

namespace trireme {

std::uint64_t StreamMarks::operator[](std::uint32_t bucket) const noexcept {
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  return parted_[stripe] == nullptr ? equal_[stripe]
                                    : (*parted_[stripe])[bucket % kBucketsPerStripe];
}

std::uint64_t StreamMarks::reached(std::uint32_t stripe, std::uint64_t sequence) const noexcept {
  if (parted_[stripe] == nullptr) return equal_[stripe] >= sequence ? ~std::uint64_t{0} : 0;
  std::uint64_t reached = 0;
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    reached |= std::uint64_t{(*parted_[stripe])[i] >= sequence} << i;
  }
  return reached;
}

void StreamMarks::assign(std::uint32_t stripe,
                         std::span<const std::uint64_t, kBucketsPerStripe> marks) {
  part(stripe);
  std::ranges::copy(marks, parted_[stripe]->begin());
  join(stripe);
}

void StreamMarks::part(std::uint32_t stripe) {
  if (parted_[stripe] != nullptr) return;
  auto parted = std::make_unique<Parted>();
  parted->fill(equal_[stripe]);
  parted_[stripe] = std::move(parted);
  ++num_parted_;
}

void StreamMarks::set(std::uint32_t bucket, std::uint64_t mark) noexcept {
  const std::uint32_t stripe = bucket / kBucketsPerStripe;
  (*parted_[stripe])[bucket % kBucketsPerStripe] = mark;
  join(stripe);
}

void StreamMarks::raise(std::uint32_t stripe, std::uint64_t sequence,
                        std::uint64_t passed_over) noexcept {
  if (parted_[stripe] == nullptr) {
    equal_[stripe] = std::max(equal_[stripe], sequence);
    return;
  }
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    if ((passed_over >> i & 1) != 0) continue;
    std::uint64_t& mark = (*parted_[stripe])[i];
    mark = std::max(mark, sequence);
  }
  join(stripe);
}

void StreamMarks::join(std::uint32_t stripe) noexcept {
  const Parted& marks = *parted_[stripe];
  if (std::ranges::any_of(marks, [&](std::uint64_t mark) { return mark != marks[0]; })) return;
  equal_[stripe] = marks[0];
  parted_[stripe].reset();
  --num_parted_;
}

std::size_t StreamMarks::bytes() const noexcept {
  return sizeof *this + num_parted_ * sizeof(Parted);
}

Marks::Marks(int num_streams_max) : num_streams_max_(num_streams_max) {
  if (num_streams_max < 1) {
    throw Error(ErrorCode::kBadRequest,
                "Table: expected num_streams_max >= 1, found " + std::to_string(num_streams_max));
  }
}

void Marks::check(std::int64_t stream) const {
  if (stream >= 0 && stream < num_streams_max_) return;
  throw Error(ErrorCode::kBadRequest, "Table: expected a stream in [0, " +
                                          std::to_string(num_streams_max_) + "), found " +
                                          std::to_string(stream));
}

StreamMarks& Marks::of(std::int64_t stream) {
  check(stream);
  std::lock_guard lock(mutex_);
  auto place = std::ranges::lower_bound(streams_, stream, {}, &Stream::first);
  if (place == streams_.end() || place->first != stream) {
    place = streams_.emplace(place, stream, std::make_unique<StreamMarks>());
  }
  return *place->second;
}

const StreamMarks* Marks::find(std::int64_t stream) const {
  check(stream);
  std::lock_guard lock(mutex_);
  const auto place = std::ranges::lower_bound(streams_, stream, {}, &Stream::first);
  return place == streams_.end() || place->first != stream ? nullptr : place->second.get();
}

std::vector<std::pair<std::int64_t, StreamMarks*>> Marks::streams() const {
  std::lock_guard lock(mutex_);
  std::vector<std::pair<std::int64_t, StreamMarks*>> found;
  found.reserve(streams_.size());
  for (const auto& [stream, marks] : streams_) found.emplace_back(stream, marks.get());
  return found;
}

std::size_t Marks::bytes() const {
  std::lock_guard lock(mutex_);
  std::size_t n = streams_.capacity() * sizeof(Stream);
  for (const auto& [stream, marks] : streams_) n += marks->bytes();
  return n;
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

std::uint64_t Advance::applied(std::uint32_t stripe) const noexcept {
  std::uint64_t reached = 0;
  for (const auto& [marks, sequence] : ids_) reached |= marks->reached(stripe, sequence);
  return reached;
}

void Advance::part(std::uint32_t stripe) const {
  for (const auto& [marks, sequence] : ids_) marks->part(stripe);
}

void Advance::raise(std::uint32_t stripe, std::uint64_t passed_over) const noexcept {
  for (const auto& [marks, sequence] : ids_) marks->raise(stripe, sequence, passed_over);
}

}  // namespace trireme
