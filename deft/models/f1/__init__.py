"""The F1 model: three experts with joint attention for understanding, frame prediction and action, and a memory.

`load_f1_policy` builds an `F1Policy` from a preset or a config file, with the weights of a checkpoint.
"""
