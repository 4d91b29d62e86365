"""Adapters of other simulators and vector libraries to the interfaces of `deft.envs`."""
