"""Worlds that are driven by waypoints, behind one protocol: a toy, our driving world, highway-env and CARLA."""
