"""A Franka Panda at a table with a head and a wrist camera, on MuJoCo: the default for vision and language.

    env.py        TabletopEnv, registered as deft/Tabletop-v0 (short name `tabletop`)
    scene.py      objects, their positions and appearance, drawn from a seed; domain randomization
    model.py      a scene as a MuJoCo model; panda.py the robot, textures.py the surfaces
    simulation.py the simulated scene and its exact state
    rendering.py  the cameras: one OpenGL context for all environments of a process
    control.py    actions to joint targets; the 32-dim layout
    tasks.py      instructions, success, reward; expert.py the scripted solutions
    images.py     images of random scenes, for training a tokenizer

Importing it chooses and checks MuJoCo's rendering backend (`MUJOCO_GL`) before MuJoCo itself is imported.
"""

from __future__ import annotations

from deft.envs.mujoco_backend import check_backend

check_backend()
