"""The robot: a Franka Emika Panda as MJCF, built from a few primitives with the real arm's dimensions.

Link lengths, joint limits, torque limits and masses are the manufacturer's (inertias are those of bodies of this size);
the shapes are detailed enough for images of a few hundred pixels. `model.py` adds it to a scene, `control.py` reads the
limits.
"""

from __future__ import annotations

import numpy as np

NUM_JOINTS = 7
JOINT_LOWER = np.array([-2.8973, -1.7628, -2.8973, -3.0718, -2.8973, -0.0175, -2.8973])  # radians
JOINT_UPPER = np.array([2.8973, 1.7628, 2.8973, -0.0698, 2.8973, 3.7525, 2.8973])
JOINT_TORQUES = (87.0, 87.0, 87.0, 87.0, 12.0, 12.0, 12.0)  # newton metres
FINGER_TRAVEL = 0.04  # metres that each of the two fingers opens
FINGER_SPEED = 0.2  # metres a second
TCP_HEIGHT = 0.1034  # from the hand's flange to the point between the finger tips

# Above the middle of the table, the hand pointing straight down: q2 - q4 - q6 = 0 keeps it vertical, q7 = 45° square.
HOME = np.array([0.0, -0.30, 0.0, -2.50, 0.0, 2.20, np.pi / 4])

ARM_JOINTS = tuple(f"joint{index}" for index in range(1, NUM_JOINTS + 1))
FINGER_JOINTS = ("left_finger", "right_finger")

# Stiffness and damping of the position controllers: a joint follows its target within about 50 ms.
_STIFFNESS = (2000, 2000, 2000, 2000, 600, 600, 400)
_DAMPING = (110, 110, 110, 110, 35, 35, 25)
# The soft stops of the model lie this far within the real ones, in radians, so that no joint passes these.
_STOP = 0.03
_FINGER_FORCE = 15.0  # newtons a finger, at most
_FINGER_STIFFNESS = 400.0

# Collision bits: see `model.py`. The arm touches the table and objects, never itself.
_TOUCH = 'contype="2" conaffinity="5"'

DEFAULTS = f"""
  <default class="panda">
    <joint armature="0.1" damping="1" solreflimit="0.008 1" solimplimit="0.95 0.99 0.001" />
    <geom contype="0" conaffinity="0" mass="0" rgba="0.92 0.93 0.94 1" material="shell" />
    <default class="dark"><geom rgba="0.22 0.23 0.25 1" /></default>
    <default class="ring"><geom type="cylinder" rgba="0.42 0.44 0.47 1" /></default>
    <default class="finger">
      <joint type="slide" axis="0 1 0" range="0 {FINGER_TRAVEL}" armature="0.15" damping="5"
             solimplimit="0.99 0.999 0.0005" />
    </default>
    <default class="pad">
      <geom type="box" {_TOUCH} friction="1.5 0.02 0.0001" condim="4" solimp="0.97 0.99 0.001" solref="0.01 1"
            rgba="0.15 0.15 0.16 1" priority="1" />
    </default>
  </default>
"""


def _inertial(mass: float, centre: str, inertia: str) -> str:
    return f'<inertial mass="{mass}" pos="{centre}" diaginertia="{inertia}" />'


def _joint(number: int) -> str:
    lower, upper = JOINT_LOWER[number - 1] + _STOP, JOINT_UPPER[number - 1] - _STOP
    return f'<joint name="joint{number}" axis="0 0 1" range="{lower} {upper}" />'


def _finger(side: str, turn: str = "") -> str:
    return f"""<body name="{side}_finger" pos="0 0 0.0584" {turn} gravcomp="1">
      {_inertial(0.03, "0 0.012 0.022", "0.00001 0.00001 0.00001")}
      <joint name="{side}_finger" class="finger" />
      <geom type="box" size="0.009 0.008 0.014" pos="0 0.013 0.014" class="dark" />
      <geom name="{side}_pad" class="pad" size="0.010 0.0065 0.0145" pos="0 0.0067 0.0385" />
    </body>"""


# Each link's frame lies on its joint, which turns about z, as in the Denavit-Hartenberg table of the arm:
# shoulder 0.333 above the base, upper arm 0.316, elbow 0.0825 off the axis, forearm 0.384, wrist 0.088, flange 0.107.
ARM = f"""
  <body name="link0" childclass="panda">
    {_inertial(0.63, "-0.04 0 0.05", "0.003 0.004 0.004")}
    <geom type="cylinder" size="0.075 0.07" pos="0 0 0.07" />
    <body name="link1" pos="0 0 0.333" gravcomp="1">
      {_inertial(4.97, "0.004 0.002 -0.048", "0.070 0.070 0.009")}
      {_joint(1)}
      <geom type="cylinder" size="0.062" fromto="0 0 -0.19 0 0 -0.03" />
      <geom class="ring" size="0.061 0.076" quat="1 1 0 0" />
      <body name="link2" quat="1 -1 0 0" gravcomp="1">
        {_inertial(0.65, "-0.003 -0.029 0.003", "0.008 0.003 0.008")}
        {_joint(2)}
        <geom type="cylinder" size="0.058" fromto="0 -0.04 0 0 -0.18 0" />
        <body name="link3" pos="0 -0.316 0" quat="1 1 0 0" gravcomp="1">
          {_inertial(3.23, "0.028 0.039 -0.067", "0.037 0.036 0.011")}
          {_joint(3)}
          <geom class="ring" size="0.063 0.006" pos="0 0 -0.135" />
          <geom type="capsule" size="0.058" fromto="0 0 -0.12 0.02 0 -0.01" />
          <geom class="ring" size="0.055 0.072" pos="0.0825 0 0" quat="1 1 0 0" />
          <body name="link4" pos="0.0825 0 0" quat="1 1 0 0" gravcomp="1">
            {_inertial(3.59, "-0.053 0.104 0.027", "0.026 0.020 0.028")}
            {_joint(4)}
            <geom type="capsule" size="0.057" fromto="-0.03 0.02 0 -0.0825 0.10 0" />
            <body name="link5" pos="-0.0825 0.384 0" quat="1 -1 0 0" gravcomp="1">
              {_inertial(1.23, "-0.012 0.041 -0.038", "0.036 0.029 0.009")}
              {_joint(5)}
              <geom class="ring" size="0.060 0.006" pos="0 0 -0.215" />
              <geom name="forearm" type="capsule" size="0.054" fromto="0 0.01 -0.22 0 0.04 -0.05" {_TOUCH} />
              <geom class="ring" size="0.050 0.064" quat="1 1 0 0" />
              <body name="link6" quat="1 1 0 0" gravcomp="1">
                {_inertial(1.67, "0.060 -0.014 -0.011", "0.002 0.004 0.005")}
                {_joint(6)}
                <geom name="wrist" type="capsule" size="0.050" fromto="0.01 0 0 0.088 0 0" {_TOUCH} />
                <body name="link7" pos="0.088 0 0" quat="1 1 0 0" gravcomp="1">
                  {_inertial(0.74, "0.011 -0.004 0.062", "0.012 0.010 0.005")}
                  {_joint(7)}
                  <geom class="ring" size="0.045 0.026" pos="0 0 0.075" />
                  <body name="hand" pos="0 0 0.107" quat="0.9238795 0 0 -0.3826834" gravcomp="1">
                    {_inertial(0.73, "0 0 0.03", "0.001 0.0025 0.0017")}
                    <geom name="hand" type="box" size="0.022 0.100 0.028" pos="0 0 0.030" {_TOUCH} />
                    <geom type="box" class="dark" size="0.019 0.092 0.005" pos="0 0 0.060" />
                    <geom type="box" class="dark" size="0.016 0.022 0.012" pos="0.036 0 0.028" />
                    <site name="tcp" pos="0 0 {TCP_HEIGHT}" size="0.005" group="5" />
                    <camera name="wrist_camera" pos="0.075 0 0.030" xyaxes="0 1 0 0.94 0 0.34" fovy="72" />
                    {_finger("left")}
                    {_finger("right", 'quat="0 0 0 1"')}
                  </body>
                </body>
              </body>
            </body>
          </body>
        </body>
      </body>
    </body>
  </body>
"""


def _actuators() -> str:
    lines = []
    for name, lower, upper, torque, stiffness, damping in zip(
        ARM_JOINTS, JOINT_LOWER, JOINT_UPPER, JOINT_TORQUES, _STIFFNESS, _DAMPING, strict=True
    ):
        lines.append(
            f'<position name="{name}" joint="{name}" kp="{stiffness}" kv="{damping}" '
            f'forcerange="-{torque} {torque}" ctrlrange="{lower} {upper}" />'
        )
    for name in FINGER_JOINTS:  # separate actuators centre the held object
        lines.append(
            f'<position name="{name}" joint="{name}" kp="{_FINGER_STIFFNESS}" kv="40" '
            f'forcerange="-{_FINGER_FORCE} {_FINGER_FORCE}" ctrlrange="-0.01 {FINGER_TRAVEL}" />'
        )
    return "<actuator>" + "".join(lines) + "</actuator>"


ACTUATORS = _actuators()
