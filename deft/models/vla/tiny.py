"""`vla-tiny`: a vision-language-action model that two CPU cores can train, with one of four action heads.

`load_vla_model` builds it by that name. `deft train sft` trains it on demonstrations; PPO, GRPO and IQL continue from
these weights. One forward pass gives the features [B, F] that the action head and the value head read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models.chunks import Chunks
from deft.models.denoising import DENOISING_CHUNKS, Denoising
from deft.models.frame_prediction import NO_ALTERNATIVE
from deft.models.inpainting import Inpainting
from deft.models.normalization import RunningNormalizer
from deft.models.vla.cameras import ENCODERS, LEAST_CELLS, TEXT_DIM, CameraEncoder
from deft.models.vla.heads import ROUNDING, GaussianChunks, SwitchedChunks, TokenChunks
from deft.models.vla.interface import Sample
from deft.models.vla.spec import ProprioSpec
from deft.models.vla.streams import Observations, StreamVLA, read_stream, square_images

IMAGE_MULTIPLE = 16  # image sizes are multiples of it, in pixels
POSITIONS_DIM = 24  # predicted object positions, and further learned features after them
WORD_BUCKETS, MAX_WORDS = 1024, 16
TASK_DIM = 8  # text features that the trunk reads directly: they identify the task, not the object
SPACE_BYTE = 32
HEADS = ("gaussian", "token", *DENOISING_CHUNKS)
IMITATION = ("absolute", "squared")
VALUE_SCALE = 10.0  # factor on the output: the value learns faster than the policy at the same learning rate
MAX_OBSERVED = 20_000  # number of observations in the normalisation statistics
PROPRIO_EPSILON = 1e-4  # added to a variance: dims that are almost constant in the data are not amplified
POSITIONS_WEIGHT = 0.3  # weight of the loss of object positions in the imitation loss
UNLABELLED_WEIGHT = 0.1  # weight of a position without a label, whose target is 0 so that it does not drift
LABEL_NOISE = 0.004  # metres: noise on labels that the trunk reads in imitation; its predictions have errors too
FINE = (0.05, 0.015)  # metres: with a bottleneck the trunk also reads tanh(position / scale) for these scales


class WordEncoder(nn.Module):
    """Words → [B, TEXT_DIM]: embeddings by hash, convolutions over neighbouring words, pooling by learned queries.

    Neighbours give a word its role: "on the cup" differs from "put the cup". Any text is accepted; a word that is not
    in the training data has an untrained embedding.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORD_BUCKETS, TEXT_DIM, padding_idx=0)
        self.position = nn.Parameter(0.1 * torch.randn(MAX_WORDS, TEXT_DIM))
        self.neighbours = nn.ModuleList(nn.Conv1d(TEXT_DIM, TEXT_DIM, 3, padding=1) for _ in range(2))
        self.queries = nn.Parameter(torch.randn(4, TEXT_DIM) / math.sqrt(TEXT_DIM))
        self.out = nn.Sequential(nn.Linear(4 * TEXT_DIM, TEXT_DIM), nn.LayerNorm(TEXT_DIM))

    def forward(self, ids: Tensor) -> Tensor:
        """Word ids, int64 [B, MAX_WORDS] → [B, TEXT_DIM]."""
        present = (ids > 0).unsqueeze(1)
        tokens = ((self.words(ids) + self.position).transpose(1, 2)) * present
        for layer in self.neighbours:
            tokens = (tokens + functional.relu(layer(tokens))) * present
        scores = (self.queries @ tokens).masked_fill(~present, -1e4)
        gathered = scores.softmax(-1) @ tokens.transpose(1, 2)  # [B, 4, TEXT_DIM]
        return self.out(gathered.flatten(1))


def word_ids(text: Tensor) -> Tensor:
    """Ids of the words of texts, uint8 [B, L]: int64 [B, MAX_WORDS], 1 to WORD_BUCKETS − 1, and 0 for padding.

    The id of a word is Σ byte_i · 31^i, modulo a prime and the number of buckets.
    """
    is_letter = (text != 0) & (text != SPACE_BYTE)
    begins = is_letter & ~functional.pad(is_letter, (1, -1))
    word = begins.cumsum(1) - 1
    columns = torch.arange(text.shape[1], device=text.device).expand_as(word)
    # The column at which the current word begins
    starts = torch.where(begins, columns, 0)
    if torch.compiler.is_exporting():  # ONNX has no running maximum
        start = torch.where(columns[:, None] <= columns[..., None], starts.unsqueeze(1), 0).amax(-1)
    else:
        start = starts.cummax(1).values
    powers = _powers(text.shape[1], text.device)
    parts = torch.where(is_letter, text.long() * powers[columns - start], 0)
    hashes = parts.new_zeros(len(text), MAX_WORDS + 1)
    counted = parts.new_zeros(len(text), MAX_WORDS + 1)
    index = word.clamp(0, MAX_WORDS)  # words after the first MAX_WORDS are left out
    hashes.scatter_add_(1, index, parts)
    counted.scatter_add_(1, index, is_letter.long())
    numbers = 1 + hashes % 65_521 % (WORD_BUCKETS - 1)
    return torch.where(counted > 0, numbers, 0)[:, :MAX_WORDS]


@functools.cache
def _powers(count: int, device: torch.device) -> Tensor:
    """31^i modulo a prime for i below `count`; copied to the device once."""
    with torch.inference_mode(False):
        return torch.tensor([pow(31, i, 65_521) for i in range(count)], device=device)


@dataclass(kw_only=True)
class TinySpec(ProprioSpec):
    """The keywords of `TinyVLAModel`."""

    head: str = "gaussian"
    chunk_length: int = 4
    image_keys: Sequence[str] = ("head_rgb", "wrist_rgb")
    image_size: int = 64
    cell: int = 2
    vision: str = "cells"
    proprio_dim: int = 24
    width: int = 256
    log_std_init: float = -3.0
    log_common_init: float = -2.0
    imitation: str = "absolute"
    switch_dims: Sequence[int] = ()
    num_bins: int = 32
    flow_steps: int = 5
    flow_noise: float = 0.1
    noise_network: bool = False
    noise_min: float = 0.05
    noise_max: float = 0.2
    diffusion_steps: int = 20
    ddim_steps: int = 5
    trained_steps: int | None = None
    value_gradient: bool = False
    freeze_vision: bool = False
    bottleneck: int = 0
    places_key: str | None = None
    places_dim: int = 8

    def __post_init__(self) -> None:
        """Check the values."""
        self.check_choice(head=HEADS, imitation=IMITATION, vision=ENCODERS)
        if self.image_size < IMAGE_MULTIPLE or self.image_size % IMAGE_MULTIPLE:
            raise InputError(f"image_size {self.image_size} is no multiple of {IMAGE_MULTIPLE}")
        if self.cell < 1 or IMAGE_MULTIPLE % self.cell:
            raise InputError(f"cell {self.cell} is none of 1, 2, 4, 8, 16")
        if self.vision == "convolutions" and self.image_size < LEAST_CELLS * self.cell:
            raise InputError(
                f"vision convolutions: an image of {self.image_size} pixels has fewer than {LEAST_CELLS} cells of "
                f"{self.cell} pixels a side; use a smaller cell"
            )
        super().__post_init__()
        self.check_least(width=1, num_bins=2, flow_steps=1, diffusion_steps=2, ddim_steps=1, places_dim=1)
        if self.places_dim > POSITIONS_DIM:
            raise InputError(
                f"places_dim {self.places_dim}, the number of labels, must be at most {POSITIONS_DIM}; of key frames "
                "choose fewer with keyframe_dims"
            )
        if isinstance(self.bottleneck, bool) or not (
            self.bottleneck == 0 or self.places_dim <= self.bottleneck <= POSITIONS_DIM
        ):
            raise InputError(
                f"bottleneck {self.bottleneck} must be 0 (none), or {self.places_dim} (places_dim) to {POSITIONS_DIM}"
            )
        if isinstance(self.switch_dims, str | int) or any(type(dim) is not int for dim in self.switch_dims):
            raise InputError(f"switch_dims {self.switch_dims!r} must be a list of integers, such as [-1]")
        if any(not -self.action_dim <= dim < self.action_dim for dim in self.switch_dims):
            raise InputError(
                f"switch_dims {list(self.switch_dims)}: an action has dims 0 to {self.action_dim - 1} (−1 is the last)"
            )
        if len({dim % self.action_dim for dim in self.switch_dims}) == self.action_dim:
            raise InputError("switch_dims names every dim; leave at least one to the head")
        for name in ("flow_noise", "noise_min"):
            if not (value := vars(self)[name]) > 0:
                raise InputError(f"{name} {value} must be above 0: without noise a chain has no log-prob")


class TinyVLAModel(StreamVLA):
    """Map camera images, proprioception and an instruction to a chunk of K actions and a value.

    `head`: `gaussian` (a mean for each dim, a learned deviation for each dim and step of the chunk), `token` (a
    categorical over `num_bins` equal bins of [-1, 1] for each dim and step), `flow` (a velocity that turns noise
    into actions in `flow_steps` steps, each with noise of a learned deviation, so that the chain has a log-prob), or
    `diffusion` (the same with a network that predicts noise, trained as DDPM).

    With `value_gradient` the loss of the value trains the trunk too, otherwise only the value head.

    `places_key` names a stream of labels: `places_dim` object positions that are visible in the images. Supervised
    training then also learns to predict them. Labels are used in training only: no action and no value depends on
    them. With a `bottleneck` of n the trunk reads only the first n of the predicted positions (those with labels come
    first) and no other image features, so that later training of the vision encoder does not disturb it. It reads the
    labelled positions in metres too, at a coarse and a fine scale: the actions 2 cm and 5 mm above an object differ,
    and a position normalised to the table shows that only in its third digit.
    """

    image_multiple = IMAGE_MULTIPLE
    capturable = True
    spec_class = TinySpec

    def __init__(self, spec: TinySpec | None = None, **given: Any) -> None:
        spec = TinySpec(**given) if spec is None else spec
        super().__init__(spec)
        self.switch_dims = sorted({dim % spec.action_dim for dim in spec.switch_dims})
        self.head_name, self.image_size, self.value_gradient = spec.head, spec.image_size, spec.value_gradient
        self.starts_from_noise = spec.head in DENOISING_CHUNKS
        self.keeps_sample = self.starts_from_noise or spec.freeze_vision  # a chain, or features of frozen encoders
        self.freeze_vision, self.bottleneck = spec.freeze_vision, spec.bottleneck
        self.places_key, self.places_dim = spec.places_key, spec.places_dim
        self.width = width = spec.width

        # `names` conditions the image queries, `text` identifies the task: labels of positions train only the first.
        self.text: Any = WordEncoder()
        self.names: Any = WordEncoder()
        self.task: Any = nn.Linear(TEXT_DIM, TASK_DIM)
        self.cameras: Any = nn.ModuleList(ENCODERS[spec.vision](spec.image_size, spec.cell) for _ in self.image_keys)
        inputs = TASK_DIM + len(self.image_keys) * CameraEncoder.out_dim
        if spec.proprio_key is not None:
            self.proprio: Any = RunningNormalizer((spec.proprio_dim,), clip=5.0, epsilon=PROPRIO_EPSILON)
            inputs += spec.proprio_dim
        half = max(width // 2, 1)
        # Predicts object positions; the trunk predicts actions from them.
        self.found: Any = nn.Sequential(
            nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, half), nn.ReLU(),
            nn.Linear(half, POSITIONS_DIM),
        )  # fmt: skip
        body = TASK_DIM + (0 if spec.proprio_key is None else spec.proprio_dim)
        inputs = spec.bottleneck + len(FINE) * spec.places_dim + body if spec.bottleneck else POSITIONS_DIM + inputs
        self.trunk: Any = nn.Sequential(
            nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()
        )
        others = spec.action_dim - len(self.switch_dims)
        if spec.head == "gaussian":
            chunks: Chunks = GaussianChunks(
                width, spec.chunk_length, others, spec.log_std_init, spec.log_common_init, spec.imitation
            )
        elif spec.head == "token":
            chunks = TokenChunks(width, spec.chunk_length, others, spec.num_bins)
        else:
            chunks = DENOISING_CHUNKS[spec.head](width, spec.chunk_length, others, Denoising.of(spec))
        if self.switch_dims:
            chunks = SwitchedChunks(chunks, width, spec.chunk_length, spec.action_dim, self.switch_dims)
        self.head: Any = chunks
        self.noise_shape, self.can_inpaint = chunks.noise_shape, chunks.noise_shape is not None
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.feature_dim = inputs + width
        self.value_head = nn.Sequential(
            nn.Linear(self.feature_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last
        )
        # Present with and without labels, so that weights trained with labels also load where there are none.
        self.places_scale: Any = RunningNormalizer((POSITIONS_DIM,), clip=5.0, epsilon=PROPRIO_EPSILON)
        if spec.freeze_vision:
            for module in self._vision():
                module.requires_grad_(False)

    @property
    def has_mean(self) -> bool:
        """Whether the deterministic action is a mean with a gradient in every dim: only that of a Gaussian."""
        return self.head_name == "gaussian" and not self.switch_dims

    @property
    def has_samples(self) -> bool:
        """Whether samples are differentiable: only those of a Gaussian."""
        return self.has_mean

    # -- the interface of a VLA model ----------------------------------------------------------------------------------

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""
        return self.value_of(self.features(observations))

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Actions, their log-prob [B], the value [B, 1], and the sample if `keeps_sample`; in one forward pass."""
        encoded = self.encode_observations(observations)
        features = self.trunk_features(encoded)
        action, log_prob, sample = self.head.draw(self._for_head(features), deterministic, self.real(action_mask))
        outputs = (self.shaped(action, action_mask), log_prob, self.value_of(features))
        if self.freeze_vision:
            sample = sample | {schema.LATENT: encoded}
        return (*outputs, sample) if self.keeps_sample else outputs

    def evaluate_tokens(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the log-prob of each step of the chunk, [B, K], or of the chain of a flow, [B, S]."""
        if self.starts_from_noise and sample is None:
            raise InputError(
                f"the actions of a {self.head_name} head have no log-prob of their own: score its chain (`sample`)"
            )
        return self._scored(self._features_of(observations, sample), actions, action_mask, sample)

    @property
    def can_reparameterize(self) -> bool:
        """Whether the head has means."""
        return self.head.can_reparameterize

    def evaluate_path(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        """As `evaluate`, the actions with the gradient of their means, and those with other switches."""
        features, chunk = self._features_of(observations, sample), self.chunk(actions)
        tokens, entropy, value = self._scored(features, actions, action_mask, sample)
        read = self._for_head(features)
        return tokens.sum(1), entropy, value, self.head.reparameterize(read, chunk), self.head.alternatives(read, chunk)

    def _features_of(self, observations: TensorDictBase, sample: Sample) -> Tensor:
        """Features of observations, from what `act` encoded if the sample has it."""
        encoded = None if sample is None else sample.get(schema.LATENT, None)
        return self.features(observations) if encoded is None else self.trunk_features(encoded)

    def _scored(
        self, features: Tensor, actions: Tensor, action_mask: Tensor | None, sample: Sample
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs [B, K], entropy [B] and value [B, 1]."""
        chunk, mask = self.chunk(actions), self.real(action_mask)
        tokens, entropy = self.head.score(self._for_head(features), chunk, mask, sample)
        return tokens, entropy, self.value_of(features)

    # -- for supervised and offline training ---------------------------------------------------------------------------

    def features(self, observations: TensorDictBase) -> Tensor:
        """Concatenated inputs and outputs of the trunk, [B, F].

        The action head reads only the outputs. The value head reads both: inputs that no action depends on may still
        predict the return.
        """
        return self.trunk_features(self.encode_observations(observations))

    def encode_observations(self, observations: TensorDictBase) -> Tensor:
        """Encode images, proprioception and the instruction: [B, S]."""
        images = [square_images(read_stream(observations, key), self.image_size, key) for key in self.image_keys]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._trains_vision()):
            texts = self.instructions(observations)
            if texts is None:
                text = names = self.trunk[0].weight.new_zeros(len(images[0]), TEXT_DIM)
            else:
                text, names = self._encode_texts(texts)
            parts = [camera(image, names) for camera, image in zip(self.cameras, images, strict=True)]
            if self.proprio_key is not None:
                parts.append(self.proprio(self.proprio_vectors(observations, len(images[0]), images[0].device)))
            return torch.cat([*parts, self.task(text)], 1)

    def _encode_texts(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Text features [B, TEXT_DIM] of `text` and of `names`.

        On the CPU each different text is encoded once. On a GPU to encode all is faster than to wait for their number.
        """
        if not texts.is_cpu or len(texts) == 1 or torch.compiler.is_exporting():
            words = word_ids(texts)
            return self.text(words), self.names(words)
        different, which = torch.unique(texts, dim=0, return_inverse=True)
        words = word_ids(different)
        return self.text(words)[which], self.names(words)[which]

    def trunk_features(self, encoded: Tensor, positions: Tensor | None = None) -> Tensor:
        """Concatenate inputs and outputs of the trunk for encoded observations: [B, F].

        `positions` [B, POSITIONS_DIM] replace the object positions that the model predicts.
        """
        positions, others = self.found(encoded) if positions is None else positions, encoded
        if self.bottleneck:
            metres = self.places_scale.inverse(positions)[:, : self.places_dim]
            fine = [torch.tanh(metres / scale) for scale in FINE]
            others = torch.cat([*fine, encoded[:, len(self.cameras) * CameraEncoder.out_dim :]], 1)
            positions = positions[:, : self.bottleneck]
        inputs = torch.cat([positions, others], 1)
        return torch.cat([inputs, self.trunk(inputs)], 1)

    def value_of(self, features: Tensor) -> Tensor:
        """V on features […, F]: […, 1]."""
        return VALUE_SCALE * self.value_head(features if self.value_gradient else features.detach())

    def imitation_loss(
        self,
        observations: TensorDictBase,
        actions: Tensor,
        step_mask: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Loss of supervised training, [B]: that of the head over the steps in `step_mask` [B, K], and of labels.

        `features` of the observations, if given, are used as they are; the loss of labels is then left out.
        """
        label_loss = None
        if features is None:
            features, label_loss = self.training_features(observations)
        loss = self.head.imitation_loss(self._for_head(features), self.chunk(actions), step_mask)
        return loss if label_loss is None else loss + label_loss

    def training_features(
        self, observations: TensorDictBase, object_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Features to learn from a dataset with, [B, F], and the loss of labels [B], if there are labels.

        With a bottleneck the trunk reads the labels themselves, with a little noise, so that errors of the predicted
        positions do not disturb what it learns about actions. `object_positions` [B, POSITIONS_DIM] replace the labels:
        those that the acting policy predicted, since its actions depend on its predictions and not on the true
        positions.
        """
        if self.places_key is None:
            return self.features(observations), None
        encoded = self.encode_observations(observations)
        predicted = self.found(encoded)
        if object_positions is None:
            object_positions = self._with_labels(observations, predicted) if self.bottleneck else predicted
        return self.trunk_features(encoded, object_positions), self.auxiliary_loss(observations, predicted)

    def object_positions(self, observations: TensorDictBase) -> Tensor:
        """Predicted object positions, [B, POSITIONS_DIM]: with a bottleneck all that the trunk reads of the images."""
        if self.places_key is None:
            raise InputError(
                "position_source: 'start' replaces labels, and the dataset has none: record it with "
                "--env-kwargs observation=labelled, or use position_source labels"
            )
        if not self.bottleneck:
            raise InputError(
                "position_source: 'start' is for a model with a bottleneck: train it with --vla-model-config "
                "bottleneck=8"
            )
        return self.found(self.encode_observations(observations))

    def auxiliary_loss(self, observations: TensorDictBase, predicted: Tensor | None = None) -> Tensor:
        """Smooth L1 error of the predicted object positions, normalised, times POSITIONS_WEIGHT: [B].

        A label of exactly 0 means that there is no position: the object is absent, or not named by the instruction.
        """
        predicted = self.found(self.encode_observations(observations)) if predicted is None else predicted
        labels, count = self._labels(observations), self.places_dim
        weight = torch.where(labels[:, :count] != 0, 1.0, UNLABELLED_WEIGHT)
        target = self.places_scale(labels)[:, :count]
        error = functional.smooth_l1_loss(predicted[:, :count], target, reduction="none", beta=ROUNDING)
        return POSITIONS_WEIGHT * (error * weight).mean(1)

    def auxiliary_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters that predict object positions."""
        if self.places_key is None:
            raise InputError(
                "auxiliary_learning_rate: vla-tiny learns object positions from labels, and the observations have "
                "none; use --env-kwargs observation=labelled"
            )
        for module in (self.names, self.cameras, self.found):  # not `text`, by which the trunk identifies the task
            yield from module.parameters()

    def describe_frames(self, observations: TensorDictBase, num_texts: int = 0) -> tuple[Tensor, Tensor | None]:
        """Features of the images, [B, cameras, F], and scores of instructions, [B, cameras, num_texts].

        Features depend on a text. It is that of the first row for all images: with their own, the next image of a row
        would be recognised by its instruction, without looking at it.
        """
        images = [square_images(read_stream(observations, key), self.image_size, key) for key in self.image_keys]
        texts, batch = self.instructions(observations), len(images[0])
        if texts is None:
            names = self.trunk[0].weight.new_zeros(batch, TEXT_DIM)
        else:
            names = self._encode_texts(texts)[1]
        shared, pairs = names[:1].expand(batch, -1), list(zip(self.cameras, images, strict=True))
        if not num_texts:
            return torch.stack([camera(image, shared) for camera, image in pairs], 1), None
        if texts is None:
            raise InputError(
                "text_weight: the observations have no instructions to compare with the images; use --text_weight 0"
            )
        rows = torch.arange(batch, device=names.device)
        candidates = (rows[:, None] + rows[:num_texts]) % batch
        is_same = (texts[candidates] == texts[:, None]).all(-1)
        is_same[:, 0] = False
        choices = names[candidates]
        features, scores = zip(*(camera.describe(image, shared, choices) for camera, image in pairs), strict=True)
        return torch.stack(features, 1), torch.stack(scores, 1).masked_fill(is_same[:, None], NO_ALTERNATIVE)

    def vision_parameters(self) -> Iterator[nn.Parameter]:
        """Yield those of the camera encoders and of the text encoder that conditions them."""
        for module in (self.names, self.cameras):
            yield from module.parameters()

    @property
    def frame_shape(self) -> tuple[int, int]:
        """Number of cameras, and of features of each."""
        return len(self.cameras), CameraEncoder.out_dim

    def set_precision(self, dtype: torch.dtype) -> None:
        """Compute the cells of the camera encoders in `dtype`."""
        for camera in self.cameras:
            camera.dtype = dtype

    def noise_parameters(self) -> Iterator[nn.Parameter]:
        """Yield those of a Gaussian head."""
        yield from self.head.noise_parameters()

    def observe(self, observations: Observations) -> None:
        """Update the statistics of proprioception and object positions, with at most `MAX_OBSERVED` observations."""
        if self.proprio_key is not None and self.proprio.count < MAX_OBSERVED:
            self.proprio.observe(observations[self.proprio_key].float())
        if self.places_key is not None and self.places_scale.count < MAX_OBSERVED:
            self.places_scale.observe(self._labels(observations))

    def sample_many(self, observations: TensorDictBase, count: int) -> tuple[Tensor, Tensor]:
        """`count` differentiable samples per observation, [count, B, …], and their log-densities [count, B]."""
        if not self.has_samples:
            name = "head with switches" if self.switch_dims else f"{self.head_name} head"
            raise InputError(f"a {name} has no differentiable samples with a log-density")
        features = self._for_head(self.features(observations)).repeat(count, 1)
        actions, log_prob, _ = self.head.draw(features, False, None)
        return self.shaped(actions).unflatten(0, (count, -1)), log_prob.unflatten(0, (count, -1))

    def denoise(
        self,
        observations: TensorDictBase,
        noise: Tensor,
        action_mask: Tensor | None = None,
        features: Tensor | None = None,
        inpainting: Inpainting | None = None,
    ) -> Tensor:
        """The actions that noise [B, *noise_shape] leads to: those of `act` when deterministic, from this noise."""
        if self.noise_shape is None:
            return super().denoise(observations, noise)
        features = self.features(observations) if features is None else features
        inpainting = None if inpainting is None else inpainting.masked(action_mask)
        return self.shaped(self.head.denoise(self._for_head(features), noise, inpainting), action_mask)

    # -- inputs and outputs --------------------------------------------------------------------------------------------

    def _vision(self) -> tuple[nn.Module, ...]:
        return self.text, self.task, self.names, self.cameras

    def _trains_vision(self) -> bool:
        """Whether a parameter of the encoders of images and text is trained."""
        return any(parameter.requires_grad for module in self._vision() for parameter in module.parameters())

    def _for_head(self, features: Tensor) -> Tensor:
        return features[..., -self.width :]

    def _with_labels(self, observations: TensorDictBase, predicted: Tensor) -> Tensor:
        """Predicted positions, [B, POSITIONS_DIM], with the labelled ones replaced by their labels plus noise."""
        labels, count = self._labels(observations), self.places_dim
        noise = functional.pad(LABEL_NOISE * torch.randn_like(labels[:, :count]), (0, POSITIONS_DIM - count))
        return torch.cat([self.places_scale(labels + noise)[:, :count], predicted[:, count:]], 1)

    def _labels(self, observations: Observations) -> Tensor:
        """Labels of object positions, padded with zeros: […, POSITIONS_DIM]."""
        positions = self.vectors(observations, str(self.places_key), self.places_dim, "places_dim")
        return functional.pad(positions, (0, POSITIONS_DIM - self.places_dim))
