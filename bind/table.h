// Shared by the binding files of tables.
#pragma once

#include "bind.h"
#include "table/table.h"

namespace trireme::bind {

using Keys = Array1<const std::uint64_t>;

// Raises BadRequest for Table.who unless a size is as expected.
void expect(const char* who, const char* what, std::size_t found, std::size_t expected);

void register_rule_values(nb::module_& m);
void register_policies(nb::module_& m);
void register_block(nb::module_& m, nb::class_<Table>& table);
void register_buckets(nb::module_& m, nb::class_<Table>& table);
void register_claim(nb::module_& m);
void register_tier(nb::module_& m, nb::class_<Table>& table);

}  // namespace trireme::bind
