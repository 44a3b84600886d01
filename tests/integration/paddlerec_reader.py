"""A reader script of PaddleRec, unchanged except for its first import.

It runs as `PIPE_COMMAND YAML_PATH UTILS_PATH` and reads one example per line: name:value pairs
separated by blanks.
"""

import os
import sys

import yaml

import trireme.fleet as fleet

PADDING = 0
DENSE_DIM = 13
SPARSE_SLOTS = [str(slot) for slot in range(1, 27)]


class Reader(fleet.MultiSlotDataGenerator):
    def init(self, config):
        self.slots = ["click", *SPARSE_SLOTS][: config.get("hyper_parameters.sparse_inputs_slots")]
        self.dense_dim = config.get("hyper_parameters.dense_input_dim", DENSE_DIM)
        self.batch = config.get("runner.train_batch_size")

    def generate_sample(self, line):
        def examples():
            values = {name: [] for name in [*self.slots, "dense_feature"]}
            for pair in line.rstrip("\n").split(" "):
                name, value = pair.split(":")
                values[name].append(float(value) if name == "dense_feature" else int(value))
            for name, actual in values.items():
                if not actual:
                    actual += [PADDING] * (self.dense_dim if name == "dense_feature" else 1)
            yield list(values.items())

        return examples


if __name__ == "__main__":
    yaml_path, utils_path = sys.argv[1], sys.argv[2]
    assert os.path.isabs(yaml_path)
    with open(yaml_path) as file:
        assert yaml.safe_load(file)["runner"]
    sys.path.append(utils_path)
    import common_ps

    reader = Reader()
    reader.init(common_ps.YamlHelper().load_yaml(yaml_path))
    reader.run_from_stdin()
