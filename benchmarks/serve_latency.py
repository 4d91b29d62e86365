"""How quickly `deft serve` answers a client in another process: vla-tiny, two cameras of 64 px, chunks of 4 actions.

The server process serves vla-tiny of its usual size (new weights: they do not change the time); this process sends
observations and measures round trips, with encoding and decoding on both sides. Each mode is measured twice: one
message after the other (the rate that is possible), and at a fixed rate (`--rate`), with the share of answers that
arrive after the next step should have begun.

    taskset -c 0,1 python benchmarks/serve_latency.py
    python benchmarks/serve_latency.py --messages 50 --modes action   # does it run
"""

from __future__ import annotations

import argparse
import socket
import time

import numpy as np
from common import print_machine, print_table, start_worker, write_json

from deft.client import PolicyClient
from deft.deployment.latency import percentile

SIDE, PROPRIO, ACTION_DIM, CHUNK, TEXT = 64, 16, 8, 4, 64
COLUMNS = ["mode", "Hz", "p50 ms", "p99 ms", "max ms", "at rate: p50 ms", "p99 ms ", "late"]


def serve(listener: socket.socket, threads: int) -> None:
    """Serve vla-tiny until SIGTERM."""
    import torch
    from gymnasium import spaces

    from deft.config.deployment_settings import ServeConfig
    from deft.config.settings import PolicyConfig
    from deft.deployment.server import PolicyServer
    from deft.envs.layout import ObservationLayout
    from deft.evaluation.loaded_policy import LoadedPolicy
    from deft.models.vla.policy import VLAPolicy
    from deft.models.vla.tiny import TinyVLAModel
    from deft.runs.policy_spaces import PolicySpaces

    torch.set_num_threads(threads)
    camera = spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8)
    streams = {"head_rgb": camera, "wrist_rgb": camera, "state": spaces.Box(-9, 9, (PROPRIO,), np.float32)}
    observation = ObservationLayout(spaces.Dict(streams | {"instruction": spaces.Text(TEXT)})).space
    model = TinyVLAModel(
        action_dim=ACTION_DIM,
        chunk_length=CHUNK,
        image_keys=["head_rgb", "wrist_rgb"],
        image_size=SIDE,
        proprio_dim=PROPRIO,
    )
    chunk = spaces.Box(-1, 1, (CHUNK, ACTION_DIM), np.float32)
    policy = VLAPolicy(model, observation_space=observation, action_space=chunk, config=PolicyConfig())
    box = spaces.Box(-1, 1, (ACTION_DIM,), np.float32)
    server = PolicyServer(LoadedPolicy(policy, PolicySpaces(observation, box)), ServeConfig(path="-"))
    server.warm_up()
    print(listener.getsockname()[1], flush=True)
    server.run(listener)


def round_trips(address: str, messages: int, rate: float | None) -> list[float]:
    """Seconds of every answer, one message after the other or `rate` times a second."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (8, 2, SIDE, SIDE, 3)).astype(np.uint8)
    seconds = []
    with PolicyClient(address) as policy:
        policy.reset()
        begin = time.perf_counter()
        for step in range(messages):
            head, wrist = images[step % len(images)]
            state = random.normal(size=PROPRIO).astype(np.float32)
            if rate is not None:
                time.sleep(max(0.0, begin + step / rate - time.perf_counter()))
            started = time.perf_counter()
            policy.get_action(
                {"head_rgb": head, "wrist_rgb": wrist, "state": state, "instruction": "lift the red cube"}
            )
            seconds.append(time.perf_counter() - started)
    return seconds[messages // 10 :]  # without the first tenth


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=60.0, help="messages per second of the second measurement")
    parser.add_argument("--modes", nargs="+", default=["action", "chunk", "ensemble", "async"])
    parser.add_argument("--threads", type=int, default=1, help="threads of the policy")
    parser.add_argument("--out", help="write the figures to this JSON file")
    parser.add_argument("--server", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.server:
        serve(socket.create_server(("127.0.0.1", 0)), args.threads)
        return
    print_machine()
    process = start_worker("serve_latency.py", ["--server", "--threads", args.threads], args.threads)
    try:
        port = int(process.stdout.readline() or 0)
        if not port:
            raise SystemExit(process.stderr.read())
        rows, figures = [], {}
        for mode in args.modes:
            address = f"ws://127.0.0.1:{port}/act?mode={mode}"
            free, paced = (round_trips(address, args.messages, rate) for rate in (None, args.rate))
            figures[mode] = {
                "hz": len(free) / sum(free),
                **{f"p{share}_ms": 1e3 * percentile(free, share / 100) for share in (50, 99, 100)},
                **{f"at_rate_p{share}_ms": 1e3 * percentile(paced, share / 100) for share in (50, 99)},
                "late": sum(one > 1 / args.rate for one in paced) / len(paced),
            }
            hz, *times, late = figures[mode].values()
            rows.append([mode, f"{hz:.0f}", *(f"{one:.1f}" for one in times), f"{late:.1%}"])
        print_table(COLUMNS, rows)
        write_json(args.out, figures)
    finally:
        process.terminate()
        process.communicate(timeout=20)


if __name__ == "__main__":
    main()
