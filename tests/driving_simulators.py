"""Driving simulators that the tests of roads, vehicles and traffic start from."""

from deft.envs.driving.simulator import DrivingSimulator


def new_simulator(num_envs: int = 1, difficulty: str = "medium", seed: int = 0) -> DrivingSimulator:
    simulator = DrivingSimulator(num_envs, difficulty)
    simulator.reset(seeds=range(seed, seed + num_envs))
    return simulator
