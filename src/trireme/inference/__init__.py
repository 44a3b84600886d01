"""Models that answer without servers and without training code: from a folder that
`Trainer.save_inference_model` wrote.
"""

from trireme.inference.predictor import Prediction, Predictor

__all__ = ["Prediction", "Predictor"]
