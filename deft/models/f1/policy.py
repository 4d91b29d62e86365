"""The F1 policy: batches in, losses, predicted frames, memories and actions out.

Trainers call `forward_with_world_model` (or the module itself, so that wrappers for several GPUs see the call),
collectors and reward makers `predict_images_only`, `forward_memory_only` and `sample_actions_with_world_model`. A batch
has the keys of `deft.schema`, [B, …], or is a sequence [T, B, …] whose memory runs through its T steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models.f1 import flow, frames
from deft.models.f1.config import F1Config
from deft.models.f1.language import LanguageTokenizer, instruction_texts, make_language_tokenizer
from deft.models.f1.model import Condition, Context, F1Model, PredictedFrame, Prefix
from deft.models.f1.teacher import TeacherPolicy
from deft.models.f1.vq import MultiScaleTokenizer

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Inputs:
    """A batch, flattened to N = T · B rows and scaled."""

    steps: int  # T
    images: list[Tensor]
    image_masks: list[Tensor | None]  # bool [N]; None: all rows have the image
    words: Tensor
    word_mask: Tensor | None
    frames: Tensor | None  # [N, H + n, 3, h, w]; None if the batch has codes and no pixels are needed
    codes: Tensor  # [N, H + n, L]
    history: Tensor  # [N, H, L − 1, D]
    state: Tensor
    actions: Tensor  # [N, H, A]: a_{t-3} … a_t
    known: Tensor  # bool [N]: whether a_t is known

    @property
    def rows(self) -> int:
        """B."""
        return len(self.state) // self.steps

    def by_step(self, values: Tensor) -> Tensor:
        """[N, …] → [T, B, …]."""
        return values.unflatten(0, (self.steps, self.rows))


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
        cur_n_obs_img_steps: int | None = None,
        cur_n_pred_img_steps: int | None = None,
        train_gen_expert_only: bool = False,
        gen_out_loss_ratio: float | None = None,
        memory_backprop: bool = True,
        generator: torch.Generator | None = None,
        by_step: bool = False,
    ) -> dict[str, Tensor]:
        """Return losses and accuracies of the frame after [img_{t-3} … img_t] and [a_{t-3} … a_t].

        `loss` is the world model's without an `action` chunk or with `train_gen_expert_only`; else action loss +
        `gen_out_loss_ratio` · world-model loss. `memory_state` (here or in the batch) is the memory before the first
        step; the returned memory is that after the last step, with its gradient: detach it between chunks. If episodes
        end within a sequence, `step_mask` [T, B] marks the real steps; the others are ignored. `by_step` adds for
        every row the cross-entropy (`wm_losses`), the accuracy (`wm_accuracies`), the mean entropy of its codes
        (`wm_entropies`), and the memory's output after it (`remembered`, […, hidden]), for evaluation and rewards.
        """
        self._check_steps(cur_n_obs_img_steps, cur_n_pred_img_steps)
        inputs = self._prepare(batch, with_target=True, hide=self.training, generator=generator)
        before, after, memory_state = self._remember(inputs, self._given_memory(batch, memory_state), memory_backprop)
        if before is not None and after is not None:  # where a_t is hidden, the memory must not include it
            after = torch.where(inputs.known[:, None], after, before)
        prefix = self._prefix(inputs)
        expected = self._expected_frame(inputs)
        condition = self._condition(inputs, after, expected)
        target = inputs.codes[:, self.config.n_obs_img_steps]
        logits = self.model.teacher_forced(prefix, condition, target, self._hidden_codes(len(target), generator))
        real = batch.get(schema.STEP_MASK, None)
        losses = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(target.shape)
        wm_loss = _mean(losses, real)
        correct = (logits.detach().argmax(-1) == target).float()
        results = {
            "wm_loss": wm_loss,
            "wm_acc_mean": _mean(correct, real),
            "wm_acc_tail": _mean(correct[:, -self.tokenizer.sizes[-1] :], real),  # the finest scale
        }
        if by_step:
            leading = batch[schema.STATE].shape[:-1]
            results |= {
                "wm_losses": losses.detach().mean(1).view(leading),
                "wm_accuracies": correct.mean(1).view(leading),
                "wm_entropies": token_entropy(logits.detach()).view(leading),
            }
            if after is not None:
                results["remembered"] = after.detach().view(*leading, -1)
        prediction_loss = wm_loss
        if expected is not None:
            assert inputs.frames is not None
            motion_loss = _mean((expected - inputs.frames[:, self.config.n_obs_img_steps]).abs(), real)
            results["motion_loss"] = motion_loss
            prediction_loss = wm_loss + self.config.motion_loss_weight * motion_loss
        if train_gen_expert_only or schema.ACTION not in batch:
            results["loss"] = prediction_loss
        else:
            # As when acting, the action expert reads the predicted frame, not the true one, and a_t is unknown.
            unknown = self._without_last_action(inputs)
            predicted_frame = self._predict_frame(unknown, prefix, before, top_k=1, top_p=1.0, generator=None)
            results["action_loss"] = self._action_loss(batch, unknown, predicted_frame, before, noise, time, generator)
            ratio = self.config.wm_loss_weight if gen_out_loss_ratio is None else gen_out_loss_ratio
            results["loss"] = results["action_loss"] + ratio * prediction_loss
        if memory_state is not None:
            results[schema.MEMORY_STATE] = memory_state
        return results

    @torch.no_grad()
    def predict_images_only(
        self,
        batch: Mapping[str, Any],
        memory_state: Tensor | None = None,
        top_k: int = 1,
        top_p: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> dict[str, Tensor]:
        """The next frame, uint8 [B, 3, h, w] under `images`, its codes under `frame_tokens`, the memory after the step.

        `top_k` 1 takes the most likely codes; `config.top_k` and `config.top_p` are the settings for sampling. Target
        frames in the batch are ignored.
        """
        inputs = self._prepare(batch, with_target=False)
        _, after, memory_state = self._remember(inputs, self._given_memory(batch, memory_state))
        condition = self._condition(inputs, after, self._expected_frame(inputs))
        found = self.model.predict_frame(self._prefix(inputs), condition, top_k, top_p, generator)
        leading = batch[schema.STATE].shape[:-1]
        images = self._decode_images(found.codes, inputs)
        results = {
            "images": images.reshape(*leading, *images.shape[1:]),
            schema.FRAME_TOKENS: found.codes.reshape(*leading, -1),
            "logits": found.logits.reshape(*leading, *found.logits.shape[1:]),
        }
        if memory_state is not None:
            results[schema.MEMORY_STATE] = memory_state
        return results

    def forward_memory_only(self, batch: Mapping[str, Any], memory_state: Tensor | None = None) -> Tensor:
        """Return the memory (layers, batch, hidden) after the batch's steps, without a prediction."""
        inputs = self._prepare(batch, with_target=False, needs_images=False)
        _, _, found = self._remember(inputs, self._given_memory(batch, memory_state))
        if found is None:
            raise InputError("this F1 model has no memory (memory_enabled: false)")
        return found

    def forward_motion_only(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the pixel loss of the motion prior alone, at a fraction of the cost of a full step."""
        if self.model.motion is None:
            raise InputError("this F1 model has no motion prior (motion_prior: false)")
        state = self._vectors(batch, schema.STATE, self.config.max_state_dim)
        actions = self._vectors(batch, schema.ACTION_HISTORY, self.config.max_action_dim)
        raw = batch[schema.IMAGE0_HISTORY].to(self.device).flatten(0, -5)
        pixels = frames.to_model(raw, self.config.tokenizer.image_size, schema.IMAGE0_HISTORY)
        observed = self.config.n_obs_img_steps
        known = torch.ones(len(pixels), dtype=torch.bool, device=self.device)
        expected = self.model.motion(pixels[:, :observed], actions.flatten(0, -3), known, state.flatten(0, -2))
        loss = (expected - pixels[:, observed]).abs().mean()
        return {"loss": loss, "motion_loss": loss.detach()}

    def forward_memory_correction(
        self, batch: Mapping[str, Any], memory_state: Tensor | None = None, memory_backprop: bool = True
    ) -> dict[str, Tensor]:
        """Return the loss of the memory's correction alone: MSE of the predicted features over the true ones' variance.

        It costs a fraction of a full step and trains the memory after the motion prior. `motion_error` is the error
        without the memory's correction; `memory_state` is the memory after the last step.
        """
        memory = self.model.memory
        if memory is None or memory.to_picture is None:
            raise InputError("this F1 model has no memory correction (memory_picture: false)")
        inputs = self._prepare(batch, with_target=True)
        _, after, memory_state = self._remember(inputs, self._given_memory(batch, memory_state), memory_backprop)
        with torch.no_grad():
            expected = self._expected_frame(inputs)
            assert expected is not None
            features = self.tokenizer.features(expected.clamp(-1, 1))
            target = self.tokenizer.quantized(inputs.codes[:, self.config.n_obs_img_steps])
            variance = target.var().clamp(min=1e-8)
        real = batch.get(schema.STEP_MASK, None)
        loss = _mean((self._corrected(features, after) - target).square(), real) / variance
        unaided = _mean((features - target).square(), real) / variance
        assert memory_state is not None
        return {
            "loss": loss,
            "memory_error": loss.detach(),
            "motion_error": unaided,
            schema.MEMORY_STATE: memory_state,
        }

    @torch.no_grad()
    def predicted_residuals(
        self, batch: Mapping[str, Any], memory_state: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the residuals predicted by motion and memory given the true coarser codes [B, L, D], and the codes."""
        inputs = self._prepare(batch, with_target=True)
        _, after, _ = self._remember(inputs, self._given_memory(batch, memory_state))
        expected = self._expected_frame(inputs)
        if expected is None:
            raise InputError("this F1 model has no motion prior (motion_prior: false)")
        codes = inputs.codes[:, self.config.n_obs_img_steps]
        features = self._corrected(self.tokenizer.features(expected.clamp(-1, 1)), after)
        return self.tokenizer.residuals(features, codes), codes

    @torch.no_grad()
    def sample_actions_with_world_model(
        self,
        batch: Mapping[str, Any],
        memory_state: Tensor | None = None,
        noise: Tensor | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
        predict_action_only: bool = True,
    ) -> Tensor | dict[str, Tensor]:
        """A chunk of actions [B, K, 32], from noise in `num_steps` Euler steps, after predicting the next frame.

        The batch is an observation's: its `action_history` ends with a_{t-1}. Without `predict_action_only` a dict:
        `action`, `images` and `frame_tokens`. The memory is not updated: a_t is known only after
        acting (`forward_memory_only`).
        """
        inputs = self._prepare(batch, with_target=False)
        history = inputs.actions
        inputs.actions = torch.cat([history[:, 1:], torch.zeros_like(history[:, :1])], 1)
        inputs.known = torch.zeros_like(inputs.known)
        memory = self._given_memory(batch, memory_state)
        before = None if memory is None else self._checked(memory, inputs)[-1]
        found = self._predict_frame(
            inputs,
            self._prefix(inputs),
            before,
            self.config.top_k if top_k is None else top_k,
            self.config.top_p if top_p is None else top_p,
            generator,
        )
        if noise is None:
            shape = (len(inputs.state), self.config.chunk_size, self.config.max_action_dim)
            noise = torch.randn(shape, device=self.device, generator=generator)

        def velocity(noisy: Tensor, time: Tensor) -> Tensor:
            return self.model.velocity(found, inputs.state, noisy, time, before)

        actions = flow.integrate(velocity, noise, self.config.num_steps)
        if predict_action_only:
            return actions
        return {
            schema.ACTION: actions,
            "images": self._decode_images(found.codes, inputs),
            schema.FRAME_TOKENS: found.codes,
        }

    def encode_observation(self, batch: Mapping[str, Any]) -> Context:
        """Return the context for acting without a predicted frame, from images and words [N, …]."""
        num_rows = len(batch[schema.STATE])
        images, image_masks = self._images(batch)
        return self.model.context(self.model.understand(images, image_masks, *self._words(batch, num_rows)))

    @torch.no_grad()
    def frame_features(self, codes: Tensor) -> Tensor:
        """Return the memory's input for frames with codes […, L]: their quantised features, […, F]."""
        features = self.tokenizer.quantized(codes.flatten(0, -2))
        return features.flatten(2).transpose(1, 2).reshape(*codes.shape[:-1], -1)

    # Preparing a batch

    def _prepare(
        self,
        batch: Mapping[str, Any],
        with_target: bool,
        needs_images: bool = True,
        hide: bool = False,
        generator: torch.Generator | None = None,
    ) -> Inputs:
        """Scale and flatten the batch. `hide`: a_t is unknown in some rows."""
        config, device = self.config, self.device
        state = self._vectors(batch, schema.STATE, config.max_state_dim)
        leading = state.shape[:-1]
        if len(leading) not in (1, 2):
            raise InputError(f"{schema.STATE} has shape {list(state.shape)}; batches are [B, 32] or [T, B, 32]")
        num_rows = leading.numel()
        actions = self._vectors(batch, schema.ACTION_HISTORY, config.max_action_dim)
        length = config.n_obs_img_steps + (config.n_pred_img_steps if with_target else 0)
        if tuple(actions.shape[:-1]) != (*leading, config.n_obs_img_steps):
            raise InputError(
                f"{schema.ACTION_HISTORY} has shape {list(actions.shape)}; "
                f"{config.n_obs_img_steps} actions a row are needed"
            )
        pixels, codes = self._frames(batch, leading, length, needs_images and config.motion_prior)
        images, image_masks = self._images(batch) if needs_images else ([], [])
        words, word_mask = self._words(batch, num_rows) if needs_images else (torch.empty(0), None)
        known = torch.ones(num_rows, dtype=torch.bool, device=device)
        if hide and config.unknown_action_rate > 0:
            known = torch.rand(num_rows, device=device, generator=generator) >= config.unknown_action_rate
        return Inputs(
            steps=leading[0] if len(leading) == 2 else 1,
            images=images,
            image_masks=image_masks,
            words=words,
            word_mask=word_mask,
            frames=pixels,
            codes=codes,
            history=self.tokenizer.embed(codes[:, : config.n_obs_img_steps]),
            state=state.flatten(0, -2),
            actions=actions.flatten(0, -3),
            known=known,
        )

    def _vectors(self, batch: Mapping[str, Any], name: str, size: int) -> Tensor:
        """Return float vectors, padded with zeros to `size`."""
        if name not in batch:
            raise InputError(f"the batch has no {name!r}; it has {', '.join(sorted(batch.keys()))}")
        values = batch[name].to(self.device, torch.float32)
        if values.shape[-1] > size:
            raise InputError(f"{name} has {values.shape[-1]} dims; the model takes {size}")
        return functional.pad(values, (0, size - values.shape[-1]))

    @torch.no_grad()
    def _frames(
        self, batch: Mapping[str, Any], leading: torch.Size, length: int, pixels_needed: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Return the frames [N, length, 3, h, w], if needed, and their codes [N, length, L]."""
        names = set(batch.keys())
        given = schema.FRAME_TOKENS in names
        pixels = None
        for name in {schema.IMAGE0_HISTORY} if pixels_needed or not given else {schema.FRAME_TOKENS}:
            if name not in names:
                raise InputError(f"the batch has no {name!r}; it has {', '.join(sorted(names))}")
            axis = len(leading)
            if tuple(batch[name].shape[:axis]) != tuple(leading) or batch[name].shape[axis] < length:
                raise InputError(f"{name} has shape {list(batch[name].shape)}; {length} frames a row are needed")
        if pixels_needed or not given:
            raw = batch[schema.IMAGE0_HISTORY].to(self.device).flatten(0, len(leading) - 1)[:, :length]
            pixels = frames.to_model(raw, self.config.tokenizer.image_size, schema.IMAGE0_HISTORY)
        if given:
            return pixels, batch[schema.FRAME_TOKENS].to(self.device).flatten(0, len(leading) - 1)[:, :length]
        assert pixels is not None
        return pixels, self.tokenizer.encode(pixels)

    def _images(self, batch: Mapping[str, Any]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Return the images of the understanding expert, `image0` and, if present, `image1`, and their masks."""
        names = set(batch.keys())
        if schema.IMAGE0 not in names:
            raise InputError(f"the batch has no {schema.IMAGE0!r}; it has {', '.join(sorted(names))}")
        images: list[Tensor] = []
        image_masks: list[Tensor | None] = []
        for name in (schema.IMAGE0, schema.IMAGE1):
            if name not in names:
                continue
            raw = batch[name].to(self.device)
            images.append(frames.to_model(raw.flatten(0, -4), self.config.vision.image_size, name))
            mask = batch.get(name + schema.MASK_SUFFIX, None)
            image_masks.append(None if mask is None or bool(mask.all()) else mask.to(self.device).flatten())
        return images, image_masks

    def _words(self, batch: Mapping[str, Any], num_rows: int) -> tuple[Tensor, Tensor | None]:
        """Return the instruction's tokens and their mask; no tokens for a task without an instruction."""
        instruction = batch.get(schema.INSTRUCTION, None)
        if instruction is None:
            return torch.zeros(num_rows, 0, dtype=torch.long, device=self.device), None
        if isinstance(instruction, Tensor):
            instruction = instruction_texts(instruction.flatten(0, -2))
        words, mask = self.language_tokenizer(instruction)
        longest = int(mask.sum(1).max())  # remove common padding: it changes nothing and costs time
        words, mask = words[:, :longest], mask[:, :longest]
        return words.to(self.device), None if bool(mask.all()) else mask.to(self.device)

    def _check_steps(self, observed: int | None, predicted: int | None) -> None:
        for name, given, own in (
            ("cur_n_obs_img_steps", observed, self.config.n_obs_img_steps),
            ("cur_n_pred_img_steps", predicted, self.config.n_pred_img_steps),
        ):
            if given is not None and given != own:
                raise InputError(f"{name} is {given}; this model has {own}")

    def _hidden_codes(self, num_rows: int, generator: torch.Generator | None) -> Tensor | None:
        """Choose codes of the true frame to hide from the finer scales in training: bool [N, L − 1]."""
        rows, tokens = self.config.mask_sequence_rate, self.config.mask_token_rate
        if not self.training or rows == 0 or tokens == 0:
            return None
        shape = (num_rows, self.config.num_tokens - 1)
        in_row = torch.rand(num_rows, 1, device=self.device, generator=generator) < rows
        return in_row & (torch.rand(shape, device=self.device, generator=generator) < tokens)

    # Memory

    def _given_memory(self, batch: Mapping[str, Any], memory_state: Tensor | None) -> Tensor | None:
        """Return the memory before the first step; raise an error if the model has a memory and none is given."""
        if self.model.memory is None:
            return None
        if memory_state is None:
            memory_state = batch.get(schema.MEMORY_STATE, None)
        num_rows = batch[schema.STATE].shape[-2]
        return self.model.memory.check(memory_state, num_rows).to(self.device, torch.float32)

    def _checked(self, memory: Tensor, inputs: Inputs) -> Tensor:
        if inputs.steps != 1:
            raise InputError("actions are sampled for one step at a time, not for a sequence")
        return memory

    def _remember(
        self, inputs: Inputs, memory: Tensor | None, backprop: bool = True
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Return the memory's output before and after each step, [N, hidden], and the memory after the last step."""
        if self.model.memory is None or memory is None:
            return None, None, None
        frame = self.frame_features(inputs.codes[:, self.config.n_obs_img_steps - 1])  # img_t
        after, last = self.model.memory(
            inputs.by_step(frame),
            inputs.by_step(inputs.state),
            inputs.by_step(inputs.actions[:, -1]),
            memory,
            backprop,
        )
        before = torch.cat([memory[-1:], after[:-1]])
        if not backprop:
            before = before.detach()
        return before.flatten(0, 1), after.flatten(0, 1), last

    # Steps of a forward pass

    def _prefix(self, inputs: Inputs) -> Prefix:
        return self.model.understand(inputs.images, inputs.image_masks, inputs.words, inputs.word_mask)

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

    def _without_last_action(self, inputs: Inputs) -> Inputs:
        return Inputs(**{**vars(inputs), "known": torch.zeros_like(inputs.known)})

    def _predict_frame(
        self,
        inputs: Inputs,
        prefix: Prefix,
        before: Tensor | None,
        top_k: int,
        top_p: float,
        generator: torch.Generator | None,
    ) -> PredictedFrame:
        """Predict the next frame before acting: a_t is unknown, so the memory is that before the step."""
        condition = self._condition(inputs, before, self._expected_frame(inputs))
        return self.model.predict_frame(prefix, condition, top_k, top_p, generator)

    def _action_loss(
        self,
        batch: Mapping[str, Any],
        inputs: Inputs,
        predicted_frame: PredictedFrame,
        before: Tensor | None,
        noise: Tensor | None,
        time: Tensor | None,
        generator: torch.Generator | None,
    ) -> Tensor:
        """Return the mean of (ε − a − v)² over the real dims of the real steps."""
        actions = self._vectors(batch, schema.ACTION, self.config.max_action_dim).flatten(0, -3)
        noise = torch.randn(actions.shape, device=self.device, generator=generator) if noise is None else noise
        time = flow.sample_time(len(actions), self.device, generator) if time is None else time
        velocity = self.model.velocity(
            predicted_frame, inputs.state, flow.noisy_actions(actions, noise, time), time, before
        )
        squares = (noise - actions - velocity).square()
        weight = torch.ones_like(squares)
        names = set(batch.keys())
        if schema.ACTION_MASK in names:
            mask = batch[schema.ACTION_MASK].to(self.device).float()
            mask = mask if mask.ndim == 1 else mask.flatten(0, -2)[:, None]
            weight = weight * mask
        if schema.ACTION_IS_PAD in names:
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
