"""Metrics of classifiers and regressions in evaluations, from sums over batches and ranks: those of the whole set.

N: labels, C: classes.
"""

from __future__ import annotations

from typing import Self

import torch
import torch.distributed as dist

from toolkit.modeling.loss import counts_in_loss
from toolkit.planning.settings import Settings


class Scores:
    """Counts of right and wrong answers, or sums of errors, on the device; reading them waits for it once.

    `accuracy` is the share of labels that are right, for several classes of a text the share of texts of which all are. `f1` is
    the mean over the classes that labels or answers have of each one's harmonic mean of precision and recall (macro F1). `mse`
    and `mae` are the mean squared and absolute errors of numbers.

    Args:
        num_labels: Classes, or numbers of a regression.
        is_regression: Whether labels are numbers to come near to.
        device: Device of the sums.
    """

    def __init__(self, num_labels: int, *, is_regression: bool, device: torch.device) -> None:
        self._is_regression = is_regression
        self._sums = torch.zeros(3, dtype=torch.float64, device=device)  # right or squared, labels, absolute
        self._classes = torch.zeros((3, num_labels), dtype=torch.float64, device=device)  # right, answered, labelled

    @classmethod
    def of(cls, settings: Settings, *, device: torch.device) -> Self | None:
        """Return empty sums for a plan's task; None if it has no labels of classes."""
        if not settings.num_labels:
            return None
        return cls(settings.num_labels, is_regression=settings.problem_type == "regression", device=device)

    def add(self, logits: torch.Tensor, labels: torch.Tensor) -> None:
        """Add the answers to a batch of labels, both as `summed_label_loss` takes them."""
        counted = counts_in_loss(labels)
        if self._is_regression:
            errors = torch.where(counted, logits.float().reshape(labels.shape) - labels.float(), 0.0).double()
            self._sums += torch.stack([errors.square().sum(), counted.sum().double(), errors.abs().sum()])
        elif labels.is_floating_point():
            wanted_NC, found_NC = labels > 0.5, (logits.reshape(labels.shape) > 0) & counted
            right = ((wanted_NC == found_NC) | ~counted).all(-1) & counted.any(-1)
            self._sums[:2] += torch.stack([right.sum(), counted.any(-1).sum()])
            self._classes += torch.stack([(wanted_NC & found_NC).sum(0), found_NC.sum(0), (wanted_NC & counted).sum(0)])
        else:
            num_labels = self._classes.shape[1]
            kept = counted.reshape(-1)
            wanted_N = torch.where(kept, labels.reshape(-1), 0)
            found_N = logits.reshape(-1, num_labels).argmax(-1)
            right_N = (wanted_N == found_N) & kept
            self._sums[:2] += torch.stack([right_N.sum(), kept.sum()])
            for row, classes, of in ((0, wanted_N, right_N), (1, found_N, kept), (2, wanted_N, kept)):
                self._classes[row].index_add_(0, classes, of.double())

    def metrics(self, *, group: dist.ProcessGroup | None = None) -> dict[str, float]:
        """Return the metrics over all ranks.

        Collectives:
            Two all-reduces over `group`, of 3 numbers and of 3 for each class.
        """
        dist.all_reduce(self._sums, group=group)
        total = self._sums[1].clamp(min=1)
        if self._is_regression:
            return {"mse": float(self._sums[0] / total), "mae": float(self._sums[2] / total)}
        dist.all_reduce(self._classes, group=group)
        right_C, answered_C, labelled_C = self._classes
        both_C = answered_C + labelled_C
        f1 = (2 * right_C / both_C.clamp(min=1)).sum() / (both_C > 0).sum().clamp(min=1)
        return {"accuracy": float(self._sums[0] / total), "f1": float(f1)}
