"""The model of a configuration: the `create` of a file or of a model in trireme.models."""

from trireme.config import Config
from trireme.errors import BadRequest
from trireme.models import zoo
from trireme.run.files import load_file
from trireme.run.model_source import model_source
from trireme.run.settings import Settings
from trireme.train import Recipe


def create_recipe(config: Config, settings: Settings) -> Recipe:
    """Call the `create(config)` of the model, which `model_source` finds.

    Raises BadRequest: no such model, or one without a `create(config)` that returns a Recipe.
    """
    source = model_source(config, settings)
    module = zoo.load(source) if isinstance(source, str) else load_file(source)
    create = getattr(module, "create", None)
    if not callable(create):
        raise BadRequest(
            f"{source}: expected a function create(config) -> trireme.Recipe, found none"
        )
    recipe = create(config)
    if not isinstance(recipe, Recipe):
        what = f"create(config) to return a trireme.Recipe, found {type(recipe).__name__}"
        raise BadRequest(f"{source}: expected {what}")
    return recipe
