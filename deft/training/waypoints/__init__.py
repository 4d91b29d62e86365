"""Waypoint policies from recorded driving to PPO: record, train supervised, refine, compare."""
