"""How accurately a MetaWorld policy sees, and how accurately its tasks must be seen.

    python benchmarks/metaworld_positions.py RUN --tasks reach-v3 push-v3    errors of the positions that it predicts
    python benchmarks/metaworld_positions.py RUN --scenes 200                in the first image of 200 new scenes
    python benchmarks/metaworld_positions.py --expert                        success of experts with wrong positions
    python benchmarks/metaworld_positions.py --stops --tasks reach-v3        how near to the goal experts stop

RUN is a run or checkpoint of vla-tiny that was trained with position labels. It acts in four environments of each task,
and its predictions are compared with the labels at every decision, or in the first images of `--scenes`. The experts
read the positions of the objects and of the goal with an error that is drawn per episode (standard deviation σ) and per
four steps (σ / 2). Where they stop is MetaWorld's own `obj_to_target` after 150 steps: the distance of the object, or
in `reach` of the fingertips, to the goal.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

from common import REPOSITORY, print_machine, print_table, worker_environment

ERRORS = (0.0, 0.005, 0.01, 0.02)  # σ in metres
EPISODES, STEPS, ENVS, CHUNK = 10, 300, 4, 4
STOP_STEPS = 150
NEW_SEED = 10_000_000  # of scenes that no training uses
NAMES = ("object x, y, z", "second object x, y, z", "goal x, y, z")
EXPERT = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
import numpy as np
from deft.envs.suites.metaworld import PLACES, MetaWorldEnv
warnings.filterwarnings("ignore")
task, episodes, steps, chunk = sys.argv[2], *map(int, sys.argv[3:6])
generator, env, found = np.random.default_rng(0), MetaWorldEnv(task, observation="state"), []
for sigma in map(float, sys.argv[6:]):
    count = 0
    for episode in range(episodes):
        env.reset(seed=episode)
        bias = generator.normal(0, sigma, len(PLACES))
        for step in range(steps):
            if step % chunk == 0:
                error = bias + generator.normal(0, sigma / 2, len(PLACES))
            raw = env._raw
            env._raw = raw.copy()
            env._raw[PLACES] += np.where(raw[PLACES] != 0, error, 0)
            action = env.expert_action()
            env._raw = raw
            if env.step(action)[2]:
                count += 1
                break
    found.append(str(count))
print(*found)
"""
STOPS = """
import sys, warnings
sys.path.insert(0, sys.argv[1])
from deft.envs.suites.metaworld import MetaWorldEnv
warnings.filterwarnings("ignore")
task, episodes, steps = sys.argv[2], *map(int, sys.argv[3:5])
env = MetaWorldEnv(task, observation="state", reward="dense")
for episode in range(episodes):
    env.reset(seed=episode)
    for step in range(steps - 1):
        env.step(env.expert_action())
    print(100 * env._simulator().step(env.expert_action())[4]["obj_to_target"])
"""


def in_the_suite(script: str, *words: object) -> list[str]:
    """What a script prints in the suite's interpreter, by words; it gets the folder of Deft and `words`."""
    from deft.envs.suites import find_suite
    from deft.envs.suites.install import python_of

    command = [str(python_of(find_suite("metaworld"))), "-c", script, REPOSITORY, *words]
    done = subprocess.run(
        list(map(str, command)), env=worker_environment(1), stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout.split()


def position_errors(run: Path, task: str, num_steps: int, num_scenes: int) -> list[str]:
    """Mean absolute errors in centimetres of the predicted positions of one task."""
    import numpy as np
    import torch

    from deft import schema
    from deft.config.settings import EnvConfig
    from deft.data.tensors import policy_inputs
    from deft.envs.make import make_vector_env
    from deft.evaluation.evaluate import find_run, load_policy
    from deft.evaluation.rollouts import PolicyActor

    folder, config = find_run(run)
    kwargs = {**config.env.kwargs, "observation": "labelled"}
    env_config = EnvConfig(id=f"metaworld/{task}", kwargs=kwargs)
    built_for = make_vector_env(env_config, num_envs=1, chunk_length=config.policy.chunk_length)
    policy: Any = load_policy(folder, config, built_for, "cpu").eval()
    built_for.close()
    env = make_vector_env(env_config, num_envs=ENVS)
    model = policy.model

    def error(observation: Any) -> Any:
        streams = policy_inputs(observation, torch.device("cpu"), None, None, None)[schema.OBSERVATION]
        predicted = model.places_scale.inverse(model.found(model.encode_observations(streams)))
        labels = np.asarray(observation["places"])
        return predicted[:, : labels.shape[1]].numpy() - labels

    with torch.inference_mode():
        found = [error(env.reset(NEW_SEED + first)) for first in range(0, num_scenes, ENVS)]
        if not num_scenes:
            actor = PolicyActor(policy, ENVS, env.action_mask, deterministic=True)
            observation = env.reset(NEW_SEED)
            for _ in range(num_steps):
                due = np.flatnonzero(actor.is_due)
                if len(due):
                    found.append(error(observation)[due])
                step = env.step(actor.act(observation))
                actor.ended(step.done_index)
                observation = step.observation
    env.close()
    means = 100 * np.abs(np.concatenate(found)).mean(0)
    return [" ".join(f"{value:.1f}" for value in part) for part in np.split(means, len(NAMES))]


def main() -> int:
    """The table that is asked for."""
    from deft.envs.suites import find_suite

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?")
    parser.add_argument("--expert", action="store_true")
    parser.add_argument("--stops", action="store_true")
    parser.add_argument("--tasks", nargs="+", help="by default those of MT10")
    parser.add_argument("--steps", type=int, default=100, help="of each environment")
    parser.add_argument("--scenes", type=int, default=0, help="compare in first images of this many scenes instead")
    given = parser.parse_args()
    if [given.run is not None, given.expert, given.stops].count(True) != 1:
        parser.error("give a run, --expert or --stops")
    suite = find_suite("metaworld")
    suite.check_installed("benchmarks/metaworld_positions.py")
    tasks = given.tasks or suite.tasks_of("metaworld/MT10")
    print_machine()
    if given.expert:
        print_table(
            [f"successes of {EPISODES}", *(f"σ = {1000 * error:g} mm" for error in ERRORS)],
            [[task, *in_the_suite(EXPERT, task, EPISODES, STEPS, CHUNK, *ERRORS)] for task in tasks],
        )
    elif given.stops:
        found = {task: sorted(map(float, in_the_suite(STOPS, task, EPISODES, STOP_STEPS))) for task in tasks}
        rows = [[task, f"{median(values):.1f} ({values[0]:.1f} to {values[-1]:.1f})"] for task, values in found.items()]
        print_table(["expert", f"distance to the goal, cm, median of {EPISODES} (smallest to largest)"], rows)
    else:
        rows = [[task, *position_errors(given.run, task, given.steps, given.scenes)] for task in tasks]
        print_table(["mean absolute error, cm", *NAMES], rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
