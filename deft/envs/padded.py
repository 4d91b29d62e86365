"""The 32-dim layout of actions and states that F1, its normalizers, RoboTwin and the tabletop share.

Left arm 0 to 7 (a Panda uses 0 to 6), left gripper 8, right arm 9 to 16, right gripper 17; the rest is padding.
"""

PADDED_SIZE = 32
ARM_SIZE = 8
ARM_STARTS = {"left": 0, "right": 9}
GRIPPERS = {"left": 8, "right": 17}
