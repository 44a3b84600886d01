"""Random operations against plain models."""

import pytest

# So that their assertions show values too.
pytest.register_assert_rewrite("tests.property.table_model", "tests.property.table_operations")
