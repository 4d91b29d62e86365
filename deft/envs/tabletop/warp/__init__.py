"""The tabletop on MuJoCo Warp: many environments in one simulation, on a GPU or the CPU, with torch tensors as results.

    env.py         WarpTabletopEnv, the vector environment (`env.vector: warp`)
    episodes.py    the first states of episodes, drawn on the host by the same code as on the CPU
    model.py       one MuJoCo model for all scenes, and the numbers in which scenes differ
    simulation.py  the physics; kernels.py control, rewards, successes and observations
    rendering.py   both cameras by ray tracing; tracing.py its kernels

It needs the extra `warp`.
"""
