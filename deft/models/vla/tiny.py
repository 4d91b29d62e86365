"""`vla-tiny`: a vision-language-action model that two CPU cores can train, with a Gaussian, token or flow head.

Loaded by `load_vla_model` under that name; `deft train sft` trains it on demonstrations, PPO, GRPO and IQL go on from
there. One pass through the trunk gives features [B, F] on which the actions' head and the value stand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models.normalization import RunningNormalizer
from deft.models.vla.heads import ROUNDING, Chunks, FlowChunks, GaussianChunks, SwitchedChunks, TokenChunks
from deft.models.vla.images import square_images
from deft.models.vla.interface import ScoredInParts
from deft.models.vla.spec import ProprioSpec

IMAGE_MULTIPLE = 16  # of which a picture's side is one, in pixels
CHANNELS = 24
QUERIES, WORD_QUERIES = 16, 8  # places that a picture is searched for, those that words name
LOOK_DIM = 4  # numbers that say what was found at a place
FOUND_DIM = 24  # numbers that say where things are, and what else the actions turn on
WORD_BUCKETS, MAX_WORDS, TEXT_DIM = 1024, 16, 64
TASK_DIM = 8  # what of the text reaches the trunk past the cameras: which task it is, not which object
SPACE_BYTE = 32
HEADS = ("gaussian", "token", "flow")
IMITATION = ("absolute", "squared")
SHARPNESS = 5.0  # of where a query looks: one that sees everything at once learns several times as slowly where to look
VALUE_SCALE = 10.0  # with it the value learns so many times as fast as the policy, from one step size
ENOUGH_OBSERVED = 20_000  # observations that the proprioception is normalised by
PROPRIO_EPSILON = 1e-4  # of a variance: a number that hardly moves in the data is not blown up
PLACES_WEIGHT = 0.3  # of the error of places in imitation, beside that of actions
UNTOLD_WEIGHT = 0.1  # of a place that no label tells: it is to be 0, so that it does not wander, and no more than that
TOLD_BLUR = 0.004  # metres by which places that the trunk is told in imitation are off: those that it finds are too
FINE = (0.05, 0.015)  # metres in which the trunk behind a bottleneck reads a place as well: tanh(place / metres)


class WordEncoder(nn.Module):
    """Words → [B, TEXT_DIM]: each by its hash, read with its neighbours, gathered by learned queries.

    Neighbours say the role: what follows "on the" is not what follows "put the". Any text can be read; a word that was
    never trained on is a vector that was never trained.
    """

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORD_BUCKETS, TEXT_DIM, padding_idx=0)
        self.position = nn.Parameter(0.1 * torch.randn(MAX_WORDS, TEXT_DIM))
        self.neighbours = nn.ModuleList(nn.Conv1d(TEXT_DIM, TEXT_DIM, 3, padding=1) for _ in range(2))
        self.queries = nn.Parameter(torch.randn(4, TEXT_DIM) / math.sqrt(TEXT_DIM))
        self.out = nn.Sequential(nn.Linear(4 * TEXT_DIM, TEXT_DIM), nn.LayerNorm(TEXT_DIM))

    def forward(self, ids: Tensor) -> Tensor:
        """Numbers of words, int64 [B, MAX_WORDS] → [B, TEXT_DIM]."""
        present = (ids > 0).unsqueeze(1)
        tokens = ((self.words(ids) + self.position).transpose(1, 2)) * present
        for layer in self.neighbours:
            tokens = (tokens + functional.relu(layer(tokens))) * present
        scores = (self.queries @ tokens).masked_fill(~present, -1e4)
        gathered = scores.softmax(-1) @ tokens.transpose(1, 2)  # [B, 4, TEXT_DIM]
        return self.out(gathered.flatten(1))


def word_ids(text: Tensor) -> Tensor:
    """The words of texts, uint8 [B, L], as numbers 1 to WORD_BUCKETS − 1, int64 [B, MAX_WORDS]; 0 where there is none.

    A word's number is Σ byte_i · 31^i, modulo a prime and the buckets.
    """
    is_letter = (text != 0) & (text != SPACE_BYTE)
    begins = is_letter & ~functional.pad(is_letter, (1, -1))
    word = begins.cumsum(1) - 1
    places = torch.arange(text.shape[1], device=text.device).expand_as(word)
    # The last place at which a word began, so far
    start = torch.where(begins, places, 0).cummax(1).values
    powers = torch.tensor([pow(31, i, 65_521) for i in range(text.shape[1])], device=text.device)
    parts = torch.where(is_letter, text.long() * powers[places - start], 0)
    hashes = parts.new_zeros(len(text), MAX_WORDS + 1)
    counted = parts.new_zeros(len(text), MAX_WORDS + 1)
    index = word.clamp(0, MAX_WORDS)  # what comes after the last word that there is room for is left out
    hashes.scatter_add_(1, index, parts)
    counted.scatter_add_(1, index, is_letter.long())
    numbers = 1 + hashes % 65_521 % (WORD_BUCKETS - 1)
    return torch.where(counted > 0, numbers, 0)[:, :MAX_WORDS]


class CameraEncoder(nn.Module):
    """A picture as the places of what the words ask for, and of a few things that are always worth a look.

    The picture is seen in cells, one every `cell` pixels, each of a patch twice as wide: f = relu(V relu(W pixels)).
    A query q, learned or made of the text, looks for its cell:  p = softmax(5 f q);  out = (Σ p x, Σ p y, max f q,
    Σ p L f): where it is, how sure that is, and how it looks. Neighbouring patches overlap, so that a thing between two
    cells is found between them. Everything is a matrix product: the gradient of a convolution costs a CPU several times
    as much.
    """

    grid: Tensor
    out_dim = (3 + LOOK_DIM) * QUERIES

    def __init__(self, image_size: int, cell: int) -> None:
        super().__init__()
        self.cell = cell
        self.pixels = nn.Linear(3 * (2 * cell) ** 2, CHANNELS)
        self.cells = nn.Linear(CHANNELS, CHANNELS)
        self.look = nn.Linear(CHANNELS, LOOK_DIM)
        self.queries = nn.Parameter(torch.randn(QUERIES - WORD_QUERIES, CHANNELS))
        self.words = nn.Linear(TEXT_DIM, WORD_QUERIES * CHANNELS)
        line = torch.linspace(-1.0, 1.0, image_size // cell)
        y, x = torch.meshgrid(line, line, indexing="ij")
        self.register_buffer("grid", torch.stack([x.flatten(), y.flatten()], 1), persistent=False)

    def forward(self, image: Tensor, text: Tensor) -> Tensor:
        """uint8 pictures [B, 3, h, w] and texts [B, TEXT_DIM] → [B, out_dim]."""
        pixels = functional.linear(self.cut(image), self._by_quarter(self.pixels.weight), self.pixels.bias)
        cells = functional.relu(self.cells(functional.relu(pixels)))  # [B, cells, C]
        asked = self.words(text).view(len(text), WORD_QUERIES, CHANNELS)
        queries = torch.cat([self.queries.expand(len(text), -1, -1), asked], 1)
        # In this order, and with the queries laid out anew, many times as fast as queries @ cellsᵀ
        matches = (cells @ queries.transpose(1, 2).contiguous()).transpose(1, 2).contiguous()  # [B, Q, cells]
        where = (SHARPNESS * matches).softmax(-1)
        places, looks = where @ self.grid, where @ self.look(cells)  # [B, Q, 2], [B, Q, LOOK_DIM]
        # amax is several times as fast; but its gradient compares all cells, where that of max is one of them
        sure = matches.max(-1).values if matches.requires_grad else matches.amax(-1)
        return torch.cat([places.flatten(1), sure, looks.flatten(1)], 1)

    def cut(self, image: Tensor) -> Tensor:
        """The pixels that each cell sees, scaled to [-1, 1]: [B, cells, 3 (2 cell)²]; black beyond the border.

        A patch is four squares of cell² pixels, which it shares with its neighbours: pixels are sorted into squares
        once, and a patch is put together from four of them. They come square by square, then by channel.
        """
        cell, side = self.cell, image.shape[-1] // self.cell + 1
        left = cell // 2
        padded = functional.pad(image, (left, cell - left, left, cell - left)).view(-1, 3, side, cell, side, cell)
        squares = self.pixels.weight.new_empty(len(image), side, side, 3, cell, cell)
        for channel, row in itertools.product(range(3), range(cell)):  # three times as fast as all of it in one
            squares[..., channel, row, :] = padded[:, channel, :, row]
        squares = squares.flatten(3).sub_(127.5).mul_(1 / 127.5)
        upper, lower = squares[:, :-1], squares[:, 1:]
        patches = [upper[:, :, :-1], upper[:, :, 1:], lower[:, :, :-1], lower[:, :, 1:]]
        return torch.cat(patches, -1).flatten(1, 2)

    def _by_quarter(self, weight: Tensor) -> Tensor:
        """Weights of a patch's pixels, by channel, row and column, in the order of `cut`."""
        parts = weight.view(-1, 3, 2, self.cell, 2, self.cell)
        return parts.permute(0, 2, 4, 1, 3, 5).reshape(weight.shape)


@dataclass(kw_only=True)
class TinySpec(ProprioSpec):
    """The keywords of `TinyVLAModel`."""

    head: str = "gaussian"
    chunk_length: int = 4
    image_keys: Sequence[str] = ("head_rgb", "wrist_rgb")
    image_size: int = 64
    cell: int = 2
    proprio_dim: int = 24
    width: int = 256
    log_std_init: float = -3.0
    log_common_init: float = -2.0
    imitation: str = "absolute"
    switch_dims: Sequence[int] = ()
    num_bins: int = 32
    flow_steps: int = 5
    flow_noise: float = 0.1
    value_gradient: bool = False
    freeze_vision: bool = False
    bottleneck: int = 0
    places_key: str | None = None
    places_dim: int = 8

    def __post_init__(self) -> None:
        """Check the values."""
        if self.head not in HEADS:
            raise InputError(f"head {self.head!r} is none of {', '.join(HEADS)}")
        if self.imitation not in IMITATION:
            raise InputError(f"imitation {self.imitation!r} is none of {', '.join(IMITATION)}")
        if self.image_size < IMAGE_MULTIPLE or self.image_size % IMAGE_MULTIPLE:
            raise InputError(f"image_size {self.image_size} is no multiple of {IMAGE_MULTIPLE}")
        if self.cell < 1 or IMAGE_MULTIPLE % self.cell:
            raise InputError(f"cell {self.cell} is none of 1, 2, 4, 8, 16")
        super().__post_init__()
        self.check_least(width=1, num_bins=2, flow_steps=1, places_dim=1)
        if self.places_dim > FOUND_DIM:
            raise InputError(f"places_dim {self.places_dim} must be at most {FOUND_DIM}")
        if isinstance(self.bottleneck, bool) or not (
            self.bottleneck == 0 or self.places_dim <= self.bottleneck <= FOUND_DIM
        ):
            raise InputError(
                f"bottleneck {self.bottleneck} must be 0 (none), or {self.places_dim} (places_dim) to {FOUND_DIM}"
            )
        if isinstance(self.switch_dims, str | int) or any(type(dim) is not int for dim in self.switch_dims):
            raise InputError(f"switch_dims {self.switch_dims!r}: it is a list of whole numbers, such as [-1]")
        if any(not -self.action_dim <= dim < self.action_dim for dim in self.switch_dims):
            raise InputError(
                f"switch_dims {list(self.switch_dims)}: an action has dims 0 to {self.action_dim - 1} (−1 is the last)"
            )
        if len({dim % self.action_dim for dim in self.switch_dims}) == self.action_dim:
            raise InputError("switch_dims names every dim; leave at least one to the head")
        if not self.flow_noise > 0:
            raise InputError(f"flow_noise {self.flow_noise} must be above 0: without noise a chain has no log-prob")


class TinyVLAModel(ScoredInParts):
    """Cameras, proprioception and an instruction in, a chunk of K actions and a value out.

    `head`: `gaussian` (a mean a dim, a learned deviation for each dim and step of the chunk), `token` (a categorical
    over `num_bins` equal bins of [-1, 1] for each dim and step), or `flow` (a velocity that turns noise into
    actions in `flow_steps` steps, each with noise of a learned deviation, so that the chain has a log-prob).

    With `value_gradient` the value's loss trains the trunk too, else its own layers alone.

    `places_key` names a stream of labels, `places_dim` numbers that the pictures show: where things are. Supervised
    training then also teaches the features to tell them. When it acts nothing reads them: no action and no value
    depends on them. With a `bottleneck` of n the first n numbers that say where things are, the labelled ones first,
    are all that the trunk knows of the pictures: what they learn of places later cannot confuse it. It reads the
    labelled ones as metres too, coarse and fine: what to do 2 cm above a place and 5 mm above it differs, and a number
    that spans the table says it in its third digit.
    """

    image_multiple = IMAGE_MULTIPLE
    spec_class = TinySpec

    def __init__(self, spec: TinySpec | None = None, **given: Any) -> None:
        spec = TinySpec(**given) if spec is None else spec
        super().__init__()
        self.switch_dims = sorted({dim % spec.action_dim for dim in spec.switch_dims})
        self.head_name, self.action_dim, self.chunk_length = spec.head, spec.action_dim, spec.chunk_length
        self.image_keys, self.image_size = tuple(spec.image_keys), spec.image_size
        self.proprio_key, self.proprio_dim = spec.proprio_key, spec.proprio_dim
        self.instruction_key, self.value_gradient = spec.instruction_key, spec.value_gradient
        self.freeze_vision, self.bottleneck = spec.freeze_vision, spec.bottleneck
        self.places_key, self.places_dim = spec.places_key, spec.places_dim
        self.width = width = spec.width

        # What the cameras look for is read apart from which task it is: labels then teach the one and leave the other.
        self.text: Any = WordEncoder()
        self.names: Any = WordEncoder()
        self.task: Any = nn.Linear(TEXT_DIM, TASK_DIM)
        self.cameras: Any = nn.ModuleList(CameraEncoder(spec.image_size, spec.cell) for _ in self.image_keys)
        inputs = TASK_DIM + len(self.image_keys) * CameraEncoder.out_dim
        if spec.proprio_key is not None:
            self.proprio: Any = RunningNormalizer((spec.proprio_dim,), clip=5.0, epsilon=PROPRIO_EPSILON)
            inputs += spec.proprio_dim
        half = max(width // 2, 1)
        # Where things are is one question, what to do about it the next.
        self.found: Any = nn.Sequential(
            nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU(), nn.Linear(width, half), nn.ReLU(),
            nn.Linear(half, FOUND_DIM),
        )  # fmt: skip
        body = TASK_DIM + (0 if spec.proprio_key is None else spec.proprio_dim)
        inputs = spec.bottleneck + len(FINE) * spec.places_dim + body if spec.bottleneck else FOUND_DIM + inputs
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
            chunks = FlowChunks(width, spec.chunk_length, others, spec.flow_steps, spec.flow_noise)
        if self.switch_dims:
            chunks = SwitchedChunks(chunks, width, spec.chunk_length, spec.action_dim, self.switch_dims)
        self.head: Any = chunks
        last = nn.Linear(width, 1)
        nn.init.zeros_(last.weight)
        nn.init.zeros_(last.bias)
        self.feature_dim = inputs + width
        self.value_head = nn.Sequential(
            nn.Linear(self.feature_dim, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), last
        )
        # There with and without labels: weights that were trained with them then act where there are none.
        self.places_scale: Any = RunningNormalizer((FOUND_DIM,), clip=5.0, epsilon=PROPRIO_EPSILON)
        if spec.freeze_vision:
            for module in self._vision():
                module.requires_grad_(False)

    @property
    def keeps_sample(self) -> bool:  # type: ignore[override]
        """Whether `act` also gives what was random beside the action, or seen, and `evaluate` asks for it."""
        return self.head_name == "flow" or self.freeze_vision

    @property
    def starts_from_noise(self) -> bool:  # type: ignore[override]
        """Whether its deterministic actions are denoised from drawn noise: those of a flow."""
        return self.head_name == "flow"

    @property
    def has_mean(self) -> bool:
        """Whether its deterministic action is a mean with a gradient in every dim: that of a Gaussian alone."""
        return self.head_name == "gaussian" and not self.switch_dims

    # -- the interface of a VLA model ----------------------------------------------------------------------------------

    def forward(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> Tensor:
        """Actions [B, A], or [B, K, A] with chunks of K > 1 steps; padded dims are 0."""
        return self.act(observations, deterministic, action_mask)[0]

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""
        return self.value_of(self.features(observations))

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Actions, their log-prob [B], the value [B, 1], and for a flow the denoising chain, in one pass."""
        seen = self.see(observations)
        features = self.think(seen)
        mask = self._mask(action_mask)
        action, log_prob, sample = self.head.draw(self._for_head(features), deterministic, mask)
        if mask is not None:
            action = action.masked_fill(~mask, 0.0)
        outputs = (self._shaped(action), log_prob, self.value_of(features))
        if self.freeze_vision:
            sample = sample | {schema.LATENT: seen}
        return (*outputs, sample) if self.keeps_sample else outputs

    def evaluate_tokens(
        self,
        observations: TensorDictBase,
        actions: Tensor,
        action_mask: Tensor | None = None,
        sample: Mapping[str, Tensor] | TensorDictBase | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the log-prob of each step of the chunk, [B, K], or of a flow's denoising, [B, S]."""
        if self.head_name == "flow" and sample is None:
            raise InputError("the actions of a flow have no log-prob of their own: score its chain (`sample`)")
        seen = None if sample is None else sample.get(schema.LATENT, None)
        features = self.features(observations) if seen is None else self.think(seen)
        chunk, mask = self._chunk(actions), self._mask(action_mask)
        tokens, entropy = self.head.score(self._for_head(features), chunk, mask, sample)
        return tokens, entropy, self.value_of(features)

    # -- for supervised and offline training ---------------------------------------------------------------------------

    def features(self, observations: TensorDictBase) -> Tensor:
        """What was seen, heard and felt, and what the trunk makes of it, [B, F].

        The actions' head reads the second part alone. The value reads both: what the trunk leaves out since no action
        depends on it may well say how an episode ends.
        """
        return self.think(self.see(observations))

    def see(self, observations: TensorDictBase) -> Tensor:
        """What the words ask for and where the cameras find it, and what is felt: [B, S]."""
        images = [self._image(observations, key) for key in self.image_keys]
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._sees_better()):
            if self.instruction_key is None:
                text = names = self.trunk[0].weight.new_zeros(len(images[0]), TEXT_DIM)
            else:
                texts = self._text(observations, self.instruction_key)
                different, which = torch.unique(texts, dim=0, return_inverse=True)  # each of them is read once
                words = word_ids(different)
                text, names = self.text(words)[which], self.names(words)[which]
            parts = [camera(image, names) for camera, image in zip(self.cameras, images, strict=True)]
            if self.proprio_key is not None:
                proprio = self._vectors(observations, self.proprio_key, self.proprio_dim, "proprio_dim")
                parts.append(self.proprio(proprio))
            return torch.cat([*parts, self.task(text)], 1)

    def think(self, seen: Tensor, found: Tensor | None = None) -> Tensor:
        """Where things are, what was seen, and what the trunk makes of both: [B, F].

        `found` [B, FOUND_DIM]: where things are, where that is known already; else it is found.
        """
        found, known = self.found(seen) if found is None else found, seen
        if self.bottleneck:
            places = self.places_scale.inverse(found)[:, : self.places_dim]
            fine = [torch.tanh(places / metres) for metres in FINE]
            known = torch.cat([*fine, seen[:, len(self.cameras) * CameraEncoder.out_dim :]], 1)
            found = found[:, : self.bottleneck]
        inputs = torch.cat([found, known], 1)
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
        """What supervised training minimises, [B]: −log π of the steps in `step_mask` [B, K], or a flow's error.

        `features`: those of the observations, where they are known already; the places are then not taught.
        """
        besides = None
        if features is None:
            features, besides = self.training_features(observations)
        loss = self.head.imitation_loss(self._for_head(features), self._chunk(actions), step_mask)
        return loss if besides is None else loss + besides

    def training_features(
        self, observations: TensorDictBase, object_positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """The features that learning from a dataset stands on, [B, F], and where there are labels, their loss [B].

        Behind a bottleneck the trunk learns what to do from the labels themselves, a little blurred: what a dataset
        teaches of acting is then not spoilt by how little it teaches of seeing. Or from the `object_positions`
        [B, FOUND_DIM] of who acted: what it did about a thing that it saw elsewhere says nothing of how to go about the
        true place.
        """
        if self.places_key is None:
            return self.features(observations), None
        seen = self.see(observations)
        found = self.found(seen)
        if object_positions is None:
            object_positions = self._told(observations, found) if self.bottleneck else found
        return self.think(seen, object_positions), self.auxiliary_loss(observations, found)

    def object_positions(self, observations: TensorDictBase) -> Tensor:
        """Where it finds things, [B, FOUND_DIM]: all that the trunk behind a bottleneck knows of the pictures."""
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
        return self.found(self.see(observations))

    def auxiliary_loss(self, observations: TensorDictBase, found: Tensor | None = None) -> Tensor:
        """How far the places that the labels tell are missed, in deviations of them, times PLACES_WEIGHT: [B].

        A label of exactly 0 tells of no place: there is no such thing, or the words do not name it.
        """
        found = self.found(self.see(observations)) if found is None else found
        labels, count = self._labels(observations), self.places_dim
        weight = torch.where(labels[:, :count] != 0, 1.0, UNTOLD_WEIGHT)
        wanted = self.places_scale(labels)[:, :count]
        missed = functional.smooth_l1_loss(found[:, :count], wanted, reduction="none", beta=ROUNDING)
        return PLACES_WEIGHT * (missed * weight).mean(1)

    def auxiliary_parameters(self) -> Iterator[nn.Parameter]:
        """What the places are told by."""
        if self.places_key is None:
            raise InputError(
                "auxiliary_learning_rate: vla-tiny learns to see from labels, and the observations have none: "
                "--env-kwargs observation=labelled"
            )
        for module in (self.names, self.cameras, self.found):  # not `text`: the trunk reads by it which task it is
            yield from module.parameters()

    def value_parameters(self) -> Iterator[nn.Parameter]:
        """What only the value depends on."""
        yield from self.value_head.parameters()

    def observe(self, observations: TensorDictBase | Mapping[str, Tensor]) -> None:
        """Take observations into the normalisation of proprioception and places, `ENOUGH_OBSERVED` at most."""
        if self.proprio_key is not None and self.proprio.count < ENOUGH_OBSERVED:
            self.proprio.observe(observations[self.proprio_key].float())
        if self.places_key is not None and self.places_scale.count < ENOUGH_OBSERVED:
            self.places_scale.observe(self._labels(observations))

    def sample_many(self, observations: TensorDictBase, count: int) -> tuple[Tensor, Tensor]:
        """`count` draws an observation, [count, B, …], with gradient, and their log-densities [count, B]; one pass."""
        if self.head_name != "gaussian" or self.switch_dims:
            name = "head with switches" if self.switch_dims else f"{self.head_name} head"
            raise InputError(
                f"a {name} has no differentiable draws with a log-density, which sac and cql need; train it with sft, "
                "iql, ppo or grpo"
            )
        features = self._for_head(self.features(observations)).repeat(count, 1)
        actions, log_prob, _ = self.head.draw(features, False, None)
        return self._shaped(actions).unflatten(0, (count, -1)), log_prob.unflatten(0, (count, -1))

    # -- borders -------------------------------------------------------------------------------------------------------

    def _vision(self) -> tuple[nn.Module, ...]:
        return self.text, self.task, self.names, self.cameras

    def _sees_better(self) -> bool:
        """Whether anything that it sees by is being trained."""
        return any(parameter.requires_grad for module in self._vision() for parameter in module.parameters())

    def _for_head(self, features: Tensor) -> Tensor:
        return features[..., -self.width :]

    def _chunk(self, actions: Tensor) -> Tensor:
        return actions.reshape(len(actions), self.chunk_length, self.action_dim)

    def _shaped(self, actions: Tensor) -> Tensor:
        """[B, K, A] as the environment takes it: [B, A] where there are no chunks."""
        return actions.squeeze(1) if self.chunk_length == 1 else actions

    def _mask(self, action_mask: Tensor | None) -> Tensor | None:
        return None if action_mask is None else action_mask.unsqueeze(1).expand(-1, self.chunk_length, -1)

    def _image(self, observations: TensorDictBase, key: str) -> Tensor:
        """A camera's images, uint8 [B, 3, image_size, image_size]."""
        return square_images(self._stream(observations, key), self.image_size, key)

    def _told(self, observations: TensorDictBase, found: Tensor) -> Tensor:
        """What was found, [B, FOUND_DIM], with the labels, a little blurred, in place of what they tell of."""
        labels, count = self._labels(observations), self.places_dim
        blur = functional.pad(TOLD_BLUR * torch.randn_like(labels[:, :count]), (0, FOUND_DIM - count))
        return torch.cat([self.places_scale(labels + blur)[:, :count], found[:, count:]], 1)

    def _labels(self, observations: TensorDictBase | Mapping[str, Tensor]) -> Tensor:
        """The places that are taught, […, FOUND_DIM]: zeros behind them."""
        places = self._vectors(observations, str(self.places_key), self.places_dim, "places_dim")
        return functional.pad(places, (0, FOUND_DIM - self.places_dim))

    def _vectors(
        self, observations: TensorDictBase | Mapping[str, Tensor], key: str, size: int, setting: str
    ) -> Tensor:
        """A stream of numbers, float32 […, size]."""
        found = self._stream(observations, key)
        if found.shape[-1] != size:
            raise InputError(
                f"observation {key!r} has shape {list(found.shape)}; the model was built for rows of {size} ({setting})"
            )
        return found.float()

    def _text(self, observations: TensorDictBase, key: str) -> Tensor:
        text = self._stream(observations, key)
        if text.dtype != torch.uint8 or text.ndim != 2:
            raise InputError(
                f"observation {key!r} is {text.dtype} {list(text.shape)}; instructions are rows of bytes, "
                "uint8 [B, length]"
            )
        return text

    def _stream(self, observations: TensorDictBase | Mapping[str, Tensor], key: str) -> Tensor:
        stream = observations.get(key, None)
        if stream is None:
            raise InputError(
                f"the observation has no {key!r}; it has {sorted(map(str, observations.keys()))}: "
                "set image_keys, proprio_key and instruction_key in model_config"
            )
        return stream
