"""The tabletop on MuJoCo Warp: many environments in one simulation, on a GPU or the CPU, with torch tensors as results.

    env.py         WarpTabletopEnv, the vector environment (`env.vector: warp`)
    episodes.py    the first states of episodes, drawn on the host by the same code as on the CPU
    model.py       one MuJoCo model for all scenes, and the numbers in which scenes differ
    simulation.py  physics, control, rewards and successes as kernels
    rendering.py   both cameras by ray tracing, with the lighting of MuJoCo's OpenGL renderer

It needs the extra `warp`.
"""
