"""What the script mnist.py imports from beside it."""

import torch
from torch import nn


class Net(nn.Module):
    """A small convolutional network."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3)
        self.out = nn.Linear(4 * 6 * 6, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits of the ten digits."""
        return self.out(torch.relu(self.conv(images)).flatten(1))


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return images that differ by their label."""
    draw = torch.Generator().manual_seed(3)
    labels = torch.arange(64) % 10
    return torch.randn(64, 1, 8, 8, generator=draw) + labels.view(-1, 1, 1, 1) / 5, labels
