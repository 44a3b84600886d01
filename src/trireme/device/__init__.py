"""Rows of a table as tensors on any torch device, updated there. The CPU plans which row each id
is, so there is no hash table on the device. See docs/gpu.md.
"""

from trireme.device.block_layout import BlockLayout
from trireme.device.row_block import RowBlock
from trireme.device.slot_bags import Occurrences, SlotBags, occurrences

__all__ = ["BlockLayout", "Occurrences", "RowBlock", "SlotBags", "occurrences"]
