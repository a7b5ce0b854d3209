"""Stand-in for torchvision, import only: a text model decodes and resizes no image."""

__version__ = "0+cp.shared.kv.cpu"
