"""Loggers: what users name of `hdet.integrations.loggers`."""

from hdet.integrations.loggers import JSONLines, MLflow, TensorBoard, Trackio, WandB, WindowLogger, metrics

__all__ = ["JSONLines", "MLflow", "TensorBoard", "Trackio", "WandB", "WindowLogger", "metrics"]
