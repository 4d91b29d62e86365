"""A world model as the reward of an F1 environment: its accuracy in the teacher's phase, its error in the student's."""

import numpy as np
import pytest
import torch
from explorers import teacher_policy
from panning_camera import WORLD

from deft import F1RLEnv, StudentEnv, schema
from deft.errors import InputError
from deft.models.f1.batch import BatchBuilder
from deft.models.f1.frames import to_model
from deft.models.f1.loading import LoadedPolicy

TASK = {"world": WORLD, "max_steps": 8}


def actions(count):
    return np.random.default_rng(1).uniform(-1, 1, (count, 32)).astype(np.float32)


def by_hand(policy, steps):
    """Accuracy and cross-entropy of each step, from whole transitions and a memory that is carried here."""
    memory, found = policy.initial_memory(1), []
    for before, action, after in steps:
        row = {schema.OBSERVATION: before, schema.ACTION: action, schema.NEXT: {schema.OBSERVATION: after}}
        batch = BatchBuilder().build_batch([row], include_memory_states=False)
        predicted = policy.predict_images_only(batch, memory)
        true = policy.tokenizer.encode(to_model(torch.as_tensor(after["wrist_rgb"][-1:]), 16, "wrist_rgb"))
        loss = policy.forward_with_world_model(batch, memory)["wm_loss"].detach()
        found.append((float((predicted["frame_tokens"] == true).float().mean()), float(loss)))
        memory = predicted["memory_state"]
    return found


def test_the_teachers_environment_rewards_prediction_accuracy():
    """`F1RLEnv(teacher_policy=policy)`, with what `load_f1_policy` returns or the policy itself."""
    policy = teacher_policy()
    frame = F1RLEnv(TASK).reset(seed=0)[0]["wrist_rgb"][-1:]
    with torch.no_grad():  # new weights predict no code of this world: let them predict the most frequent one
        frequent = policy.tokenizer.encode(to_model(torch.as_tensor(frame), 16, "wrist_rgb")).mode().values
        policy.model.world_model.output.bias[frequent] += 5.0
    for given in (policy, LoadedPolicy(policy, policy.config, {})):
        env = F1RLEnv(task_config=TASK, phase="teacher", teacher_policy=given)
        assert env.reward_terms == ("accuracy",)
        everything = []
        for seed in (0, 1):  # the second episode starts with a memory of zeros again
            observation, _ = env.reset(seed=seed)
            steps, rewards = [], []
            for action in actions(8):
                following, reward, _, _, info = env.step(action)
                steps.append((observation, info["executed_action"], following))
                rewards.append(reward)
                assert info["reward_terms"] == {"accuracy": reward}
                observation = following
            assert rewards == [accuracy for accuracy, _ in by_hand(policy, steps)]
            everything += rewards
        assert any(everything)


def test_the_students_environment_rewards_prediction_error():
    """From the head and the wrist camera, though the student is shown the wrist alone."""
    policy = teacher_policy().train()  # the reward is that of evaluation, and leaves the mode as it is
    env = StudentEnv(TASK, teacher_policy=policy)
    full = F1RLEnv(TASK)
    observation, _ = full.reset(seed=0)
    assert "head_rgb" not in env.reset(seed=0)[0]
    steps, rewards = [], []
    for action in actions(3):
        following, _, _, _, info = full.step(action)
        steps.append((observation, info["executed_action"], following))
        rewards.append(env.step(action)[1])
        observation = following
    assert policy.training
    expected = [error for _, error in by_hand(policy.eval(), steps)]
    assert rewards == pytest.approx(expected, rel=1e-5)


def test_environments_that_share_a_policy_have_memories_of_their_own():
    policy = teacher_policy()
    alone, first, second = (F1RLEnv(TASK, teacher_policy=policy) for _ in range(3))
    for env in (alone, first, second):
        env.reset(seed=0)
    expected = [alone.step(action)[1] for action in actions(3)]
    rewards = []
    for action in actions(3):
        rewards.append(first.step(action)[1])
        second.step(-action)
    assert rewards == expected


def test_a_teacher_without_memory():
    env = F1RLEnv(TASK, teacher_policy=teacher_policy(memory_enabled=False))
    env.reset(seed=0)
    assert 0.0 <= env.step(actions(1)[0])[1] <= 1.0


def test_what_cannot_reward_is_an_error():
    with pytest.raises(InputError, match="teacher_policy: Linear has no reset and no reward"):
        F1RLEnv(TASK, teacher_policy=torch.nn.Linear(1, 1))
