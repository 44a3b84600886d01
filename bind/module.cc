// trireme._core: lists the binding files, one per concept.
#include "bind.h"

NB_MODULE(_core, m) {
  // A script that ends with an error leaves objects alive; that is not a leak to report.
  nanobind::set_leak_warnings(false);
  m.doc() = "Trireme's C++ core.";
  trireme::bind::register_errors(m);
  trireme::bind::register_base(m);
  trireme::bind::register_bucket_columns(m);
  trireme::bind::register_column_store(m);
  trireme::bind::register_feed(m);
  trireme::bind::register_frozen(m);
  trireme::bind::register_metrics(m);
  trireme::bind::register_row_text(m);
  trireme::bind::register_ssd(m);
  trireme::bind::register_statistics(m);
  trireme::bind::register_strings(m);
  trireme::bind::register_table(m);
  trireme::bind::register_text(m);
}
