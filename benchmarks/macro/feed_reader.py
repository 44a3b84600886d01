"""A reader script: Criteo TSV on stdin, the rivals' MultiSlot text on stdout."""

import math

import trireme.fleet as fleet

FEATURES = [f"C{i}" for i in range(1, 27)]


class Reader(fleet.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def examples():
            fields = line.rstrip("\n").split("\t")
            ids = [[i << 32 | int(text, 16)] for i, text in enumerate(fields[14:])]
            dense = [math.log1p(max(int(text), 0)) / 8 for text in fields[1:14]]
            label = ("label", [int(fields[0])])
            yield [label, *zip(FEATURES, ids, strict=True), ("dense", dense)]

        return examples


if __name__ == "__main__":
    Reader().run_from_stdin()
