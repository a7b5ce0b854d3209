"""Stand-in for torchvision.transforms.v2, import only."""
