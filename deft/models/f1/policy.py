"""The F1 policy: batches in, losses, predicted frames, memories and actions out.

Trainers call `forward_with_world_model` (or the module itself, so that wrappers for several GPUs see the call),
collectors and reward makers `predict_images_only`, `forward_memory_only` and `sample_actions_with_world_model`. A batch
has the keys of `deft.schema`, [B, …], or is a sequence [T, B, …] whose memory runs through its T steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models import flow_chain
from deft.models.f1 import frames
from deft.models.f1.config import F1Config
from deft.models.f1.heads import sample_time
from deft.models.f1.language import LanguageTokenizer, instruction_texts, make_language_tokenizer
from deft.models.f1.model import Condition, Context, F1Model, Prefix
from deft.models.f1.teacher import TeacherPolicy
from deft.models.f1.vq import MultiScaleTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
ENCODED_TOGETHER = 256  # frames


@dataclass
class Inputs:
    """A batch, flattened to N = T · B rows and scaled, and the memory before its first step."""

    leading: torch.Size  # [B] or [T, B]
    frames: Tensor | None  # [N, H, 3, h, w], then the target; None if the batch has codes and no pixels are needed
    codes: Tensor  # [N, H, L], then the target's
    history: Tensor  # [N, H, L − 1, D]
    state: Tensor
    actions: Tensor  # [N, H, A]: a_{t-3} … a_t
    known: Tensor  # bool [N]: whether a_t is known
    memory: Tensor | None  # (layers, B, hidden); None for a model without memory

    def by_step(self, values: Tensor) -> Tensor:
        """[N, …] → [T, B, …]."""
        return values.unflatten(0, (-1, self.leading[-1]))


class F1Policy(nn.Module):
    """An F1 model with its tokenizers."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        self.config = config
        self.tokenizer = MultiScaleTokenizer(config.tokenizer).requires_grad_(False)
        self.model = F1Model(config, self.tokenizer)
        self._language: LanguageTokenizer | None = None
        self.use_dtype(config.dtype)

    def use_dtype(self, dtype: str) -> None:
        """Set the dtype of the vision tower, word embeddings and experts' layers, as in the published checkpoint."""
        self.config.dtype = dtype  # type: ignore[assignment]
        model, chosen = self.model, DTYPES[dtype]
        for part in (model.vision, model.words, model.experts.understanding):
            part.to(chosen)
        for expert in (model.experts.generation, model.experts.action):
            expert.layers.to(chosen)
        if "understanding" in model.language_heads:
            model.language_heads["understanding"].to(chosen)

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.tokenizer.quantize.embedding.weight.device

    @property
    def language_tokenizer(self) -> LanguageTokenizer:
        """The language tokenizer, created at the first instruction."""
        if self._language is None:
            self._language = make_language_tokenizer(self.config)
        return self._language

    def as_teacher(self, phase: str = "teacher") -> TeacherPolicy:
        """Return this world model as the reward of one F1 environment, with its own memory."""
        return TeacherPolicy(self, phase)

    def initial_memory(self, batch_size: int) -> Tensor:
        """Return zeros (layers, batch, hidden): the memory at an episode's first frame."""
        if self.model.memory is None:
            raise InputError("this F1 model has no memory (memory_enabled: false)")
        return self.model.memory.zeros(batch_size)

    def forward(self, batch: Mapping[str, Any], **arguments: Any) -> dict[str, Tensor]:
        """`forward_with_world_model`."""
        return self.forward_with_world_model(batch, **arguments)

    def forward_with_world_model(
        self,
        batch: Mapping[str, Any],
        memory_state: Tensor | None = None,
        noise: Tensor | None = None,
        time: Tensor | None = None,
        train_gen_expert_only: bool = False,
        memory_backprop: bool = True,
        by_step: bool = False,
    ) -> dict[str, Tensor]:
        """Return losses and accuracies of the frame after [img_{t-3} … img_t] and [a_{t-3} … a_t].

        `loss` is the world model's without an `action` chunk or with `train_gen_expert_only`; else action loss +
        `wm_loss_weight` · world-model loss. `memory_state` (here or in the batch) is the memory before the first
        step; the returned memory is that after the last step, with its gradient: detach it between chunks. If episodes
        end within a sequence, `step_mask` [T, B] marks the real steps; the others are ignored. `by_step` adds for
        every row the cross-entropy (`wm_losses`), the accuracy (`wm_accuracies`), both by code (`wm_token_losses`,
        `wm_token_hits`, […, L]), the mean entropy of its codes (`wm_entropies`), and the memory's output after it
        (`remembered`, […, hidden]), for evaluation and rewards.
        """
        inputs = self._prepare(batch, memory_state, with_target=True, hide=self.training)
        before, after, memory_state = self._remember(inputs, memory_backprop)
        if before is not None and after is not None:  # where a_t is hidden, the memory must not include it
            after = torch.where(inputs.known[:, None], after, before)
        prefix, expected = self._prefix(batch), self._expected_frame(inputs)
        target = inputs.codes[:, -1]
        condition = self._condition(inputs, after, expected)
        logits = self.model.teacher_forced(prefix, condition, target, self._hidden_codes(len(target)))
        real = batch.get(schema.STEP_MASK, None)
        losses = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        correct = (logits.detach().argmax(-1) == target).float()
        prediction_loss = _mean(losses, real)
        results = {
            "wm_loss": prediction_loss,
            "wm_acc_mean": _mean(correct, real),
            "wm_acc_tail": _mean(correct[:, -self.tokenizer.sizes[-1] :], real),  # the finest scale
        }
        if by_step:
            results["wm_losses"] = losses.detach().mean(1).view(inputs.leading)
            results["wm_accuracies"] = correct.mean(1).view(inputs.leading)
            results["wm_token_losses"] = losses.detach().unflatten(0, inputs.leading)
            results["wm_token_hits"] = correct.unflatten(0, inputs.leading)
            results["wm_entropies"] = token_entropy(logits.detach()).view(inputs.leading)
            if after is not None:
                results["remembered"] = after.detach().unflatten(0, inputs.leading)
        if expected is not None and inputs.frames is not None:
            results["motion_loss"] = _mean((expected - inputs.frames[:, -1]).abs(), real)
            prediction_loss = prediction_loss + self.config.motion_loss_weight * results["motion_loss"]
        if train_gen_expert_only or schema.ACTION not in batch:
            results["loss"] = prediction_loss
        else:
            # As when acting, the action expert reads the predicted frame, not the true one, and a_t is unknown.
            unknown = replace(inputs, known=torch.zeros_like(inputs.known))
            condition = self._condition(unknown, before, self._expected_frame(unknown))
            context = self.model.predict_frame(prefix, condition)
            results["action_loss"] = self._action_loss(batch, context, inputs.state, before, noise, time)
            results["loss"] = results["action_loss"] + self.config.wm_loss_weight * prediction_loss
        if memory_state is not None:
            results[schema.MEMORY_STATE] = memory_state
        return results

    @torch.no_grad()
    def predict_images_only(
        self, batch: Mapping[str, Any], memory_state: Tensor | None = None, top_k: int = 1, top_p: float = 1.0
    ) -> dict[str, Tensor]:
        """The next frame, uint8 [B, 3, h, w] under `images`, its codes under `frame_tokens`, the memory after the step.

        `top_k` 1 takes the most likely codes; `config.top_k` and `config.top_p` are the settings for sampling. Target
        frames in the batch are ignored.
        """
        inputs = self._prepare(batch, memory_state)
        _, after, memory_state = self._remember(inputs)
        condition = self._condition(inputs, after, self._expected_frame(inputs))
        found = self.model.predict_frame(self._prefix(batch), condition, top_k, top_p)
        results = {
            "images": self._decode_images(found.codes, inputs).unflatten(0, inputs.leading),
            schema.FRAME_TOKENS: found.codes.unflatten(0, inputs.leading),
            "logits": found.logits.unflatten(0, inputs.leading),
        }
        if memory_state is not None:
            results[schema.MEMORY_STATE] = memory_state
        return results

    def forward_memory_only(self, batch: Mapping[str, Any], memory_state: Tensor | None = None) -> Tensor:
        """Return the memory (layers, batch, hidden) after the batch's steps, without a prediction."""
        _, _, found = self._remember(self._prepare(batch, memory_state, needs_pixels=False))
        if found is None:
            raise InputError("this F1 model has no memory (memory_enabled: false)")
        return found

    def forward_motion_only(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the pixel loss of the motion prior alone, at a fraction of the cost of a full step."""
        if self.model.motion is None:
            raise InputError("this F1 model has no motion prior (motion_prior: false)")
        state = self._vectors(batch, schema.STATE, self.config.max_state_dim)
        actions = self._vectors(batch, schema.ACTION_HISTORY, self.config.max_action_dim)
        pixels = self._pixels(batch, state.shape[:-1], self.config.n_obs_img_steps + 1)
        known = torch.ones(len(pixels), dtype=torch.bool, device=self.device)
        expected = self.model.motion(pixels[:, :-1], actions.flatten(0, -3), known, state.flatten(0, -2))
        loss = (expected - pixels[:, -1]).abs().mean()
        return {"loss": loss, "motion_loss": loss.detach()}

    def forward_memory_correction(
        self, batch: Mapping[str, Any], memory_state: Tensor | None = None, memory_backprop: bool = True
    ) -> dict[str, Tensor]:
        """Return the loss of the memory's correction alone: MSE of the predicted features over the true ones' variance.

        It costs a fraction of a full step and trains the memory after the motion prior. `motion_error` is the error
        without the memory's correction; `memory_state` is the memory after the last step.
        """
        if self.model.memory is None or self.model.memory.to_picture is None:
            raise InputError("this F1 model has no memory correction (memory_picture: false)")
        inputs = self._prepare(batch, memory_state, with_target=True)
        _, after, memory_state = self._remember(inputs, memory_backprop)
        with torch.no_grad():
            expected = self._expected_frame(inputs)
            assert expected is not None
            assert memory_state is not None
            features = self.tokenizer.features(expected.clamp(-1, 1))
            target = self.tokenizer.quantized(inputs.codes[:, -1])
            variance = target.var().clamp(min=1e-8)
        real = batch.get(schema.STEP_MASK, None)
        loss = _mean((self._corrected(features, after) - target).square(), real) / variance
        return {
            "loss": loss,
            "memory_error": loss.detach(),
            "motion_error": _mean((features - target).square(), real) / variance,
            schema.MEMORY_STATE: memory_state,
        }

    @torch.no_grad()
    def predicted_residuals(
        self, batch: Mapping[str, Any], memory_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residuals predicted by motion and memory given the true coarser codes [B, L, D], and the codes."""
        inputs = self._prepare(batch, memory_state, with_target=True)
        _, after, _ = self._remember(inputs)
        expected = self._expected_frame(inputs)
        if expected is None:
            raise InputError("this F1 model has no motion prior (motion_prior: false)")
        features = self._corrected(self.tokenizer.features(expected.clamp(-1, 1)), after)
        return self.tokenizer.residuals(features, inputs.codes[:, -1]), inputs.codes[:, -1]

    @torch.no_grad()
    def sample_actions_with_world_model(
        self,
        batch: Mapping[str, Any],
        memory_state: Tensor | None = None,
        noise: Tensor | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        predict_action_only: bool = True,
    ) -> Tensor | dict[str, Tensor]:
        """A chunk of actions [B, K, 32], from noise in `num_steps` Euler steps, after predicting the next frame.

        The batch is an observation's: its `action_history` ends with a_{t-1}. Without `predict_action_only` a dict:
        `action`, `images` and `frame_tokens`. The memory is not updated: a_t is known only after
        acting (`forward_memory_only`).
        """
        config, inputs = self.config, self._prepare(batch, memory_state)
        if len(inputs.leading) != 1:
            raise InputError("actions are sampled for one step at a time, not for a sequence")
        inputs.actions = torch.cat([inputs.actions[:, 1:], torch.zeros_like(inputs.actions[:, :1])], 1)
        inputs.known = torch.zeros_like(inputs.known)
        before = None if inputs.memory is None else inputs.memory[-1]
        condition = self._condition(inputs, before, self._expected_frame(inputs))
        top_k, top_p = config.top_k if top_k is None else top_k, config.top_p if top_p is None else top_p
        found = self.model.predict_frame(self._prefix(batch), condition, top_k, top_p)
        if noise is None:
            noise = torch.randn(len(inputs.state), config.chunk_size, config.max_action_dim, device=self.device)

        def velocity(noisy: Tensor, time: Tensor) -> Tensor:
            return self.model.velocity_and_features(found, inputs.state, noisy, time, before)[0]

        actions = flow_chain.integrate(velocity, noise, config.num_steps)
        if predict_action_only:
            return actions
        images = self._decode_images(found.codes, inputs)
        return {schema.ACTION: actions, "images": images, schema.FRAME_TOKENS: found.codes}

    def encode_observation(self, batch: Mapping[str, Any]) -> Context:
        """Return the context for acting without a predicted frame, from images and words [N, …]."""
        return self.model.context(self._prefix(batch))

    @torch.no_grad()
    def frame_features(self, codes: Tensor) -> Tensor:
        """Return the memory's input for frames with codes […, L]: their quantised features, […, F]."""
        features = self.tokenizer.quantized(codes.flatten(0, -2))
        return features.flatten(2).transpose(1, 2).reshape(*codes.shape[:-1], -1)

    # Preparing a batch

    def _prepare(
        self,
        batch: Mapping[str, Any],
        memory_state: Tensor | None,
        with_target: bool = False,
        needs_pixels: bool = True,
        hide: bool = False,
    ) -> Inputs:
        """Scale and flatten a batch and its memory (the given one or the batch's). `hide`: hide a_t in some rows."""
        config = self.config
        state = self._vectors(batch, schema.STATE, config.max_state_dim)
        leading, length = state.shape[:-1], config.n_obs_img_steps
        if len(leading) not in (1, 2):
            raise InputError(f"{schema.STATE} has shape {list(state.shape)}; batches are [B, 32] or [T, B, 32]")
        actions = self._vectors(batch, schema.ACTION_HISTORY, config.max_action_dim)
        if actions.shape[:-1] != (*leading, length):
            raise InputError(
                f"{schema.ACTION_HISTORY} has shape {list(actions.shape)}; {length} actions a row are needed"
            )
        pixels, codes = self._frames(batch, leading, length + with_target, needs_pixels and config.motion_prior)
        known = torch.ones(leading.numel(), dtype=torch.bool, device=self.device)
        if hide and config.unknown_action_rate > 0:
            known = torch.rand(known.shape, device=self.device) >= config.unknown_action_rate
        memory = None
        if self.model.memory is not None:
            given = batch.get(schema.MEMORY_STATE, None) if memory_state is None else memory_state
            memory = self.model.memory.check(given, leading[-1]).to(self.device, torch.float32)
        history = self.tokenizer.embed(codes[:, :length])
        return Inputs(leading, pixels, codes, history, state.flatten(0, -2), actions.flatten(0, -3), known, memory)

    def _vectors(self, batch: Mapping[str, Any], name: str, size: int) -> Tensor:
        """Return float vectors, padded with zeros to `size`."""
        values = _stream(batch, name).to(self.device, torch.float32)
        if values.shape[-1] > size:
            raise InputError(f"{name} has {values.shape[-1]} dims; the model takes {size}")
        return functional.pad(values, (0, size - values.shape[-1]))

    @torch.no_grad()
    def _frames(
        self, batch: Mapping[str, Any], leading: torch.Size, length: int, needs_pixels: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Return the frames [N, length, 3, h, w], if needed, and their codes [N, length, L]."""
        if schema.FRAME_TOKENS not in batch:
            pixels = self._pixels(batch, leading, length)
            return pixels, self.tokenizer.encode(pixels)
        codes = _history(batch, schema.FRAME_TOKENS, leading, length).to(self.device)
        return self._pixels(batch, leading, length) if needs_pixels else None, codes

    def _pixels(self, batch: Mapping[str, Any], leading: torch.Size, length: int) -> Tensor:
        raw = _history(batch, schema.IMAGE0_HISTORY, leading, length).to(self.device)
        return frames.to_model(raw, self.config.tokenizer.image_size, schema.IMAGE0_HISTORY)

    def _prefix(self, batch: Mapping[str, Any]) -> Prefix:
        """Embed `image0`, `image1` if present, and the instruction; no words for a task without an instruction."""
        images = []
        for name in (schema.IMAGE0, schema.IMAGE1):
            if name == schema.IMAGE0 or name in batch:
                pixels = _stream(batch, name).to(self.device).flatten(0, -4)
                mask = batch.get(name + schema.MASK_SUFFIX, None)
                mask = None if mask is None or bool(mask.all()) else mask.to(self.device).flatten()
                images.append((frames.to_model(pixels, self.config.vision.image_size, name), mask))
        instruction = batch.get(schema.INSTRUCTION, None)
        if instruction is None:
            words = torch.zeros(len(images[0][0]), 0, dtype=torch.long, device=self.device)
            return self.model.understand(images, words, None)
        if isinstance(instruction, Tensor):
            instruction = instruction_texts(instruction.flatten(0, -2))
        words, real = self.language_tokenizer(instruction)
        longest = int(real.sum(1).max())  # remove common padding: it changes nothing and costs time
        words, real = words[:, :longest].to(self.device), real[:, :longest]
        return self.model.understand(images, words, None if bool(real.all()) else real.to(self.device))

    def _hidden_codes(self, num_rows: int) -> Tensor | None:
        """Choose codes of the true frame to hide from the finer scales in training: bool [N, L − 1]."""
        rows, tokens = self.config.mask_sequence_rate, self.config.mask_token_rate
        if not self.training or rows == 0 or tokens == 0:
            return None
        in_row = torch.rand(num_rows, 1, device=self.device) < rows
        return in_row & (torch.rand(num_rows, self.config.num_tokens - 1, device=self.device) < tokens)

    # Steps of a forward pass

    def _remember(self, inputs: Inputs, backprop: bool = True) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the memory's output before and after each step, [N, hidden], and the memory after the last step."""
        if self.model.memory is None or inputs.memory is None:
            return None, None, None
        frame = self.frame_features(inputs.codes[:, self.config.n_obs_img_steps - 1])  # img_t
        steps = (inputs.by_step(values) for values in (frame, inputs.state, inputs.actions[:, -1]))
        after, last = self.model.memory(*steps, inputs.memory, backprop)
        before = torch.cat([inputs.memory[-1:], after[:-1]])
        if not backprop:
            before = before.detach()
        return before.flatten(0, 1), after.flatten(0, 1), last

    def _expected_frame(self, inputs: Inputs) -> Tensor | None:
        if self.model.motion is None:
            return None
        assert inputs.frames is not None
        history = inputs.frames[:, : self.config.n_obs_img_steps]
        return self.model.motion(history, inputs.actions, inputs.known, inputs.state)

    def _decode_images(self, codes: Tensor, inputs: Inputs) -> Tensor:
        """Decode predicted codes [N, L] to uint8 images.

        With `detail_of_motion`, x̂ + D(codes) − D(E(x̂)), with x̂ the warped frame and E, D the tokenizer: unchanged parts
        keep the detail that codes cannot represent.
        """
        made = self.tokenizer.decode(codes)
        expected = self._expected_frame(inputs) if self.config.detail_of_motion else None
        if expected is not None:
            expected = expected.clamp(-1, 1)
            made = expected + made - self.tokenizer.decode(self.tokenizer.encode(expected))
        return frames.to_images(made)

    def _condition(self, inputs: Inputs, remembered: Tensor | None, expected: Tensor | None) -> Condition:
        features = None
        if expected is not None:
            with torch.no_grad():  # the motion prior is trained on pixels, not through the tokenizer
                features = self.tokenizer.features(expected.clamp(-1, 1))
            features = self._corrected(features, remembered)
        return self.model.condition(inputs.history, remembered, (inputs.actions, inputs.known, inputs.state), features)

    def _corrected(self, features: Tensor, remembered: Tensor | None) -> Tensor:
        """Add the memory's correction to the predicted features."""
        memory = self.model.memory
        if memory is None or remembered is None or memory.to_picture is None:
            return features
        return features + memory.to_picture(remembered, features)

    def _action_loss(
        self,
        batch: Mapping[str, Any],
        context: Context,
        state: Tensor,
        memory: Tensor | None,
        noise: Tensor | None,
        time: Tensor | None,
    ) -> Tensor:
        """Return the mean of (ε − a − v)² over the real dims of the real steps."""
        actions = self._vectors(batch, schema.ACTION, self.config.max_action_dim).flatten(0, -3)
        noise = torch.randn_like(actions) if noise is None else noise
        time = sample_time(len(actions), self.device) if time is None else time
        noisy = flow_chain.noised(actions, noise, time)
        velocity, _ = self.model.velocity_and_features(context, state, noisy, time, memory)
        squares = (noise - actions - velocity).square()
        weight = torch.ones_like(squares)
        if schema.ACTION_MASK in batch:
            mask = batch[schema.ACTION_MASK].to(self.device).float()
            weight = weight * (mask if mask.ndim == 1 else mask.flatten(0, -2)[:, None])
        if schema.ACTION_IS_PAD in batch:
            weight = weight * (~batch[schema.ACTION_IS_PAD].to(self.device).flatten(0, -2))[..., None]
        return (squares * weight).sum() / weight.sum().clamp(min=1)


def token_entropy(logits: Tensor) -> Tensor:
    """Return −Σ p log p of [N, L, codes], averaged over the L tokens: [N], in nats."""
    log_probs = logits.float().log_softmax(-1)
    return -(log_probs.exp() * log_probs).sum(-1).mean(-1)


def _mean(values: Tensor, real: Tensor | None) -> Tensor:
    """Average [N, …] over the rows marked `real`, [T, B] with T · B = N; over all rows if it is None."""
    if real is None:
        return values.mean()
    weight = real.to(values.device, values.dtype).flatten()
    return (values.flatten(1).mean(1) * weight).sum() / weight.sum().clamp(min=1)


def _stream(batch: Mapping[str, Any], name: str) -> Tensor:
    if name not in batch:
        raise InputError(f"the batch has no {name!r}; it has {', '.join(sorted(batch.keys()))}")
    return batch[name]


def _history(batch: Mapping[str, Any], name: str, leading: torch.Size, length: int) -> Tensor:
    """Return the first `length` frames of each row, [N, length, …]."""
    values, axis = _stream(batch, name), len(leading)
    if values.shape[:axis] != leading or values.shape[axis] < length:
        raise InputError(f"{name} has shape {list(values.shape)}; {length} frames a row are needed")
    return values.flatten(0, axis - 1)[:, :length]


# Frames of whole episodes, for evaluation


@torch.no_grad()
def roll_out(
    policy: F1Policy,
    batch: Mapping[str, Any],
    actions: Tensor,
    memory_state: Tensor | None = None,
    states: Tensor | None = None,
) -> dict[str, Tensor]:
    """Predict the K frames after `actions` [B, K, 32] (a_t, a_{t+1}, …), and their codes, from its own predictions.

    The batch is an observation's [B, …]: its history ends with img_t and a_{t-1}. `states` [B, K, 32] are s_t, s_{t+1},
    … if known; else s_t is used for all steps. The understanding expert's wrist image is the last predicted
    frame; its head image stays that of time t. Returns `images` uint8 [B, K, 3, h, w], `frame_tokens` [B, K, L]
    and `memory_state`.
    """
    wrist = schema.IMAGE1 if schema.IMAGE1 in batch else schema.IMAGE0
    step = {name: value for name, value in batch.items() if name != schema.FRAME_TOKENS}
    step[schema.IMAGE0_HISTORY] = batch[schema.IMAGE0_HISTORY][:, : policy.config.n_obs_img_steps]
    predictions = []
    for index in range(actions.shape[1]):
        history = step[schema.ACTION_HISTORY]
        step[schema.ACTION_HISTORY] = torch.cat([history[:, 1:], actions[:, index : index + 1].to(history)], 1)
        if states is not None:
            step[schema.STATE] = states[:, index]
        found = policy.predict_images_only(step, memory_state)
        memory_state = found.get(schema.MEMORY_STATE)
        step[wrist] = image = found["images"]
        observed = step[schema.IMAGE0_HISTORY]
        if observed.shape[-2:] != image.shape[-2:]:
            observed = frames.to_images(frames.to_model(observed, image.shape[-1], schema.IMAGE0_HISTORY))
        step[schema.IMAGE0_HISTORY] = torch.cat([observed[:, 1:], image[:, None].to(observed.device)], 1)
        predictions.append(found)
    results = {name: torch.stack([found[name] for found in predictions], 1) for name in ("images", schema.FRAME_TOKENS)}
    return results if memory_state is None else {**results, schema.MEMORY_STATE: memory_state}


@torch.no_grad()
def encode_frames(policy: F1Policy, images: np.ndarray | Tensor) -> Tensor:
    """Encode uint8 frames [N, 3, h, w]: int64 [N, L], on the policy's device."""
    found = []
    for part in torch.as_tensor(images).split(ENCODED_TOGETHER):
        pixels = frames.to_model(part.to(policy.device), policy.config.tokenizer.image_size, schema.WRIST_RGB)
        found.append(policy.tokenizer.encode(pixels))
    return torch.cat(found)
