"""Collection on a Ray cluster: workers that hold environments, weights through the object store, faults mended."""
