"""Models that answer without servers and training code, from a folder that
`trireme.inference.export.export_model` wrote.
"""

from trireme.inference.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
