"""A reader script in PaddleRec style: show, click, then the slots 2 to 301, each of any length."""

import sys

import yaml

import trireme.fleet as fleet  # was: import paddle.distributed.fleet as fleet


class Reader(fleet.MultiSlotDataGenerator):
    def init(self, slot_num):
        self.slots = ["show", "click", *[str(i) for i in range(2, 2 + slot_num)]]

    def generate_sample(self, line):
        def reader():
            actual = {}
            for pair in line.strip().split(" "):
                name, value = pair.split(":")
                actual.setdefault(name, []).append(int(value))
            yield [(name, actual.get(name, [0])) for name in self.slots]

        return reader


if __name__ == "__main__":
    with open(sys.argv[1]) as file:
        slot_num = yaml.safe_load(file)["hyper_parameters"]["slot_num"]
    reader = Reader()
    reader.init(slot_num)
    reader.run_from_stdin()
