"""One Python environment a release: that release's SGLang, laid over the repository's ``.venv``.

Layered, since everything else is the same for all releases: torch and the other packages take 2.5 GB, and an
environment of its own for each release would hold them once more. A layer holds SGLang, and what the release needs
beyond the rest, and its ``.pth`` file adds the packages below. What is in both is taken from the layer.
"""

from __future__ import annotations

import email.parser
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.tags import sys_tags
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".cache" / "wheels"
LAYERS = ROOT / ".venv" / "releases"
PIP = (sys.executable, "-m", "pip")
QUIET = ("--quiet", "--disable-pip-version-check", "--no-deps")
#: Packages whose pin in SGLang's metadata is shown beside the version that was run.
PINNED = ("torch", "transformers")

#: What a Python would import, printed as JSON. Nothing is imported: SGLang needs the CPU platform's stubs for that.
_FACTS = """
import importlib.metadata as metadata, importlib.util, json, platform, sys

sglang = metadata.distribution("sglang")
spec = importlib.util.find_spec("sglang")
scripts = metadata.entry_points(group="console_scripts", name="sglang")
names = metadata.packages_distributions()
mooncake = names.get("mooncake", [])
print(json.dumps({
    "version": sglang.version,
    "metadata": str(sglang.locate_file("")),
    "package": spec.origin,
    "entry_points": sorted({str(script.dist.locate_file("")) for script in scripts}),
    "plugins": sorted(plugin.name for plugin in metadata.entry_points(group="sglang.srt.plugins")),
    "versions": {
        "Python": platform.python_version(),
        **{name: metadata.version(name) for name in sys.argv[1:]},
        "mooncake": metadata.version(mooncake[0]) if mooncake else "absent",
    },
}))
"""


class EnvironmentFault(RuntimeError):
    """An environment that cannot be built, or would run another SGLang than its release."""


@dataclass(frozen=True)
class Environment:
    """An environment that was checked: its interpreter, and package -> version of what it runs."""

    python: Path
    versions: Mapping[str, str]


def _run(what: str, *command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
        errors = [line for line in lines if line.startswith("ERROR")] or lines
        raise EnvironmentFault(f"{what}: {errors[-1]}")
    return done.stdout


def _cached(requirement: Requirement, cache: Path) -> Path | None:
    """A wheel of the cache that fits the requirement and this Python."""
    tags = set(sys_tags())
    for path in sorted(cache.glob("*.whl")):
        name, version, _, wheel_tags = parse_wheel_filename(path.name)
        fits = name == canonicalize_name(requirement.name) and requirement.specifier.contains(version, prereleases=True)
        if fits and not tags.isdisjoint(wheel_tags):
            return path
    return None


def wheel_of(requirement: str, cache: Path = WHEELS) -> Path:
    """The wheel of a requirement; downloaded, unless the cache has it.

    Raises:
        EnvironmentFault: there is none to download.
    """
    wanted = Requirement(requirement)
    found = _cached(wanted, cache)
    if found is None:
        cache.mkdir(parents=True, exist_ok=True)
        _run(
            f"download of {requirement}",
            *PIP,
            "download",
            *QUIET,
            "--only-binary=:all:",
            "--dest",
            str(cache),
            requirement,
        )
        found = _cached(wanted, cache)
    if found is None:
        raise EnvironmentFault(f"pip download brought no wheel that fits {requirement}")
    return found


def sglang_wheel(release: str, cache: Path = WHEELS) -> Path:
    """SGLang's wheel of a release; raises what :func:`wheel_of` raises."""
    return wheel_of(f"sglang=={release}", cache)


def pins_of(wheel: Path) -> dict[str, str]:
    """Package -> version that SGLang's metadata asks for, of :data:`PINNED`."""
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = email.parser.Parser().parsestr(archive.read(name).decode(), headersonly=True)
    pins = {}
    for requirement in map(Requirement, message.get_all("Requires-Dist", [])):
        if requirement.name in PINNED and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            pins[requirement.name] = str(requirement.specifier).removeprefix("==") or "any"
    return pins


def build(release: str, extra_requirements: Iterable[str] = (), *, layers: Path = LAYERS, cache: Path = WHEELS) -> Path:
    """Directory of a release's environment; made anew where it is missing, unfinished, or of other wheels.

    Raises:
        EnvironmentFault: a wheel cannot be had or installed.
    """
    directory = layers / release
    wheels = [wheel_of(requirement, cache) for requirement in (f"sglang=={release}", *extra_requirements)]
    below = sysconfig.get_path("purelib")
    stamp = directory / "stamp.json"
    wanted = json.dumps({"wheels": [wheel.name for wheel in wheels], "below": below, "python": sys.version})
    if stamp.exists() and stamp.read_text() == wanted:
        return directory
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, symlinks=True, with_pip=False)
    packages = _site_packages(directory)
    flags = ("--no-index", "--no-compile", "--target", str(packages))
    _run(f"installation of SGLang {release}", *PIP, "install", *QUIET, *flags, *map(str, wheels))
    # The name sorts last: a .pth file of the layer itself comes before those of the packages below.
    (packages / "zz_below.pth").write_text(f"import site; site.addsitedir({below!r})\n")
    stamp.write_text(wanted)
    return directory


def _site_packages(directory: Path) -> Path:
    return directory / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"


def check(release: str, directory: Path) -> Environment:
    """The environment, once metadata, entry points and imports have been seen to lead to its own SGLang.

    Raises:
        EnvironmentFault: one of them leads elsewhere; all are named.
    """
    python = directory / "bin" / "python"
    facts = json.loads(_run(f"facts of SGLang {release}", str(python), "-c", _FACTS, *PINNED))
    layer = str(_site_packages(directory))
    problems = []
    if facts["version"] != release or facts["metadata"] != layer:
        problems.append(f"metadata is that of SGLang {facts['version']} in {facts['metadata']}")
    if facts["package"] != os.path.join(layer, "sglang", "__init__.py"):
        problems.append(f"import loads {facts['package']}")
    if any(place != layer for place in facts["entry_points"]):
        problems.append(f"entry points come from {', '.join(facts['entry_points'])}")
    if "cp_shared_kv" not in facts["plugins"]:
        problems.append("SGLang would not find the plugin cp_shared_kv")
    if problems:
        raise EnvironmentFault(f"the environment of SGLang {release} is not as it must be: {'; '.join(problems)}")
    return Environment(python, facts["versions"])
