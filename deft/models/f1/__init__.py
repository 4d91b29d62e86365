"""The F1 model: three experts in joint attention that understand, foresee the next frame and act, with a memory.

`load_f1_policy` builds an `F1Policy` from a preset or a config file, with the weights of a checkpoint.
"""
