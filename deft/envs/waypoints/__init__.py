"""Environments that are driven by waypoints: a toy, the driving simulator, highway-env and CARLA."""
