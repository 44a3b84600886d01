"""NAML: which article a user clicks, by attention over words, over views of an article (title,
content, categories), and over the articles that were read.

Source: Wu et al., "Neural News Recommendation with Attentive Multi-View Learning", IJCAI 2019.

PaddleRec's network has no tanh in the attention, one convolution for titles and contents, and rows
for padding, which is left out here.
"""

from functools import partial

from trireme.config import Config
from trireme.models.hyper_parameters import HyperParameters
from trireme.models.news import Pooling, news_recipe
from trireme.train.recipe import Recipe


def create(config: Config) -> Recipe:
    """Keys: those of trireme.models.hyper_parameters for the optimizer, those of
    trireme.models.news.news_recipe, which says what the inputs are, and

    hidden_size: width of the vectors of words, articles and users, default 400.
    """
    hyper = HyperParameters(config)
    size = hyper.whole("hidden_size", 400)
    return news_recipe(hyper, size, lambda _: partial(Pooling, size))
