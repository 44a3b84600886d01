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

std::size_t checked_row_bytes(int dim, const Rule& rule) {
  const std::size_t floats =
      static_cast<std::size_t>(dim) + static_cast<std::size_t>(rule.state_floats(dim));
  const std::size_t bytes = round_up(kWeightsOffset + floats * sizeof(float), 8);
  if (bytes > Arena::kRowBytesMax) {
    throw Error(ErrorCode::kBadRequest,
                "Table: expected rows of at most " + std::to_string(Arena::kRowBytesMax) +
                    " bytes, found " + std::to_string(bytes) + " for dim " + std::to_string(dim));
  }
  return bytes;
}

}  // namespace

Table::Table(const TableConfig& config)
    : dim_(checked_dim(config)),
      isa_(choose_isa(config.simd)),
      rule_(make_rule(config.rule)),
      initializer_(config.initializer, config.init_a, config.init_b, config.seed),
      absent_is_zero_(checked_absent_is_zero(config.absent)),
      arena_(checked_row_bytes(dim_, rule_)),
      index_(arena_),
      marks_(config.num_streams_max) {}

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
  }
  return n;
}

}  // namespace trireme
