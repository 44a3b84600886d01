"""Writing a trained model for inference."""

from trireme.inference.export.exporter import Export, export_model

__all__ = ["Export", "export_model"]
