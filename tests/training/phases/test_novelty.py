"""Further rewards of the student: disagreement, learning progress, and the error that motion does not explain."""

import pytest
import torch
from explorers import explorer_policy, panning_rollouts, student_config, teacher_policy

from deft.config.f1_settings import StudentRewards
from deft.data.episodes import EpisodeBatch
from deft.training.phases.explorer_rollouts import measure
from deft.training.phases.novelty import FURTHER, Ensemble, MotionBaseline, Novelty
from deft.training.phases.rewards import StudentReward
from deft.training.phases.student import StudentTrainer

WEIGHTS = {"disagreement_weight": 1.0, "learning_progress_weight": 1.0, "excess_error_weight": 1.0, "ensemble_lag": 1}


@pytest.fixture(scope="module")
def teacher():
    return teacher_policy()


@pytest.fixture(scope="module")
def collected(teacher):
    rollouts = panning_rollouts(explorer_policy(teacher), num_envs=2, num_steps=6, num_episodes=4)
    found = rollouts.collect()
    rollouts.close()
    return found


def test_what_motion_explains_is_no_excess():
    """e = 2 + 3 |a| + noise, and 5 more in one step that nothing explains: the excess there is about 5, elsewhere 0."""
    generator = torch.Generator().manual_seed(0)
    action = torch.rand(40, 10, 1, generator=generator)
    features = torch.cat([torch.ones(40, 10, 1), action], -1)
    error = 2 + 3 * action[..., 0]
    error[7, 3] += 5
    excess = MotionBaseline().excess(features, error)
    assert excess[7, 3].item() == pytest.approx(5.0, abs=0.1)
    excess[7, 3] = 0
    assert excess.abs().max() < 0.1  # one outlier of 400 shifts the fit by 5 / 400 and a little
    assert error.std() > 0.8  # the speed


def test_features_are_those_of_the_executed_actions(collected):
    features = MotionBaseline.features(collected)
    assert features.shape == (6, 4, 1 + 4 * 2)  # two real dims
    episode = collected.episodes[1]  # column 1
    assert features[2, 1, 1:3].tolist() == pytest.approx(abs(episode.action[2, :2]).tolist())
    assert features[2, 1, 5:7].tolist() == pytest.approx(abs(episode.action[1, :2]).tolist())
    assert features[0, :, 5:].abs().max() == 0  # nothing comes before an episode


def patches(steps: int, batch: int, noisy: bool, seed: int, teacher) -> EpisodeBatch:
    """Frames of one grey level; where `noisy`, of a new random level at every step."""
    generator = torch.Generator().manual_seed(seed)
    levels = torch.randint(0, 256, (batch, steps + 1, 1, 1, 1), generator=generator)
    if not noisy:  # the level follows from the action: brighter by 20 · a
        action = torch.randint(0, 2, (batch, steps), generator=generator)
        levels = 60 + 20 * torch.cat([torch.zeros(batch, 1), action.cumsum(1)], 1)[..., None, None, None]
    actions = torch.zeros(batch, steps, 32)
    if not noisy:
        actions[..., 0] = action
    wrist = levels.expand(-1, -1, 3, 16, 16).to(torch.uint8)
    return EpisodeBatch(
        {"wrist": wrist, "state": torch.zeros(batch, steps + 1, 32), "action": actions}, torch.full((batch,), steps)
    )


def test_noise_pays_neither_progress_nor_disagreement_for_long(teacher):
    """A television of random levels. Its change from frame to frame has the deviation 255 √(1/6) levels, 0.41, which
    no member can predict; after a while the error no longer falls, and the members agree on the mean."""
    torch.manual_seed(0)
    novelty = Novelty(StudentRewards(**{**WEIGHTS, "ensemble_lag": 10}), teacher)
    for number in range(30):
        novelty.learn(patches(8, 8, True, number, teacher))
    unseen = patches(8, 64, True, 99, teacher)
    (_, steps, _), *_ = unseen.chunks(8)
    older, now = (float(model.errors(steps).mean()) for model in (novelty.older.network, novelty.ensemble.model))
    assert abs(older - now) < 0.1 * now
    assert novelty.ensemble.disagreement(unseen).mean() < 0.3 * 0.41


def test_an_ensemble_agrees_on_what_it_has_learned(teacher):
    torch.manual_seed(0)
    ensemble, lesson = Ensemble(teacher, 3), patches(8, 16, False, 1, teacher)
    before = ensemble.disagreement(lesson)
    assert before.shape == (8, 16)
    first = ensemble.learn(lesson)
    for _ in range(40):
        last = ensemble.learn(lesson)
    assert last < 0.3 * first
    assert ensemble.disagreement(lesson).mean() < 0.5 * before.mean()


def test_only_terms_with_a_weight_are_measured_and_paid(collected, teacher):
    measures = measure(teacher, collected)
    batch = collected.batch(teacher)
    novelty = Novelty(StudentRewards(**WEIGHTS), teacher)
    terms = novelty.measure(batch, collected, measures)
    assert tuple(terms) == FURTHER
    assert all(value.shape == measures.error.shape for value in terms.values())
    reward = StudentReward(novelty.rewards)
    _, paid = reward(measures, terms)
    # normalised by this rollout, times 0.5
    assert all(
        paid[name].std(correction=0).item() == pytest.approx(0.5, rel=1e-2) for name in FURTHER[:1] + FURTHER[2:]
    )
    assert paid["learning_progress"].abs().max() < 1e-3  # older and present ensemble are equal
    again = StudentReward(novelty.rewards)
    again.load_state_dict(reward.state_dict())
    assert torch.equal(again(measures, terms)[0], reward(measures, terms)[0])
    none = Novelty(StudentRewards(), teacher)
    assert not none.is_active
    assert none.measure(batch, collected, measures) == none.learn(batch) == {}


def test_resuming_equals_going_on(tmp_path, teacher):
    """4 episodes at once, and 2, stopped, then 2 more: the same weights and ensembles, bit for bit."""

    def run(folder, episodes, **more):
        config = student_config(tmp_path / folder, num_episodes=episodes, **more)
        for name, value in {**WEIGHTS, "ensemble_members": 2, "ensemble_epochs": 1}.items():
            setattr(config.student.rewards, name, value)
        trainer = StudentTrainer(config, teacher)
        trainer.train()
        return trainer

    once = run("once", 4)
    run("twice", 2)
    twice = run("twice", 4, auto_resume=True)
    for one, other in ((once.explorer, twice.explorer), (once.novelty.ensemble.model, twice.novelty.ensemble.model)):
        assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert torch.equal(once.novelty.baseline.sums, twice.novelty.baseline.sums)
    one, other = (trainer.novelty.older.state_dict() for trainer in (once, twice))
    assert all(torch.equal(value, other[part][name]) for part in one for name, value in one[part].items())
