"""The model of a configuration: the `create` of a file or of a model in trireme.models."""

from collections.abc import Callable

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.models import zoo
from trireme.run.files import load_file
from trireme.run.settings import Settings
from trireme.train import Recipe

PADDLE_FILES = ("static_model.py", "dygraph_model.py")


def create_recipe(config: Config, settings: Settings) -> Recipe:
    """Call the `create(config)` of the model.

    The model is `-o model=NAME`, else runner.model_path, else model.py beside the YAML: a Python
    file, relative to the YAML's folder, or a name of trireme.models.

    Raises BadRequest: no such model, or one without a `create(config)` that returns a Recipe.
    """
    source, create = _find(config, settings)
    recipe = create(config)
    if not isinstance(recipe, Recipe):
        raise BadRequest(
            f"{source}: expected create(config) to return a trireme.Recipe, found"
            f" {type(recipe).__name__}"
        )
    return recipe


def _find(config: Config, settings: Settings) -> tuple[str, Callable[[Config], Recipe]]:
    """The model's name or file, and its `create`."""
    named = settings.model or config.get("runner.model_path", None)
    if named is None:
        path = settings.folder / "model.py"
        if not path.is_file():
            present = [name for name in PADDLE_FILES if (settings.folder / name).is_file()]
            why = f"; {' and '.join(present)} are Paddle programs" if present else ""
            raise BadRequest(
                f"run: expected a model: {path} with create(config) -> trireme.Recipe,"
                f" runner.model_path, or -o model=NAME; found none{why}"
            )
    elif "/" in named or named.endswith(".py"):
        path = settings.folder / named
    else:
        return named, zoo.load(named).create
    create = getattr(load_file(path), "create", None)
    if not callable(create):
        raise BadRequest(
            f"{path}: expected a function create(config) -> trireme.Recipe, found none"
        )
    return str(path), create
