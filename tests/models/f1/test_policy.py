"""The policy on batches: memory through sequences, what starts without effect, what the prediction depends on."""

import pytest
import torch
from f1_worlds import f1_batch, micro_policy, wake

from deft import schema
from deft.errors import InputError
from deft.models.f1.policy import roll_out

KEYS = {"loss", "wm_loss", "wm_acc_mean", "wm_acc_tail", "memory_state"}


def predicted(policy, batch, memory):
    return policy.predict_images_only(batch, memory)["logits"]


def test_outputs_and_shapes():
    policy = micro_policy()
    batch = f1_batch(3)
    results = policy.forward_with_world_model(batch, memory_state=policy.initial_memory(3))
    assert set(results) == KEYS
    assert results["memory_state"].shape == (2, 3, 6)
    assert results["loss"].shape == ()
    assert torch.equal(results["loss"], results["wm_loss"])  # no actions in the batch
    # 21 tokens, three rows: an accuracy counts 63rds, the finest scale's 48ths
    assert (results["wm_acc_mean"] * 63).item() == pytest.approx(round((results["wm_acc_mean"] * 63).item()), abs=1e-4)
    assert (results["wm_acc_tail"] * 48).item() == pytest.approx(round((results["wm_acc_tail"] * 48).item()), abs=1e-4)
    found = policy.predict_images_only(batch, policy.initial_memory(3))
    assert found["images"].shape == (3, 3, 16, 16)
    assert found["images"].dtype == torch.uint8
    assert found["frame_tokens"].shape == (3, 21)
    assert torch.equal(found["memory_state"], results["memory_state"])
    assert torch.equal(policy.forward_memory_only(batch, policy.initial_memory(3)), results["memory_state"])
    actions = policy.sample_actions_with_world_model(f1_batch(3, target=False), policy.initial_memory(3))
    assert actions.shape == (3, 3, 32)


def test_calling_the_module_is_the_same_as_calling_the_method():
    """Wrappers for several processes see only calls of the module."""
    policy, batch = micro_policy(), f1_batch(2)
    memory = policy.initial_memory(2)
    assert torch.equal(
        policy(batch, memory_state=memory)["loss"], policy.forward_with_world_model(batch, memory)["loss"]
    )


def test_memory_must_be_given():
    policy, batch = micro_policy(), f1_batch(2)
    for method in (
        policy.forward_with_world_model,
        policy.predict_images_only,
        policy.forward_memory_only,
        policy.sample_actions_with_world_model,
    ):
        with pytest.raises(InputError, match=r"memory_state is None; start an episode with zeros \(2, 2, 6\)"):
            method(batch)
    with pytest.raises(InputError, match=r"shape \(2, 1, 6\); \(layers, batch, hidden\) is \(2, 2, 6\)"):
        policy.forward_with_world_model(batch, policy.initial_memory(1))
    batch[schema.MEMORY_STATE] = policy.initial_memory(2)
    assert policy.forward_with_world_model(batch)["memory_state"].shape == (2, 2, 6)


def test_two_chunks_of_four_with_carry_are_one_of_eight():
    policy, batch = wake(micro_policy()), f1_batch(8, 2)
    whole = policy.predict_images_only(batch, policy.initial_memory(2))
    first = policy.predict_images_only({name: value[:4] for name, value in batch.items()}, policy.initial_memory(2))
    second = policy.predict_images_only({name: value[4:] for name, value in batch.items()}, first["memory_state"])
    torch.testing.assert_close(torch.cat([first["logits"], second["logits"]]), whole["logits"], atol=1e-5, rtol=0)
    torch.testing.assert_close(second["memory_state"], whole["memory_state"], atol=1e-6, rtol=0)
    forgotten = policy.predict_images_only({name: value[4:] for name, value in batch.items()}, policy.initial_memory(2))
    assert (forgotten["logits"] - second["logits"]).abs().max() > 1e-4


@pytest.mark.parametrize("with_actions", [False, True])
def test_a_sequence_is_its_steps_one_after_the_other(with_actions):
    policy, batch = wake(micro_policy()), f1_batch(3, 2)
    noise, time = torch.randn(6, 3, 32), torch.rand(6)
    if with_actions:
        batch[schema.ACTION] = torch.randn(3, 2, 3, 32)
    whole = policy.forward_with_world_model(batch, policy.initial_memory(2), noise, time)
    memory, losses = policy.initial_memory(2), []
    for step in range(3):
        rows = slice(2 * step, 2 * step + 2)
        part = {name: value[step] for name, value in batch.items()}
        results = policy.forward_with_world_model(part, memory, noise[rows], time[rows])
        memory = results["memory_state"]
        losses.append(results["loss"])
    # means over equal numbers of rows: the whole's mean is the mean of the steps'
    torch.testing.assert_close(torch.stack(losses).mean(), whole["loss"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(memory, whole["memory_state"], atol=1e-6, rtol=0)


def test_each_row_has_its_own_memory():
    """The batch is dim 1 of (layers, batch, hidden): another memory in row 1 leaves row 0 as it is."""
    policy, batch = wake(micro_policy()), f1_batch(2)
    memory = policy.initial_memory(2)
    other = memory.clone()
    other[:, 1] = 1.0
    before, after = predicted(policy, batch, memory), predicted(policy, batch, other)
    torch.testing.assert_close(after[0], before[0], atol=1e-6, rtol=0)
    assert (after[1] - before[1]).abs().max() > 1e-4


@pytest.mark.parametrize("project", [True, False])
def test_memory_actions_and_state_start_without_effect(project):
    policy, batch = micro_policy(memory_project_to_vae_dim=project), f1_batch(2)
    changed = {**batch, schema.ACTION_HISTORY: torch.randn(2, 4, 32), schema.STATE: torch.randn(2, 32)}
    first = predicted(policy, batch, policy.initial_memory(2))
    assert torch.equal(first, predicted(policy, changed, torch.randn(2, 2, 6)))
    bare = micro_policy(memory_enabled=False, condition_on_actions=False)
    bare.load_state_dict({name: value for name, value in policy.state_dict().items() if name in bare.state_dict()})
    assert torch.equal(first, bare.predict_images_only(batch)["logits"])
    policy.forward_with_world_model(batch, torch.randn(2, 2, 6))["loss"].backward()
    gate, output = policy.model.memory.to_generation.gate.grad, policy.model.conditioning.output.weight.grad
    assert gate.abs().max() > 0  # no effect, but a gradient: they can learn
    assert output.abs().max() > 0


@pytest.mark.parametrize("motion", [False, True])
def test_the_last_action_alone_changes_the_prediction(motion):
    policy, batch = wake(micro_policy(motion_prior=motion)), f1_batch(2)
    other = {**batch, schema.ACTION_HISTORY: batch[schema.ACTION_HISTORY].clone()}
    other[schema.ACTION_HISTORY][:, -1, 0] += 1.0  # a_t
    memory = policy.initial_memory(2)
    assert (predicted(policy, batch, memory) - predicted(policy, other, memory)).abs().max() > 1e-4


def test_before_acting_the_last_action_is_not_looked_for():
    """The history of an observation ends with a_{t-1}; its oldest action lies before the frames."""
    policy, batch = wake(micro_policy()), f1_batch(2, target=False)
    noise, memory = torch.randn(2, 3, 32), torch.randn(2, 2, 6)

    def sampled(history):
        given = {**batch, schema.ACTION_HISTORY: history}
        return policy.sample_actions_with_world_model(given, memory, noise, top_k=1, predict_action_only=False)

    history = batch[schema.ACTION_HISTORY]
    oldest, newest = history.clone(), history.clone()
    oldest[:, 0] += 1.0
    newest[:, -1] += 1.0
    assert torch.equal(sampled(history)["action"], sampled(oldest)["action"])
    assert not torch.equal(sampled(history)["action"], sampled(newest)["action"])


def test_no_gradient_from_later_steps_without_memory_backprop():
    policy, batch = wake(micro_policy()), f1_batch(3, 2)

    def first_step_gradient(memory_backprop):
        memory = policy.initial_memory(2).requires_grad_()
        inputs = policy._prepare(batch, memory, with_target=True)
        _, after, last = policy._remember(inputs, memory_backprop)
        (gradient,) = torch.autograd.grad(after[-2:].sum(), memory, allow_unused=True)  # of the last step's rows
        assert last.shape == memory.shape
        return gradient

    assert first_step_gradient(True).abs().max() > 0
    assert first_step_gradient(False) is None
    # and the GRU learns from its own step still
    policy.zero_grad()
    policy.forward_with_world_model(batch, policy.initial_memory(2), memory_backprop=False)["loss"].backward()
    assert policy.model.memory.gru.weight_ih_l0.grad.abs().max() > 0


def test_the_gradient_of_a_later_loss_reaches_earlier_steps_only_with_memory_backprop():
    policy, batch = wake(micro_policy()), f1_batch(2, 1)
    batch[schema.STATE].requires_grad_()

    def gradients(memory_backprop):
        policy.zero_grad()
        inputs = policy._prepare(batch, policy.initial_memory(1), with_target=True)
        _, after, _ = policy._remember(inputs, memory_backprop)
        (gradient,) = torch.autograd.grad(after[1].sum(), batch[schema.STATE])
        return gradient[0].abs().max().item(), gradient[1].abs().max().item()

    earlier, own = gradients(True)
    assert earlier > 0
    assert own > 0
    earlier, own = gradients(False)
    assert earlier == 0
    assert own > 0


def test_the_losses_of_actions_count_real_dims_and_steps_alone():
    policy, batch = micro_policy(), f1_batch(2)
    batch[schema.ACTION] = torch.randn(2, 3, 32)
    batch[schema.ACTION_MASK] = torch.arange(32) < 8
    batch[schema.ACTION_IS_PAD] = torch.tensor([[False, False, True], [False, True, True]])
    noise, time, memory = torch.randn(2, 3, 32), torch.rand(2), policy.initial_memory(2)
    results = policy.forward_with_world_model(batch, memory, noise, time)
    assert set(results) == KEYS | {"action_loss"}
    torch.testing.assert_close(results["loss"], results["action_loss"] + 0.1 * results["wm_loss"])
    with torch.no_grad():  # what is padded moves the noisy actions, but is no part of the mean: 3 steps of 8 dims count
        policy.model.flow.action_out_proj.weight.zero_()
        policy.model.flow.action_out_proj.bias.zero_()
    squares = (noise - batch[schema.ACTION]).square()
    expected = (squares[0, :2, :8].sum() + squares[1, :1, :8].sum()) / 24
    found = policy.forward_with_world_model(batch, memory, noise, time)["action_loss"]
    torch.testing.assert_close(found, expected)
    only = policy.forward_with_world_model(batch, memory, noise, time, train_gen_expert_only=True)
    assert "action_loss" not in only


def test_a_picture_that_is_not_there_is_not_seen():
    policy, batch = micro_policy(), f1_batch(2)
    batch["image1_mask"] = torch.tensor([True, False])
    other = {**batch, schema.IMAGE1: 255 - batch[schema.IMAGE1]}
    memory = policy.initial_memory(2)
    before, after = predicted(policy, batch, memory), predicted(policy, other, memory)
    assert (before[0] - after[0]).abs().max() > 1e-5
    torch.testing.assert_close(before[1], after[1], atol=1e-6, rtol=0)
    alone = {name: value for name, value in batch.items() if name not in (schema.IMAGE1, "image1_mask")}
    torch.testing.assert_close(predicted(policy, alone, memory)[1], before[1], atol=1e-5, rtol=0)


def test_words_are_seen_and_their_padding_is_not():
    policy, batch = micro_policy(), f1_batch(2)
    memory = policy.initial_memory(2)
    short = predicted(policy, {**batch, schema.INSTRUCTION: ["go", "go"]}, memory)
    from_bytes = torch.tensor([[*b"go", 0, 0], [*b"go", 0, 0]], dtype=torch.uint8)
    assert torch.equal(short, predicted(policy, {**batch, schema.INSTRUCTION: from_bytes}, memory))
    assert (short - predicted(policy, {**batch, schema.INSTRUCTION: ["up", "go"]}, memory)).abs()[0].max() > 1e-5
    policy.language_tokenizer.length = 5  # 2 and the marks: no padding is left but one
    torch.testing.assert_close(
        predicted(policy, {**batch, schema.INSTRUCTION: ["go", "go"]}, memory), short, atol=1e-5, rtol=0
    )


def test_codes_that_come_with_the_batch_are_used():
    policy, batch = micro_policy(), f1_batch(2, 3)
    memory = policy.initial_memory(3)
    codes = policy.tokenizer.encode(batch[schema.IMAGE0_HISTORY].float() / 127.5 - 1)
    given = {name: value for name, value in batch.items() if name != schema.IMAGE0_HISTORY}
    given[schema.FRAME_TOKENS] = codes
    found = policy.forward_with_world_model(given, memory)["loss"]
    assert torch.equal(found, policy.forward_with_world_model(batch, memory)["loss"])


def test_batches_that_do_not_fit_raise_an_error():
    policy = micro_policy()
    memory = policy.initial_memory(2)
    cases = [
        ({schema.STATE: torch.zeros(2, 33)}, "state has 33 dims; the model takes 32"),
        ({schema.ACTION_HISTORY: torch.zeros(2, 3, 32)}, "4 actions a row are needed"),
        ({schema.IMAGE0_HISTORY: torch.zeros(2, 4, 3, 16, 16, dtype=torch.uint8)}, "5 frames a row are needed"),
        ({schema.IMAGE0: torch.zeros(2, 3, 16, 16)}, "image0 is float32 .* images must be uint8"),
        ({schema.IMAGE0_HISTORY: torch.zeros(2, 5, 3, 16, 16)}, "image0_history is float32 .* pass them unscaled"),
    ]
    for change, message in cases:
        with pytest.raises(InputError, match=message):
            policy.forward_with_world_model({**f1_batch(2), **change}, memory)
    for missing in (schema.IMAGE0, schema.IMAGE0_HISTORY, schema.STATE, schema.ACTION_HISTORY):
        batch = {name: value for name, value in f1_batch(2).items() if name != missing}
        with pytest.raises(InputError, match=missing):
            policy.forward_with_world_model(batch, memory)


def test_hidden_actions_in_training():
    """With a rate of 1, a_t is unknown in every training step: it changes no prediction, nor what is read of memory."""
    policy, batch = wake(micro_policy(unknown_action_rate=1.0)), f1_batch(2)
    other = {**batch, schema.ACTION_HISTORY: batch[schema.ACTION_HISTORY].clone()}
    other[schema.ACTION_HISTORY][:, -1] += 1.0
    memory = policy.initial_memory(2)
    first, second = (policy.train().forward_with_world_model(each, memory) for each in (batch, other))
    assert torch.equal(first["loss"], second["loss"])
    assert not torch.equal(first["memory_state"], second["memory_state"])  # the memory itself is of what was done
    first, second = (policy.eval().forward_with_world_model(each, memory) for each in (batch, other))
    assert not torch.equal(first["loss"], second["loss"])


def test_activation_checkpointing_changes_nothing():
    plain, saving = wake(micro_policy()), wake(micro_policy(activation_checkpointing=True))
    saving.load_state_dict(plain.state_dict())
    batch, gradients = f1_batch(2), []
    for policy in (plain, saving):
        policy.forward_with_world_model(batch, policy.initial_memory(2))["loss"].backward()
        gradients.append({name: value.grad for name, value in policy.named_parameters() if value.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_codes_are_hidden_in_training_alone():
    """All hidden: the finer scales no longer depend on the coarser codes of the true frame."""
    policy, batch = micro_policy(mask_sequence_rate=1.0, mask_token_rate=1.0), f1_batch(2)
    memory = policy.initial_memory(2)
    codes = policy.tokenizer.encode(batch[schema.IMAGE0_HISTORY].float() / 127.5 - 1)
    given = {**batch, schema.FRAME_TOKENS: codes}
    coarse = codes.clone()
    coarse[:, 4, 0] = (coarse[:, 4, 0] + 1) % 32

    def logits(policy, frame_tokens):
        hidden = policy._hidden_codes(2)
        inputs = policy._prepare({**given, schema.FRAME_TOKENS: frame_tokens}, memory, with_target=True)
        condition = policy._condition(inputs, None, None)
        return policy.model.teacher_forced(policy._prefix(given), condition, inputs.codes[:, 4], hidden)

    assert torch.equal(logits(policy.train(), codes), logits(policy, coarse))
    assert not torch.equal(logits(policy.eval(), codes), logits(policy, coarse))
    assert torch.isfinite(policy.train().forward_with_world_model(given, memory)["loss"])


@pytest.mark.parametrize("motion", [False, True])
def test_rolling_out_is_predicting_step_by_step(motion):
    policy, batch = wake(micro_policy(motion_prior=motion)), f1_batch(2, target=False)
    actions, states, memory = torch.randn(2, 3, 32), torch.randn(2, 3, 32), policy.initial_memory(2)
    found = roll_out(policy, batch, actions, memory, states)
    assert found["images"].shape == (2, 3, 3, 16, 16)
    history, frames = batch[schema.ACTION_HISTORY], batch[schema.IMAGE0_HISTORY]
    for step in range(3):
        history = torch.cat([history[:, 1:], actions[:, step : step + 1]], 1)
        wrist = batch[schema.IMAGE1] if step == 0 else found["images"][:, step - 1]
        seen = {schema.ACTION_HISTORY: history, schema.IMAGE0_HISTORY: frames, schema.STATE: states[:, step]}
        results = policy.predict_images_only({**batch, **seen, schema.IMAGE1: wrist}, memory)
        assert torch.equal(results["frame_tokens"], found["frame_tokens"][:, step])
        memory = results["memory_state"]
        frames = torch.cat([frames[:, 1:], results["images"][:, None]], 1)
    assert torch.equal(memory, found["memory_state"])
    # without its own predictions in the history the third frame would be another
    assert not torch.equal(frames, batch[schema.IMAGE0_HISTORY])


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bfloat16 is slow, and says so
def test_half_precision_is_near_single():
    single, half = wake(micro_policy()), micro_policy()
    half.load_state_dict(single.state_dict())
    half.use_dtype("bfloat16")
    assert half.model.experts.generation.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    assert half.model.world_model.output.weight.dtype == torch.float32
    batch, memory = f1_batch(2), single.initial_memory(2)
    first, second = (policy.forward_with_world_model(batch, memory)["loss"] for policy in (single, half))
    second.backward()
    assert second.item() == pytest.approx(first.item(), abs=0.02)  # 8 bits: 1 in 256, of a loss of about 3.5


def remembering_policy():
    """A policy whose memory draws into the expected picture, with weights that say something."""
    policy = micro_policy(motion_prior=True, memory_picture=True)
    torch.nn.init.normal_(policy.tokenizer.quantize.embedding.weight)
    return policy


def test_what_is_remembered_joins_the_expected_picture_place_by_place():
    """Without effect at first; then another memory changes the logits of the same frames."""
    policy, batch = remembering_policy(), f1_batch(2)
    without = micro_policy(motion_prior=True)
    kept = {name: value for name, value in policy.state_dict().items() if ".to_picture." not in name}
    without.load_state_dict(kept)
    memories = [policy.initial_memory(2), torch.randn_like(policy.initial_memory(2))]
    before = [predicted(policy, batch, memory) for memory in memories]
    torch.testing.assert_close(before[0], predicted(without, batch, memories[0]))
    torch.testing.assert_close(before[0], before[1])
    torch.nn.init.normal_(policy.model.memory.to_picture.output.weight)
    after = [predicted(policy, batch, memory) for memory in memories]
    assert (after[0] - after[1]).abs().max() > 1e-3


def test_the_remembered_picture_learns_by_a_pass_of_its_own():
    """Its loss starts as the motion prior's error; what comes back into view is learned from the memory alone.

    All frames of an episode but its first are grey, and the last is the first again: only the memory has seen it.
    """
    policy = remembering_policy()
    batch = f1_batch(3, 2)
    codes = policy.tokenizer.encode(batch["image0_history"].float() / 127.5 - 1.0)
    grey = policy.tokenizer.encode(torch.zeros(1, 3, *batch["image0_history"].shape[-2:]))[0]
    first = codes[0, :, 3].clone()
    codes[1:, :, :4], codes[-1, :, 4] = grey, first
    batch = {**batch, "frame_tokens": codes}
    batch["image0_history"][1:, :, :4] = 127
    memory = policy.initial_memory(2)
    found = policy.forward_memory_correction(batch, memory)
    torch.testing.assert_close(found["loss"], found["motion_error"])
    optimizer = torch.optim.Adam(policy.model.memory.parameters(), 1e-2)
    for _ in range(40):
        optimizer.zero_grad()
        policy.forward_memory_correction(batch, memory)["loss"].backward()
        optimizer.step()
    found = policy.forward_memory_correction(batch, memory)
    assert float(found["loss"]) < 0.7 * float(found["motion_error"])
    reset = policy.forward_memory_correction({name: value[-1:] for name, value in batch.items()}, memory)
    carried = policy.forward_memory_only({name: value[:-1] for name, value in batch.items()}, memory)
    last = policy.forward_memory_correction({name: value[-1:] for name, value in batch.items()}, carried)
    assert float(last["loss"]) < 0.9 * float(reset["loss"])
    with pytest.raises(InputError, match="memory_picture"):
        micro_policy(motion_prior=True).forward_memory_correction(batch, memory)


def test_a_new_memory_retains_its_inputs():
    """The gates' own biases alone: z = 1 − 1/τ with τ in 2 … 32, so that at least half is kept from step to step."""
    memory = micro_policy(memory_num_layers=2).model.memory
    for layer in range(2):
        z = sum(getattr(memory.gru, f"bias_{name}_l{layer}").chunk(3)[1] for name in ("ih", "hh")).sigmoid()
        assert 0.5 <= float(z.min()) <= float(z.max()) <= 1 - 1 / 32 + 1e-6


def test_the_memory_is_fed_with_all_scales():
    """Two frames that differ in a code of the finest scale alone are not the same to it."""
    policy = remembering_policy()
    codes = torch.zeros(2, policy.config.num_tokens, dtype=torch.long)
    codes[1, -1] = 1
    features = policy.frame_features(codes)
    assert features.shape == (2, policy.model.memory.frame.in_features)
    assert (features[0] != features[1]).any()


def test_the_detail_of_the_moved_frame_is_kept():
    """Where nothing moves the predicted codes are the last frame's, x̂ + D(codes) − D(E(x̂)) is that frame, to a level;
    a code that differs changes the picture by what it changes of the codes' own picture."""
    plain, keeps = (micro_policy(motion_prior=True, detail_of_motion=on) for on in (False, True))
    with torch.no_grad():
        for policy in (plain, keeps):
            policy.model.motion.log_sharpness.fill_(10.0)  # all is as it was
    batch, memory = f1_batch(2, target=False), plain.initial_memory(2)
    last = batch[schema.IMAGE0_HISTORY][:, -1]
    assert (plain.predict_images_only(batch, memory)["images"].int() - last.int()).abs().float().mean() > 10
    found = keeps.predict_images_only(batch, memory)
    assert (found["images"].int() - last.int()).abs().max() <= 1
    codes = found["frame_tokens"].clone()
    codes[0, -1] = (codes[0, -1] + 1) % keeps.config.tokenizer.codebook_size
    inputs = keeps._prepare(batch, memory)
    change = keeps.tokenizer.decode(codes) - keeps.tokenizer.decode(found["frame_tokens"])
    expected = (last.float() + 127.5 * change).clamp(0, 255)
    assert (keeps._decode_images(codes, inputs).float() - expected).abs().max() <= 1
    acted = keeps.sample_actions_with_world_model(batch, memory, top_k=1, predict_action_only=False)
    assert (acted["images"].int() - last.int()).abs().max() <= 1
