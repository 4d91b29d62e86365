import pytest

from deft import machine


@pytest.mark.parametrize(
    ("files", "quotas"),
    [
        ({"job/cpu.max": "150000 100000"}, [2]),  # 1.5 cores are two threads' worth
        ({"job/cpu.max": "max 100000", "cpu.max": "100000 100000"}, [1]),  # the quota of the group above counts
        ({"cpu/job/cpu.cfs_quota_us": "400000", "cpu/job/cpu.cfs_period_us": "100000"}, [4]),  # version 1
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, []),  # no quota
        ({"job/cpu.max": "50000 100000"}, [1]),  # half a core is one
        ({}, []),
    ],
)
def test_quotas_of_control_groups_count_as_cores(tmp_path, files, quotas):
    for name, text in files.items():
        path = tmp_path / "cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = tmp_path / "own"
    own.write_text("4:cpu,cpuacct:/job\n3:memory:/else\n0::/job\n")
    assert machine._quotas(tmp_path / "cgroup", own) == quotas
