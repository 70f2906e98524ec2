"""manege trains the model of an agent by reinforcement learning inside the harness that is deployed."""

__all__ = ["__version__"]

__version__ = "0.1.0"
