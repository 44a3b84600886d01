"""The module that PaddleRec's reader scripts import from the folder in their second argument.

import common_ps                                        # after sys.path.append(sys.argv[2])
config = common_ps.YamlHelper().load_yaml(sys.argv[1])
config.get("runner.train_batch_size")
"""

import json
import os
from typing import Any

from trireme.config import Config


class YamlHelper:
    """Reads configurations."""

    def load_yaml(self, yaml_path: str) -> dict[str, Any]:
        """The values of a YAML file by dotted key, with the overrides of the run applied.

        Raises:
            BadRequest: it cannot be read.
        """
        overrides = json.loads(os.environ.get("TRIREME_OVERRIDES", "[]"))
        return Config.load(yaml_path, overrides).section("")
