"""A reader class in PaddleRec's style, for reader_type DataLoader."""

import numpy as np
from torch.utils.data import IterableDataset  # was: from paddle.io import IterableDataset


class RecDataset(IterableDataset):
    def __init__(self, file_list, config):
        super().__init__()
        self.file_list = file_list
        self.num_sparse = config.get("hyper_parameters.sparse_inputs_slots")
        self.dense_dim = config.get("hyper_parameters.dense_input_dim")

    def __iter__(self):
        slots = ["click", *[str(i) for i in range(1, self.num_sparse)]]
        for path in self.file_list:
            with open(path) as file:
                for line in file:
                    actual = {"dense_feature": []}
                    for pair in line.strip().split(" "):
                        name, value = pair.split(":")
                        actual.setdefault(name, []).append(value)
                    example = [np.array(actual.get(name, ["0"]), dtype="int64") for name in slots]
                    example.append(np.array(actual["dense_feature"], dtype="float32"))
                    yield example
