"""How long a `ProcessVectorEnv` takes to close, and to report an environment that raises, dies or hangs.

python benchmarks/process_faults.py
"""

from __future__ import annotations

import os
import signal
import time

import gymnasium
import numpy as np
from common import print_machine

from deft.envs.process import ProcessVectorEnv
from deft.errors import RunError

LIMIT = 3.0  # seconds


class Faulty(gymnasium.Env):
    """Fails at action 1."""

    observation_space = gymnasium.spaces.Box(-1, 1, (1,))
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        if action == 1 and self.fault == "raise":
            raise ValueError("broken")
        if action == 1 and self.fault == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == 1 and self.fault == "hang":
            time.sleep(60)
        return np.zeros(1, np.float32), 0.0, False, False, {}


def seconds(fault: str) -> float:
    """Return the time from a step with a fault, or from close(), to its end."""
    functions = [Faulty, lambda: Faulty(fault), Faulty]
    env = ProcessVectorEnv(functions, num_workers=2, timeout=1.0 if fault == "hang" else 60.0, restart_workers=0)
    env.reset()
    env.step(np.zeros(3, np.int64))
    started = time.monotonic()
    if fault == "close":
        env.close()
    else:
        try:
            env.step(np.ones(3, np.int64))
        except RunError as error:
            print(f"  {error}")
    taken = time.monotonic() - started
    env.close()
    return taken


def main() -> None:
    print_machine()
    for fault in ("close", "raise", "die", "hang"):
        taken = seconds(fault)
        print(f"{fault:6} {taken:6.2f} s  {'ok' if taken < LIMIT else f'more than {LIMIT} s'}")


if __name__ == "__main__":
    main()
