"""Self-supervised training of a VLA model's camera encoders on video: predict the next image, find the instruction.

`deft train vision` trains the encoders on recorded episodes without rewards, labels or good actions;
`deft train sft --model_path RUN` then imitates demonstrations with these encoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.algorithms.algorithm import Metrics
from deft.algorithms.off_policy import ActorAlgorithm
from deft.config.algorithm_settings import VisionSettings
from deft.data.augmentation import has_images
from deft.data.datasets.dataset import Dataset
from deft.errors import InputError
from deft.models.frame_prediction import NO_ALTERNATIVE, FramePredictor
from deft.models.policy import Policy

MULTIPLIER = 6364136223846793005  # of a linear congruential generator modulo 2⁶⁴ (Knuth)


class Vision(ActorAlgorithm):
    """L = w_p L_next + w_t L_text, each a mean over the cameras.

    L_next = −E log softmax_j(u_i · v_j / τ) at j = i: which image of the batch follows observation i after the K
    actions of a chunk? Frames of other scenes with the same pose of the arm differ by their objects alone. All images
    are encoded with one instruction, which therefore is no hint, and equal images (the end of an episode, after
    several chunks) are no alternatives.

    L_text = −E log softmax_j s(image_i, text_j) at j = i: which of n instructions belongs to the image? The score s is
    that of the queries by which the policy finds what an instruction names. Instructions with the same words are no
    alternatives.

    Policies have seen no data after it: imitation fits their normalisation to its own dataset.
    """

    name = "vision"
    acts: ClassVar[bool] = False
    use: ClassVar[str] = "train a policy from it: deft train sft --model_path RUN"
    settings: VisionSettings
    policy: Policy

    def __init__(self, policy: Policy, settings: VisionSettings | None = None, seed: int = 0) -> None:
        cameras, features = policy.frame_shape
        assert policy.action_dim is not None
        self.predictor = FramePredictor(cameras, features, policy.action_dim)
        self.predictor.to(next(iter(policy.vision_parameters())).device)
        self._has_alternatives = False
        super().__init__(policy, settings or VisionSettings(), seed)

    def _actor_trains(self) -> Iterator[nn.Parameter]:
        yield from self.policy.vision_parameters()
        yield from self.predictor.parameters()

    def _parts(self) -> dict[str, Any]:
        return {**super()._parts(), "predictor": self.predictor}

    def prepare(self, dataset: Dataset, sampler: Any, fresh: bool) -> None:
        """Check that there are images; statistics are those of the dataset that the policy later imitates."""
        if not has_images(dataset.observation_space):
            raise InputError(
                f"vision: {dataset.name} has no images (its observations are {dataset.observation_space}); "
                "record a dataset with cameras"
            )

    def _step(self, batch: Mapping[Any, Any]) -> Metrics:
        loss, metrics = self._losses(batch)
        self.descend(loss, self.actor_optimizer)
        return {name: value.detach() for name, value in metrics.items()}

    @torch.no_grad()
    def validate(self, batches: Sequence[Mapping[Any, Any]]) -> Metrics:
        """Mean losses and accuracies over all rows, in as many batches, each with rows of all episodes.

        The given batches have consecutive rows: frames of one scene, which are no alternatives to each other.
        """
        totals: Metrics = {}
        rows = sum(len(batch[schema.ACTION]) for batch in batches)
        for number in range(len(batches)):
            batch = _every(batches, number)
            loss, metrics = self._losses(batch)
            for name, value in {**metrics, "bc_loss": loss}.items():
                totals[name] = totals.get(name, 0.0) + value * len(batch[schema.ACTION]) / rows
        return totals

    def _losses(self, batch: Mapping[Any, Any]) -> tuple[Tensor, Metrics]:
        """The loss, and its parts with the fraction of rows in which the right answer has the highest score."""
        settings = self.settings
        num_texts = 1 + settings.num_negatives if settings.text_weight else 0
        features, scores = self.policy.describe_frames(batch[schema.OBSERVATION], num_texts)
        loss = features.new_zeros(())
        metrics: Metrics = {}
        if scores is not None:
            self._check_alternatives(scores)
            logits = self.predictor.text_logits(scores)
            right = torch.zeros(len(features), dtype=torch.long, device=features.device)
            metrics |= _measure("text", logits, right)
            loss = loss + settings.text_weight * metrics["text_loss"]
        if settings.prediction_weight:
            next_features, _ = self.policy.describe_frames(batch[schema.NEXT_OBSERVATION])
            same = _same_rows(batch[schema.NEXT_OBSERVATION])
            logits = self.predictor.next_logits(features, self._actions(batch), next_features, same)
            right = torch.arange(len(features), device=features.device)
            metrics |= _measure("prediction", logits, right)
            loss = loss + settings.prediction_weight * metrics["prediction_loss"]
        return loss, metrics

    def _check_alternatives(self, scores: Tensor) -> None:
        """Raise an error if all instructions of the first batch are equal: there is nothing to choose from."""
        if self._has_alternatives:
            return
        if not (scores[..., 1:] > NO_ALTERNATIVE).any():
            raise InputError(
                f"text_weight {self.settings.text_weight:g}: all {len(scores)} transitions of the first batch have the "
                "same instruction, so that there is no other to compare it with; use --text_weight 0"
            )
        self._has_alternatives = True

    @torch.no_grad()
    def _actions(self, batch: Mapping[Any, Any]) -> Tensor:
        """Unit actions between two observations, [B, K · A]; 0 after the end of an episode."""
        unit, mask = self.policy.to_unit(batch[schema.ACTION]), batch.get(schema.STEP_MASK)
        if mask is None:
            return unit
        return (unit.unflatten(1, (mask.shape[1], -1)) * mask.unsqueeze(-1)).flatten(1)


def _every(parts: Sequence[Any], first: int) -> Any:
    """Every n-th row of n batches together, from row `first` on; of each tensor in nested mappings."""
    if isinstance(parts[0], Mapping):
        return {name: _every([part[name] for part in parts], first) for name in parts[0]}
    return torch.cat(list(parts))[first :: len(parts)]


@torch.no_grad()
def _same_rows(streams: Mapping[str, Tensor]) -> Tensor:
    """Which rows of a batch have the same bytes in all streams, bool [B, B]; by a checksum of 64 bits."""
    checksums: Any = 0
    for name in sorted(streams):
        data = streams[name].flatten(1).contiguous().view(torch.uint8).long()
        factors = (torch.arange(data.shape[1], device=data.device) + 1) * MULTIPLIER  # modulo 2⁶⁴
        factors = (factors ^ (factors >> 31)) * MULTIPLIER  # as good as random
        checksums = checksums * MULTIPLIER + (data * factors).sum(1)
    return checksums[:, None] == checksums[None]


def _measure(name: str, logits: Tensor, right: Tensor) -> Metrics:
    """Cross-entropy and accuracy of the right answers [B], means over cameras and rows of logits [cameras, B, n]."""
    loss = functional.cross_entropy(logits.flatten(0, 1), right.repeat(len(logits)))
    accuracy = (logits.detach().argmax(-1) == right).float().mean()
    return {f"{name}_loss": loss, f"{name}_accuracy": accuracy}
