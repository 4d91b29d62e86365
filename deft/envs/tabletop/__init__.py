"""A Franka Panda at a table with a head and a wrist camera, on MuJoCo: Deft's default world for vision and language.

    env.py        TabletopEnv, registered as deft/Tabletop-v0 (short name `tabletop`)
    scene.py      what stands where and how it looks, drawn from a seed; domain randomisation
    model.py      a scene as a MuJoCo model; panda.py the robot, textures.py the surfaces
    rendering.py  the cameras: one OpenGL context for all environments of a process
    control.py    actions to joint targets; the 32-dim layout
    tasks.py      instructions, success, reward; expert.py the scripted solutions

Importing it chooses how MuJoCo renders (`MUJOCO_GL`), before MuJoCo itself is imported.
"""

from deft.envs.tabletop.rendering import choose_backend

choose_backend()
