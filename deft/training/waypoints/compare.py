"""`deft compare`: the supervised waypoint policy and PPO's, evaluated on the same held-out episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deft.config.waypoint_settings import CompareConfig
from deft.envs.waypoints.make import env_kwargs_of
from deft.errors import InputError
from deft.evaluation.waypoints import MEASURES, HeldOut, plot_waypoints
from deft.models.waypoint import PPOPolicy
from deft.runs.compute import choose_device
from deft.runs.json_files import write_json
from deft.runs.logging import show_evaluation
from deft.runs.waypoint_files import load_ppo, load_sft, same_sft
from deft.training.waypoints.ppo import check_fits

COMPARISON = "comparison.json"


def compare_policies(config: CompareConfig) -> dict[str, Any]:
    """Return the measures of both policies, and write them and an image of their waypoints."""
    sft, _ = load_sft(config.sft_checkpoint)
    refined, run = load_ppo(config.rl_checkpoint)
    if not same_sft(refined, sft):
        raise InputError(
            f"{config.rl_checkpoint} was not made from {config.sft_checkpoint}: the weights frozen in it are another "
            "supervised policy's"
        )
    device = choose_device(config.device)
    policies = {"supervised": PPOPolicy(sft).to(device), "with PPO": refined.to(device)}
    names = tuple(config.env or run["env"])
    kwargs = run["env_kwargs"]
    if len(names) == 1:  # perhaps one of several that the run had
        kwargs = env_kwargs_of(names[0], run["env"], kwargs)
    kwargs = kwargs | config.env_kwargs
    held_out = HeldOut(names, config.difficulty or run["difficulty"], config.episodes, config.seed, kwargs)
    rl_path = Path(config.rl_checkpoint)
    folder = Path(config.out) if config.out is not None else rl_path if rl_path.is_dir() else rl_path.parent
    try:
        check_fits(sft, next(iter(held_out.envs.values())), "+".join(names))
        held_out.watching = show_evaluation
        results: dict[str, Any] = {label: held_out.evaluate(policy) for label, policy in policies.items()}
        plots = [
            plot_waypoints(policies, env, folder / "plots" / f"comparison_{name}.png", config.seed)
            for name, env in held_out.envs.items()
        ]
    finally:
        held_out.close()
    about = {"env": list(names), "difficulty": config.difficulty or run["difficulty"], "seed": config.seed}
    results |= {"plots": [str(path) for path in plots], "comparison": str(folder / COMPARISON), **about}
    write_json(results, folder / COMPARISON)
    return results


def comparison_table(results: dict[str, Any]) -> str:
    """Return the measures as a table."""
    before, after = results["supervised"], results["with PPO"]
    names = [name for name in before if name.rpartition("/")[2] in MEASURES and name in after]
    width = max(len(name) for name in names)
    lines = [f"{'':{width}}  {'supervised':>12}  {'with PPO':>12}  {'change':>10}"]
    for name in names:
        lines.append(f"{name:{width}}  {before[name]:12.4f}  {after[name]:12.4f}  {after[name] - before[name]:+10.4f}")
    return "\n".join(lines)
