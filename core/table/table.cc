#include "table/table.h"

#include <mutex>
#include <shared_mutex>

#include "base/error.h"

namespace trireme {
namespace {

int checked_dim(const TableConfig& config) {
  if (config.dims.size() != 1) {
    throw Error(ErrorCode::kBadRequest, "Table: expected one row class in dims, found " +
                                            std::to_string(config.dims.size()));
  }
  const int dim = config.dims[0];
  constexpr int kDimMax = 1 << 16;
  if (dim < 1 || dim > kDimMax) {
    throw Error(ErrorCode::kBadRequest, "Table: expected a dim in [1, " + std::to_string(kDimMax) +
                                            "], found " + std::to_string(dim));
  }
  return dim;
}

bool checked_absent_is_zero(const std::string& absent) {
  if (absent == "zeros") return true;
  if (absent == "initial") return false;
  throw Error(ErrorCode::kBadRequest, "Table: expected absent initial or zeros, found " + absent);
}

RowLayout checked_layout(const TableConfig& config, const Rule& rule) {
  const int dim = checked_dim(config);
  const RowLayout layout(dim, rule.state_floats(dim), config.policy.is_scored);
  if (layout.row_bytes() > Arena::kRowBytesMax) {
    throw Error(ErrorCode::kBadRequest, "Table: expected rows of at most " +
                                            std::to_string(Arena::kRowBytesMax) + " bytes, found " +
                                            std::to_string(layout.row_bytes()) + " for dim " +
                                            std::to_string(dim));
  }
  return layout;
}

}  // namespace

Table::Table(const TableConfig& config)
    : isa_(choose_isa(config.simd)),
      rule_(make_rule(config.rule)),
      layout_(checked_layout(config, rule_)),
      policy_(config.policy),
      max_rows_of_bucket_(policy_.max_rows_of_bucket(layout_.row_bytes())),
      initializer_(config.initializer, config.init_a, config.init_b, config.seed),
      absent_is_zero_(checked_absent_is_zero(config.absent)),
      arena_(layout_.row_bytes()),
      index_(arena_),
      marks_(config.num_streams_max),
      admission_(config.admission, config.seed) {
  if (admission_.reads_score() && !is_scored()) {
    throw Error(
        ErrorCode::kBadRequest,
        "Table: expected a scored table for admission score_filter, found one without scores");
  }
}

std::size_t Table::num_rows() const {
  std::size_t n = 0;
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    std::shared_lock lock(stripes_[stripe]);
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      n += index_.num_rows(stripe * kBucketsPerStripe + i);
    }
  }
  return n;
}

std::size_t Table::bytes() const {
  std::size_t n = sizeof *this + arena_.bytes() + marks_.bytes();
  for (std::uint32_t stripe = 0; stripe < kNumStripes; ++stripe) {
    std::shared_lock lock(stripes_[stripe]);
    n += index_.bytes(stripe);
    for (std::uint32_t i = 0; i < kBucketsPerStripe; ++i) {
      const std::uint32_t bucket = stripe * kBucketsPerStripe + i;
      n += removed_.bytes(bucket) + admission_.bytes(bucket);
    }
  }
  return n;
}

void Table::raise_version(std::uint32_t version) noexcept {
  std::uint32_t found = version_.load(std::memory_order_relaxed);
  while (found < version &&
         !version_.compare_exchange_weak(found, version, std::memory_order_relaxed)) {
  }
}

void Table::check_bucket(std::uint32_t bucket) {
  if (bucket < kNumBuckets) return;
  throw Error(ErrorCode::kBadRequest, "Table: expected a bucket in [0, " +
                                          std::to_string(kNumBuckets) + "), found " +
                                          std::to_string(bucket));
}

void Table::check_scored(const char* who) const {
  if (is_scored()) return;
  throw Error(ErrorCode::kBadRequest,
              std::string("Table.") + who + ": expected a scored table, found one without scores");
}

}  // namespace trireme
