"""A reader script in PaddleRec's style, run as `python queuedataset_reader.py YAML UTILS`."""

import sys

import trireme.fleet as fleet  # was: import paddle.distributed.fleet as fleet

DENSE_SLOT = "dense_feature"


class Reader(fleet.MultiSlotDataGenerator):
    def init(self, config):
        num_sparse = config.get("hyper_parameters.sparse_inputs_slots")
        self.dense_dim = config.get("hyper_parameters.dense_input_dim")
        self.slots = ["click", *[str(i) for i in range(1, num_sparse)], DENSE_SLOT]

    def parse(self, line):
        actual = {}
        for pair in line.strip().split(" "):
            name, value = pair.split(":")
            number = float(value) if name == DENSE_SLOT else int(value)
            actual.setdefault(name, []).append(number)
        padding = {DENSE_SLOT: [0.0] * self.dense_dim}
        return [(name, actual.get(name, padding.get(name, [0]))) for name in self.slots]

    def generate_sample(self, line):
        def reader():
            yield self.parse(line)

        return reader


if __name__ == "__main__":
    yaml_path, utils_path = sys.argv[1], sys.argv[2]
    sys.path.append(utils_path)
    import common_ps

    config = common_ps.YamlHelper().load_yaml(yaml_path)
    reader = Reader()
    reader.init(config)
    reader.run_from_stdin()
