"""`deft doctor`: examine rendering, its speed, hardware and installed extras, and list what to install.

`deft info` uses the same functions, without the measurements of speed.

Code that may crash or print (OpenGL, simulators) runs in a separate process. `deft.cli` calls `examine`.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from deft import trust
from deft.errors import one_line
from deft.machine import available_cores, physical_memory

BACKENDS = {"egl": "EGL", "osmesa": "OSMesa", "glfw": "GLX"}  # value of MUJOCO_GL: OpenGL backend
PROBE_TIMEOUT = 120.0  # seconds: imports, and software rendering on a busy machine
MEASURE_TIME = 1.0  # seconds for each speed
GIB = 2**30
LONGEST_REASON = 160  # characters
LIBRARIES = {"egl": "EGL", "osmesa": "OSMesa"}  # that a backend loads; GLX needs a display before its own
REMEDIES = {
    "egl": "apt install libegl1 libgl1",
    "osmesa": "apt install libosmesa6",
    "glfw": "needs a display (DISPLAY); headless machines use egl",
}
_ICD_FOLDERS = ("/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d", "/usr/local/share/vulkan/icd.d")
_PROBE_CODE = "from deft import doctor; doctor.run_probe(sys.argv[1])"
_PROBE_SCENE = """
<mujoco><visual><quality shadowsize="0" offsamples="0"/></visual><worldbody>
  <light pos="0 0 3" castshadow="false"/><camera name="head" pos="0 -1.5 1" xyaxes="1 0 0 0 0.6 0.8"/>
  <geom type="plane" size="2 2 0.1" rgba="0.5 0.4 0.3 1"/>
  <body pos="0 0 0.2"><freejoint/><geom type="box" size="0.1 0.1 0.1" rgba="0.8 0.1 0.1 1"/></body>
</worldbody></mujoco>"""


def examine() -> dict[str, Any]:
    """Examine this machine and return the results as plain data."""
    rendering = {name: probe("rendering", name) for name in BACKENDS}
    working = [name for name in BACKENDS if rendering[name]["works"]]
    chosen = os.environ.get("MUJOCO_GL", "").lower() or (working[0] if working else None)
    results: dict[str, Any] = {
        "machine": machine_facts(),
        "gpus": gpus(),
        "rendering": rendering,
        "mujoco_gl": chosen,
        "vulkan": _vulkan(),
        "tabletop": probe("tabletop", chosen) if chosen in working else {"works": False, "reason": "no rendering"},
        "extras": extras(),
    }
    results["advice"] = _advice(results)
    return results


def describe(results: Mapping[str, Any]) -> str:
    """Return the results as text."""
    machine, vulkan, tabletop = results["machine"], results["vulkan"], results["tabletop"]
    rows = {
        "machine": f"{machine['system']}, Python {machine['python']}, Deft {machine['deft']}",
        "cores": str(machine["cores"]),
        "memory": f"{machine['memory_gib']:.1f} GiB, {machine['memory_free_gib']:.1f} free",
        "GPU": "; ".join(f"{gpu['name']}, {gpu['memory_gib']:.0f} GiB" for gpu in results["gpus"]) or "none",
    }
    for name, found in results["rendering"].items():
        rows[f"{BACKENDS[name]} (MUJOCO_GL={name})"] = _rendering(name, found)
    drivers = ", ".join(vulkan["drivers"]) or "no driver"
    rows["Vulkan (SAPIEN)"] = f"{'loader' if vulkan['loader'] else 'no loader'}, {drivers}"
    rates = tabletop.get("steps_per_second", {}).items()
    speeds = ", ".join(f"{name.replace('_', ' ')} {rate:.0f}" for name, rate in rates)
    works = f"{speeds} (one process, MUJOCO_GL={results['mujoco_gl']})"
    rows["tabletop, steps/s"] = works if tabletop["works"] else f"no: {tabletop['reason']}"
    for name, extra in results["extras"].items():
        missing = ", ".join(extra["missing"])
        rows[f"extra {name}"] = f"without {missing}: {extra['install']}" if missing else "installed"
    width = max(map(len, rows))
    lines = [f"{name:{width}}  {text}" for name, text in rows.items()]
    return "\n".join([*lines, "", *(f"- {line}" for line in results["advice"])]).rstrip()


def _rendering(name: str, found: Mapping[str, Any]) -> str:
    if not found["works"]:
        return f"no ({found['reason']}): {REMEDIES[name]}"
    return f"works: {found['renderer']}, {found['frames_per_second']:.0f} frames/s of a small scene, 64 px"


# -------------------------------------------------------------------------------------------------------- this machine


def machine_facts() -> dict[str, Any]:
    """Return system, versions, cores and memory."""
    total, free = _memory()
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "deft": version("deft") or "not installed",
        "cores": available_cores(),
        "memory_gib": round(total / GIB, 2),
        "memory_free_gib": round(free / GIB, 2),
    }


def _memory() -> tuple[int, int]:
    """Return the total and free memory of this process in bytes, within the limit of its control group."""
    total = physical_memory()
    free = total
    with contextlib.suppress(OSError, AttributeError, TypeError):
        text = Path("/proc/meminfo").read_text()
        free = 1024 * int(re.search(r"MemAvailable:\s+(\d+) kB", text)[1])  # type: ignore[index]
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, free = min(total, limit), min(free, limit - used)
    return total, free


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs that torch can use."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return [{"name": gpu.name, "memory_gib": round(gpu.total_memory / GIB, 1)} for gpu in found]


def _vulkan() -> dict[str, Any]:
    """Return the Vulkan loader and drivers, which SAPIEN renders with."""
    drivers = {file.stem for folder in _ICD_FOLDERS for file in Path(folder).glob("*.json")}
    return {"loader": ctypes.util.find_library("vulkan") is not None, "drivers": sorted(drivers)}


def version(distribution: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def requirements() -> Iterator[tuple[str | None, str]]:
    """Yield the packages that Deft needs, each with its extra, or None for those that are always installed."""
    for requirement in importlib.metadata.requires("deft") or []:
        extra = re.search(r"extra == ['\"]([\w-]+)['\"]", requirement)
        package = re.match(r"[\w.-]+", requirement)
        if package is not None and package[0] != "deft":
            yield None if extra is None else extra[1], package[0]


def extras() -> dict[str, dict[str, Any]]:
    """Return the missing packages of each extra of Deft, and the command that installs them."""
    found: dict[str, dict[str, Any]] = {}
    for extra, package in requirements():
        if extra is None:
            continue
        entry = found.setdefault(extra, {"missing": [], "install": f'pip install "deft[{extra}]"'})
        if version(package) is None:
            entry["missing"].append(package)
    return found


def _advice(results: Mapping[str, Any]) -> list[str]:
    """Return advice for each part that does not work."""
    rendering, advice = results["rendering"], []
    if not any(found["works"] for found in rendering.values()):
        advice.append(f"no images can be rendered: {REMEDIES['egl']}, or {REMEDIES['osmesa']}")
    elif results["mujoco_gl"] in rendering and not rendering[results["mujoco_gl"]]["works"]:
        works = next(name for name, found in rendering.items() if found["works"])
        advice.append(f"MUJOCO_GL={results['mujoco_gl']} does not work here: export MUJOCO_GL={works}")
    elif results["mujoco_gl"] not in BACKENDS:
        advice.append(f"MUJOCO_GL={results['mujoco_gl']} is not one of {', '.join(BACKENDS)}: unset it")
    chosen = rendering.get(results["mujoco_gl"] or "", {})
    if results["gpus"] and chosen.get("works") and "llvmpipe" in chosen["renderer"]:
        advice.append(
            "there is a GPU, but images are rendered in software: install the driver's OpenGL part (libnvidia-gl), "
            "or in a container set NVIDIA_DRIVER_CAPABILITIES=all"
        )
    if not results["vulkan"]["loader"] or not results["vulkan"]["drivers"]:
        advice.append(
            "there is no Vulkan for ManiSkill and RoboTwin (SAPIEN): apt install libvulkan1 and the GPU's driver, or "
            "mesa-vulkan-drivers 25 or newer for the CPU"
        )
    return advice


# -------------------------------------------------------------------------------------------------------------- probes


def probe(what: str, backend: str) -> dict[str, Any]:
    """Run a probe in a separate process with one rendering backend."""
    try:
        done = subprocess.run(
            [*trust.child_command(_PROBE_CODE), what],
            env={**os.environ, "MUJOCO_GL": backend},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=PROBE_TIMEOUT,
        )
    except subprocess.TimeoutExpired:
        return {"works": False, "reason": f"no answer within {PROBE_TIMEOUT:g} s"}
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        return json.loads(done.stdout.splitlines()[-1])
    last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
    return {"works": False, "reason": last[0]}


def run_probe(what: str) -> None:
    """Run a probe in the new process and print one line of JSON."""
    try:
        probes = {"renderer": _try_rendering, "rendering": _measure_rendering, "tabletop": _measure_tabletop}
        found = {"works": True, **probes[what]()}
    except Exception as error:
        found = {"works": False, "reason": _reason(os.environ.get("MUJOCO_GL", ""), error)}
    print("\n" + json.dumps(found), flush=True)
    os._exit(0)  # ignore a driver that crashes while it is unloaded


def _reason(backend: str, error: Exception) -> str:
    """Return why a backend does not work; PyOpenGL and GLFW have no words for what is simply not there."""
    if backend in LIBRARIES and ctypes.util.find_library(LIBRARIES[backend]) is None:
        return "not installed"
    if backend == "glfw" and not {"DISPLAY", "WAYLAND_DISPLAY"} & os.environ.keys():
        return "no display"
    return one_line(error)[:LONGEST_REASON]


def _try_rendering() -> dict[str, Any]:
    return {"renderer": _renderer()[1]}


def _measure_rendering() -> dict[str, Any]:
    draw, name = _renderer()
    return {"renderer": name, "frames_per_second": _rate(draw)}


def _renderer() -> tuple[Callable[[], Any], str]:
    """Return a function that renders a small scene, and the name of the renderer."""
    import mujoco
    from OpenGL import GL

    model = mujoco.MjModel.from_xml_string(_PROBE_SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    renderer = mujoco.Renderer(model, 64, 64)

    def draw() -> Any:
        renderer.update_scene(data, "head")
        return renderer.render()

    image = draw()
    if image.min() == image.max():
        raise RuntimeError("the image has only one colour")
    name: Any = GL.glGetString(GL.GL_RENDERER)
    return draw, name.decode() if name else "unknown"


def _measure_tabletop() -> dict[str, Any]:
    from deft.config.settings import EnvConfig
    from deft.envs.make import make_env

    rates = {}
    cases: dict[str, dict[str, Any]] = {
        "both_cameras_64_px": {"observation": "images", "image_size": 64},
        "both_cameras_224_px": {"observation": "images", "image_size": 224},
        "state_only": {"observation": "state"},
    }
    for name, kwargs in cases.items():
        env = make_env(EnvConfig(id="tabletop", kwargs={"task": "random_exploration", **kwargs}))
        env.reset(seed=0)
        env.action_space.seed(0)
        rates[name] = _rate(lambda env=env: env.step(env.action_space.sample()))
        env.close()
    return {"steps_per_second": rates}


def _rate(function: Any) -> float:
    """Return the number of calls per second."""
    function()
    count, started = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - started) < MEASURE_TIME:
        function()
        count += 1
    return round(count / elapsed, 1)
