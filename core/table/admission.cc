#include "table/admission.h"

#include <cmath>
#include <cstring>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "store/index.h"

namespace trireme {
namespace {

constexpr std::uint64_t kDrawSalt = 2;
constexpr std::size_t kSketchBytesMin = std::size_t{kNumBuckets} * 64;
constexpr std::size_t kSketchBytesMax = std::size_t{1} << 40;

template <class Value>
void expect(bool holds, const char* what, Value found) {
  if (holds) return;
  throw Error(ErrorCode::kBadRequest, std::string("Table: expected admission with ") + what +
                                          ", found " + std::to_string(found));
}

[[noreturn]] void refuse(std::uint32_t bucket, const std::string& expected,
                         const std::string& found) {
  throw Error(ErrorCode::kBadRequest, "Table.restore: bucket " + std::to_string(bucket) +
                                          ": expected pending " + expected + ", found " + found);
}

Array<std::uint8_t> with_header(const PendingHeader& header, const void* content,
                                std::size_t bytes) {
  Array<std::uint8_t> all(sizeof header + bytes);
  std::memcpy(all.data(), &header, sizeof header);
  std::memcpy(all.data() + sizeof header, content, bytes);
  return all;
}

}  // namespace

Admission::Kind Admission::checked_kind(const AdmissionConfig& config) {
  if (config.name.empty()) return Kind::kAll;
  if (config.name == "count_filter") {
    expect(config.n >= 1 && config.n < 1U << 31, "n in [1, 2^31)", config.n);
    const std::uint64_t bytes = config.sketch_bytes;
    expect(bytes == 0 || (bytes >= kSketchBytesMin && bytes < kSketchBytesMax),
           "sketch_bytes 0 or in [262144, 2^40)", bytes);
    return Kind::kCountFilter;
  }
  if (config.name == "probability") {
    expect(config.p > 0 && config.p <= 1, "p in (0, 1]", config.p);
    return Kind::kProbability;
  }
  if (config.name == "score_filter") {
    expect(std::isfinite(config.threshold), "a finite threshold", config.threshold);
    return Kind::kScoreFilter;
  }
  throw Error(
      ErrorCode::kBadRequest,
      "Table: expected admission count_filter, probability or score_filter, found " + config.name);
}

Admission::Admission(const AdmissionConfig& config, std::uint64_t seed)
    : kind_(checked_kind(config)),
      seed_(seed),
      n_(config.n),
      draws_below_(std::ldexp(config.p, 53)),
      threshold_(config.threshold) {
  if (kind_ != Kind::kCountFilter) return;
  if (config.sketch_bytes > 0) shape_ = SketchShape::of(config.sketch_bytes / kNumBuckets, n_);
  pending_.resize(kNumBuckets);
}

void Admission::prepare(std::span<const std::uint64_t> keys) {
  if (pending_.empty()) return;
  std::array<std::uint32_t, kBucketsPerStripe> num_keys{};
  for (const std::uint64_t key : keys) ++num_keys[bucket_of(key) % kBucketsPerStripe];
  const std::uint32_t first = bucket_of(keys[0]) / kBucketsPerStripe * kBucketsPerStripe;
  for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
    if (num_keys[i] == 0) continue;
    if (is_sketch()) {
      pending_[first + i].sketch.allocate(shape_);
    } else {
      pending_[first + i].counts.reserve(num_keys[i]);
    }
  }
}

bool Admission::admit(const Occurrence& occurrence, const PushId& id) noexcept {
  const auto& [key, count, score, time] = occurrence;
  switch (kind_) {
    case Kind::kAll:
      return true;
    case Kind::kCountFilter: {
      Pending& pending = pending_[bucket_of(key)];
      return (is_sketch() ? pending.sketch.add(shape_, key, count, time)
                          : pending.counts.add(key, count, time)) >= n_;
    }
    case Kind::kProbability: {
      const std::uint64_t bits = push_bits(seed_, kDrawSalt, key, id.stream, id.sequence);
      return static_cast<double>(bits >> 11) < draws_below_;
    }
    case Kind::kScoreFilter:
      return score >= threshold_;
  }
  return false;
}

void Admission::settle(std::uint64_t key) noexcept {
  if (!pending_.empty()) pending_[bucket_of(key)].counts.forget(key);
}

void Admission::forget_before(std::uint32_t bucket, std::uint32_t oldest, std::uint32_t now) {
  if (pending_.empty()) return;
  Pending& pending = pending_[bucket];
  pending.counts.forget_before(oldest);
  const std::uint32_t since = pending.sketch.halved_at;
  if (since != 0 && since < oldest) pending.sketch.halve(shape_, now);
}

Array<std::uint8_t> Admission::save(std::uint32_t bucket) const {
  if (pending_.empty()) return {};
  const auto& [counts, sketch] = pending_[bucket];
  PendingHeader header{.version = PendingHeader::kVersion,
                       .kind = PendingHeader::kCounts,
                       .depth = 0,
                       .cell_bytes = 0,
                       .width = 0,
                       .total = counts.size(),
                       .n = n_,
                       .halved_at = 0};
  if (!is_sketch()) {
    if (counts.size() == 0) return {};
    const std::vector<PendingKey> keys = counts.sorted();
    return with_header(header, keys.data(), keys.size() * sizeof(PendingKey));
  }
  if (sketch.is_empty() || sketch.total == 0) return {};
  header.kind = PendingHeader::kSketch;
  header.depth = SketchShape::kDepth;
  header.cell_bytes = static_cast<std::uint8_t>(shape_.cell_bytes);
  header.width = shape_.width;
  header.total = sketch.total;
  header.halved_at = sketch.halved_at;
  return with_header(header, sketch.cells(), shape_.bytes());
}

Admission::Pending Admission::parse(std::uint32_t bucket,
                                    std::span<const std::uint8_t> bytes) const {
  if (bytes.empty()) return {};
  if (pending_.empty()) {
    refuse(bucket, "none, for the table counts nothing", std::to_string(bytes.size()) + " bytes");
  }
  PendingHeader header;
  if (bytes.size() < sizeof header) {
    refuse(bucket, "a header of " + std::to_string(sizeof header) + " bytes",
           std::to_string(bytes.size()));
  }
  std::memcpy(&header, bytes.data(), sizeof header);
  const std::span<const std::uint8_t> content = bytes.subspan(sizeof header);
  const std::uint8_t kind = is_sketch() ? PendingHeader::kSketch : PendingHeader::kCounts;
  if (header.version != PendingHeader::kVersion || header.kind != kind || header.n != n_) {
    refuse(bucket,
           "version " + std::to_string(PendingHeader::kVersion) + ", kind " + std::to_string(kind) +
               ", n " + std::to_string(n_),
           std::to_string(header.version) + ", " + std::to_string(header.kind) + ", " +
               std::to_string(header.n));
  }
  if (!is_sketch()) return parse_counts(bucket, header, content);
  return parse_sketch(bucket, header, content);
}

Admission::Pending Admission::parse_counts(std::uint32_t bucket, const PendingHeader& header,
                                           std::span<const std::uint8_t> content) const {
  if (content.size() % sizeof(PendingKey) != 0 ||
      header.total != content.size() / sizeof(PendingKey)) {
    refuse(bucket, std::to_string(header.total) + " keys of 16 bytes",
           std::to_string(content.size()) + " bytes");
  }
  std::vector<PendingKey> keys(content.size() / sizeof(PendingKey));
  if (!keys.empty()) std::memcpy(keys.data(), content.data(), content.size());
  for (std::size_t i = 0; i < keys.size(); ++i) {
    const auto& [key, count, time] = keys[i];
    if (bucket_of(key) != bucket) {
      refuse(bucket, "keys of its own",
             "key " + std::to_string(key) + " of bucket " + std::to_string(bucket_of(key)));
    }
    if (i > 0 && keys[i - 1].key >= key) {
      refuse(bucket, "keys in order",
             std::to_string(keys[i - 1].key) + " before " + std::to_string(key));
    }
    if (count < 1 || count >= n_) {
      refuse(bucket, "counts in [1, " + std::to_string(n_) + ")",
             std::to_string(count) + " of key " + std::to_string(key));
    }
  }
  return {.counts = PendingCounts::of(keys), .sketch = {}};
}

Admission::Pending Admission::parse_sketch(std::uint32_t bucket, const PendingHeader& header,
                                           std::span<const std::uint8_t> content) const {
  if (header.depth != SketchShape::kDepth || header.cell_bytes != shape_.cell_bytes ||
      header.width != shape_.width || content.size() != shape_.bytes()) {
    refuse(bucket,
           std::to_string(SketchShape::kDepth) + " rows of " + std::to_string(shape_.width) +
               " cells of " + std::to_string(shape_.cell_bytes) + " bytes",
           std::to_string(header.depth) + " of " + std::to_string(header.width) + " of " +
               std::to_string(header.cell_bytes) + " in " + std::to_string(content.size()) +
               " bytes");
  }
  for (std::size_t cell = 0; cell < shape_.num_cells(); ++cell) {
    const std::uint32_t count = load_cell(content.data(), shape_.cell_bytes, cell);
    if (count > n_) {
      refuse(bucket, "cells of at most " + std::to_string(n_), std::to_string(count));
    }
  }
  Pending pending;
  pending.sketch.allocate(shape_);
  std::memcpy(pending.sketch.cells(), content.data(), content.size());
  pending.sketch.total = header.total;
  pending.sketch.halved_at = header.halved_at;
  return pending;
}

void Admission::replace(std::uint32_t bucket, Pending&& pending) noexcept {
  if (!pending_.empty()) pending_[bucket] = std::move(pending);
}

std::size_t Admission::bytes(std::uint32_t bucket) const noexcept {
  if (pending_.empty()) return 0;
  const auto& [counts, sketch] = pending_[bucket];
  return sizeof(Pending) + counts.bytes() + (sketch.is_empty() ? 0 : shape_.bytes());
}

}  // namespace trireme
