"""The phases of F1 training: the image tokenizer, the teacher, and what follows. Called by `deft train`."""
