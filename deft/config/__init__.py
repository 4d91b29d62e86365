"""Typed settings: the classes (`settings`), files (`loading`), flags (`flags`), the flat `RLConfig` (`rl_config`)."""
