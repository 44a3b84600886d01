"""A reader script: one example a line, `click id id number number`."""

import trireme.fleet as fleet


class Reader(fleet.data_generator.MultiSlotDataGenerator):
    def generate_sample(self, line):
        def examples():
            click, first, second, *dense = line.split()
            fields = [("click", [int(click)]), ("C1", [int(first)]), ("C2", [int(second)])]
            yield [*fields, ("dense", [float(x) for x in dense])]

        return examples


Reader().run_from_stdin()
